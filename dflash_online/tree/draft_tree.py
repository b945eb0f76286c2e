"""The draft trees of a batch, one per request, all of the same width.

    drafter logits --chain_trees / root_trees--> DraftTrees --visibility--> verify forward --> walk

Pure torch, no host synchronisation. Knows neither SGLang nor key-value caches.

Shape letters: R = requests, N = nodes of a tree, root included; D = drafts per block.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from dflash_online.errors import ShapeError


@dataclass(frozen=True, slots=True)
class DraftTrees:
    """One tree per request; a parent always precedes its children, siblings carry distinct tokens.

    Two first drafts and a child of the first: `parent_RN = [[-1, 0, 0, 1]]`, `depth_RN = [[0, 1, 1, 2]]`.
    """

    token_id_RN: torch.Tensor  # [R, N] int64; node 0 is the anchor, the last committed token
    parent_RN: torch.Tensor  # [R, N] int64; -1 for the root, else smaller than the node's own index
    depth_RN: torch.Tensor  # [R, N] int64; 0 for the root; position of a node = anchor position + depth
    max_depth: int  # drafts on the longest path that any tree of this batch can have
    is_chain: bool  # node i is the only child of node i - 1: the verify forward is plainly causal

    @property
    def num_nodes(self) -> int:
        """N, root included."""
        return int(self.token_id_RN.shape[1])


def chain_trees(anchor_R: torch.Tensor, draft_RD: torch.Tensor) -> DraftTrees:
    """A single path: the anchor, then every draft in order.

    Raises:
        ShapeError: anchors and drafts are of different batches.
    """
    if draft_RD.ndim != 2 or draft_RD.shape[0] != anchor_R.shape[0]:
        raise ShapeError(f"anchor {tuple(anchor_R.shape)}, draft {tuple(draft_RD.shape)}")
    token_id_RN = torch.cat([anchor_R[:, None], draft_RD], dim=1).to(torch.int64)
    depth_N = torch.arange(token_id_RN.shape[1], device=anchor_R.device)
    depth_RN = depth_N.expand(token_id_RN.shape[0], -1)
    return DraftTrees(token_id_RN, depth_RN - 1, depth_RN, max_depth=int(draft_RD.shape[1]), is_chain=True)


def root_trees(anchor_R: torch.Tensor) -> DraftTrees:
    """The anchor alone: verifying it is plain decoding."""
    return chain_trees(anchor_R, anchor_R.new_empty((anchor_R.shape[0], 0)))


def links(trees: DraftTrees) -> tuple[torch.Tensor, torch.Tensor]:
    """The same trees as first-child and next-sibling links, the form that grammars are walked in.

    Returns:
        First child and next sibling of each node, both [R, N] int64; -1 where there is none. Children of
        a node follow each other in index order.
    """
    parent_RN, num_nodes = trees.parent_RN, trees.num_nodes
    node_N = torch.arange(num_nodes, device=parent_RN.device)
    is_child_RNN = parent_RN[:, None, :] == node_N[:, None]
    is_later_RNN = (parent_RN[:, None, :] == parent_RN[:, :, None]) & (node_N > node_N[:, None])

    def first(fits_RNN: torch.Tensor) -> torch.Tensor:
        return torch.where(fits_RNN.any(dim=2), fits_RNN.to(torch.int8).argmax(dim=2), -1)

    return first(is_child_RNN), first(is_later_RNN)


def visibility(trees: DraftTrees) -> torch.Tensor:
    """Which nodes each node sees among its own tree: itself and its ancestors.

    Returns:
        [R, N, N] bool, entry (i, j) True when j is i or an ancestor of i.
    """
    node_N = torch.arange(trees.num_nodes, device=trees.parent_RN.device)
    seen_RNN = (trees.parent_RN[:, :, None] == node_N) | (node_N[:, None] == node_N)
    reached = 1
    while reached < trees.max_depth:
        # What is seen by what is seen: twice as many generations each time.
        seen_RNN = torch.bmm(seen_RNN.float(), seen_RNN.float()) > 0
        reached *= 2
    return seen_RNN
