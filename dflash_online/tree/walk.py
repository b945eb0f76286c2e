"""The walk: from one target token per node to the accepted path and the bonus token.

Lossless for any tree, because the produced tokens are the target's own: at each node the target names
one token (argmax, or one sample of its distribution); while a child carries that token, move to it. The
first token without a child is the bonus. Source: DDTree specification, section D.4.

Shape letters: R = requests, N = nodes, P = max_depth + 1 = most nodes of a path.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from dflash_online.tree.draft_tree import DraftTrees


@dataclass(frozen=True, slots=True)
class Walk:
    """What one verify step commits.

    Path `[0, 2, 5]` with 2 accepted drafts produces the tokens of nodes 2 and 5, then the bonus.
    """

    path_RP: torch.Tensor  # [R, P] int64 node indices, root first; beyond the path the last node repeats
    num_accepted_R: torch.Tensor  # [R] int64, drafts only
    produced_RP: torch.Tensor  # [R, P] int64: accepted tokens, the bonus, then padding
    bonus_R: torch.Tensor  # [R] int64: the next anchor

    @property
    def num_committed_R(self) -> torch.Tensor:
        """[R] int64: tokens of this step, bonus included; also the rows that become context."""
        return self.num_accepted_R + 1


def walk(trees: DraftTrees, target_token_RN: torch.Tensor) -> Walk:
    """Follow the target's tokens through the trees.

    Args:
        target_token_RN: [R, N] int64, the target's next token at each node.

    Returns:
        The committed path of each request. No host synchronisation.
    """
    num_requests, _ = target_token_RN.shape
    request_R = torch.arange(num_requests, device=target_token_RN.device)
    node_R = torch.zeros_like(request_R)
    num_accepted_R = torch.zeros_like(request_R)
    is_alive_R = torch.ones_like(request_R, dtype=torch.bool)
    path = [node_R]
    for _ in range(trees.max_depth):
        wanted_R = target_token_RN[request_R, node_R]
        fits_RN = (trees.parent_RN == node_R[:, None]) & (trees.token_id_RN == wanted_R[:, None])
        is_alive_R = is_alive_R & fits_RN.any(dim=1)
        # Siblings carry distinct tokens, so at most one child fits.
        node_R = torch.where(is_alive_R, fits_RN.to(torch.int8).argmax(dim=1), node_R)
        num_accepted_R = num_accepted_R + is_alive_R
        path.append(node_R)
    path_RP = torch.stack(path, dim=1)
    # The token after path node i is the target's token there: an accepted draft, or at the end the bonus.
    produced_RP = target_token_RN.gather(1, path_RP)
    return Walk(path_RP, num_accepted_R, produced_RP, target_token_RN[request_R, node_R])


def path_ranks(trees: DraftTrees, path_RP: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rank of each path node's token among its slot's candidates, and how many ranks were offered below it.

    In a best tree the children of a node are the ranks 0, 1, ... in index order, so that a node's rank is its
    number of elder siblings.

    Returns:
        Ranks (0 for the root) and numbers of children, both [R, P] int64. No host synchronisation.
    """
    node_N = torch.arange(trees.num_nodes, device=path_RP.device)
    parent_RP = trees.parent_RN.gather(1, path_RP)
    is_sibling_RPN = trees.parent_RN[:, None, :] == parent_RP[:, :, None]
    is_child_RPN = trees.parent_RN[:, None, :] == path_RP[:, :, None]
    return (is_sibling_RPN & (node_N < path_RP[:, :, None])).sum(dim=2), is_child_RPN.sum(dim=2)
