"""The best trees of a batch: the `num_nodes` heaviest prefixes of each request's drafter logits.

    drafter logits --top_candidates--> Candidates --tree_of_candidates--> DraftTrees

A prefix weighs the sum of its log-probabilities, added in float32 from the root down. Of two prefixes the
heavier is better; equal weights are ordered by their rank tuples, smaller ranks first and a prefix before
what it begins. With log-probabilities that never exceed 0 and fall with the rank, no node is better than its
parent or its elder sibling, so the best prefixes are a tree. `reference.heap_tree` is the slow twin.

Every shape follows from the shapes of the inputs; off the CPU nothing is read back by the host. Inside a CUDA
graph run it once before capture, as for any torch code. On a CPU a compiled heap (`heap`) builds the same
trees many times as fast (`benchmarks/tree_build.py`); tensors are for other devices and for want of numba.
Raises ShapeError and ConfigError. Knows no SGLang.

Shape letters: R = requests, D = depths (drafts per block), V = vocabulary, K = candidates per depth,
S = nodes kept so far, root included, N = S at the end; C = entries that are selected from; L = neighbouring
ranks in a run.

Source: DDTree (arXiv 2604.12989); specification, sections D.1 and D.2.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from dflash_online.errors import ConfigError, ShapeError
from dflash_online.tree.candidates import LOW_32_BITS, Candidates, top_candidates
from dflash_online.tree.draft_tree import DraftTrees, root_trees

RUN_SIZE = 8
MAX_NODES = 1 << 14  # keeps places within 31 bits

logger = logging.getLogger(__name__)

Builder = Callable[[Tensor, int], tuple[Tensor, Tensor, Tensor]]
"""From [R, D, K] log-probabilities and a number of nodes to parents, depths and ranks, each [R, N] int64."""


def tree_of_candidates(anchor_R: Tensor, candidates: Candidates, num_nodes: int) -> DraftTrees:
    """The `num_nodes` best prefixes of the candidates, or all prefixes where there are fewer.

    Nodes are ordered by depth, then by rank tuple. A log-probability that is no number counts as -inf.

    Args:
        num_nodes: draft nodes of each tree; the root is not counted.

    Raises:
        ConfigError: `num_nodes` is negative or above `MAX_NODES`.
        ShapeError: anchors and candidates are of different batches.
    """
    token_id_RDK, log_prob_RDK = candidates.token_id_RDK, candidates.log_prob_RDK
    _check(anchor_R, log_prob_RDK, num_nodes)
    if token_id_RDK.shape != log_prob_RDK.shape:
        raise ShapeError(f"tokens {tuple(token_id_RDK.shape)}, log probs {tuple(log_prob_RDK.shape)}")
    max_depth, width = min(log_prob_RDK.shape[1], num_nodes), min(log_prob_RDK.shape[2], max(num_nodes, 1))
    if max_depth == 0 or anchor_R.shape[0] == 0:
        return root_trees(anchor_R)
    log_prob_RDK = log_prob_RDK[:, :max_depth, :width].float().nan_to_num(nan=-torch.inf, neginf=-torch.inf)
    heap_nodes = compiled_heap() if log_prob_RDK.device.type == "cpu" else None
    parent_RN, depth_RN, rank_RN = (heap_nodes or level_nodes)(log_prob_RDK, num_nodes)
    entry_RN = (depth_RN[:, 1:] - 1) * token_id_RDK.shape[2] + rank_RN[:, 1:]
    draft_RN = token_id_RDK.flatten(1).gather(1, entry_RN)
    token_id_RN = torch.cat([anchor_R[:, None].to(torch.int64), draft_RN], dim=1)
    return DraftTrees(token_id_RN, parent_RN, depth_RN, max_depth=max_depth, is_chain=False)


def best_first_trees(anchor_R: Tensor, logits_RDV: Tensor, num_nodes: int) -> DraftTrees:
    """The best tree of `num_nodes` drafts (root not counted) for each request.

    Depths beyond `num_nodes` are not read. No host synchronisation off the CPU.

    Raises:
        ConfigError: `num_nodes` is negative or above `MAX_NODES`.
        ShapeError: anchors and logits are of different batches.
    """
    _check(anchor_R, logits_RDV, num_nodes)
    max_depth = min(logits_RDV.shape[1], num_nodes)
    if max_depth == 0:
        return root_trees(anchor_R)
    return tree_of_candidates(anchor_R, top_candidates(logits_RDV[:, :max_depth], num_nodes), num_nodes)


def warm_up(device: torch.device | str) -> None:
    """Compile what trees on this device need, so that the first request does not wait for it.

    On a CPU 2 to 3 seconds of one core, once per process (numba itself 0.3, the heap 2); elsewhere nothing.
    """
    if torch.device(device).type == "cpu":
        compiled_heap()


@functools.cache
def compiled_heap() -> Builder | None:
    """`heap.heap_nodes`, compiled by the first call of a process; None, and one warning, where that fails."""
    try:
        from dflash_online.tree.heap import heap_nodes
    except (ImportError, OSError) as error:
        # OSError: the library below numba is installed without its binary.
        logger.warning("trees are built in tensors, slowly on a CPU, for want of numba: %s", error)
        return None
    return heap_nodes


def level_nodes(log_prob_RDK: Tensor, num_nodes: int) -> tuple[Tensor, Tensor, Tensor]:
    """Parent, depth and rank of the best trees' nodes, each [R, N] int64, by depth, then by rank tuple."""
    depth_RN, rank_RN = _best_prefixes(log_prob_RDK, num_nodes)
    # Before: a node's parent is the nearest node before it that is one level higher.
    num_kept = depth_RN.shape[1]
    node_N = torch.arange(num_kept, device=depth_RN.device)
    is_above_RNN = (depth_RN[:, None, :] == depth_RN[:, :, None] - 1) & (node_N < node_N[:, None])
    parent_RN = torch.where(is_above_RNN, node_N, -1).amax(dim=2)
    # After: stable by depth, so that rank tuples stay in order within a level.
    order_RN = depth_RN.argsort(dim=1, stable=True)
    place_RN = torch.empty_like(order_RN).scatter_(1, order_RN, node_N.expand_as(order_RN))
    depth_RN, rank_RN = depth_RN.gather(1, order_RN), rank_RN.gather(1, order_RN)
    parent_RN = place_RN.gather(1, parent_RN.gather(1, order_RN).clamp(min=0))
    parent_RN[:, 0] = -1
    return parent_RN, depth_RN, rank_RN


def _check(anchor_R: Tensor, scores_RDV: Tensor, num_nodes: int) -> None:
    if not 0 <= num_nodes <= MAX_NODES:
        raise ConfigError("num_nodes", num_nodes, f"0 to {MAX_NODES}")
    if anchor_R.ndim != 1 or scores_RDV.ndim != 3 or scores_RDV.shape[0] != anchor_R.shape[0]:
        raise ShapeError(f"anchor {tuple(anchor_R.shape)}, scores {tuple(scores_RDV.shape)}")


def _best_prefixes(log_prob_RDK: Tensor, num_nodes: int) -> tuple[Tensor, Tensor]:
    """Depth and last rank of the best prefixes, root first, each node directly before its descendants.

    After level d the best prefixes of depth at most d are kept: none of the others, nor what grows from
    them, can return. Kept nodes stand in the order of their rank tuples, so the slot among
    (kept node, rank of child) is the tie-break; the node itself has an even place and precedes its children,
    which have odd ones.

    Children are taken in runs of neighbouring ranks. The first of a run is its best, so the best n children
    are within the n runs with the best firsts. (Dropping runs by the order of their parents' weights would
    look at fewer still, but float32 rounds unequal weights to equal sums, and then rank tuples decide.)
    """
    num_requests, num_depths, width = log_prob_RDK.shape
    # A power of two, so that slots are taken apart by shifts.
    shift = max((width - 1).bit_length(), RUN_SIZE.bit_length() - 1)
    num_slots = 1 << shift
    # Costs are negated weights: the bits of floats that are not negative rise with them. What does not exist
    # costs NaN, whose bits come after those of infinity.
    cost_RDK = F.pad(log_prob_RDK.abs(), (0, num_slots - width), value=torch.nan)
    slot_C = torch.arange((num_nodes + 1) * num_slots // RUN_SIZE, device=cost_RDK.device)
    own_place_S = torch.arange(num_nodes + 1, device=cost_RDK.device) << (shift + 1)
    odd_L = torch.arange(1, 2 * RUN_SIZE, 2, device=cost_RDK.device)
    bits_RS = torch.zeros((num_requests, 1), dtype=torch.int64, device=cost_RDK.device)
    entry_RS = bits_RS - num_slots  # (depth - 1) * num_slots + rank
    parent_RS = cost_RDK.new_zeros((num_requests, 1))
    num_kept, num_level = 1, 1
    for level in range(num_depths):
        num_runs = num_kept * num_slots // RUN_SIZE
        child_RCL = (parent_RS[:, :, None] + cost_RDK[:, level, None]).view(-1, num_runs, RUN_SIZE)
        own_key_RS = torch.add(own_place_S[:num_kept], bits_RS, alpha=1 << 32)
        num_level = min(num_level * width, num_nodes)
        num_kept = min(num_kept + num_level, num_nodes + 1)
        first_key_RC = _smallest(_key(child_RCL[:, :, 0], slot_C[:num_runs]), num_kept)
        run_RC1 = (first_key_RC & LOW_32_BITS)[:, :, None]
        child_RCL = child_RCL.gather(1, run_RC1.expand(-1, -1, RUN_SIZE))
        child_key_RCL = _key(child_RCL, torch.add(odd_L, run_RC1, alpha=2 * RUN_SIZE))
        key_RS = _smallest(torch.cat([own_key_RS, child_key_RCL.flatten(1)], dim=1), num_kept)
        # Halves turned, so that sorting by place carries the cost along.
        turned_RS = torch.add(key_RS >> 32, key_RS & LOW_32_BITS, alpha=1 << 32).sort(dim=1).values
        bits_RS, place_RS = turned_RS & LOW_32_BITS, turned_RS >> 32
        is_new_RS = (place_RS & 1).bool()
        new_entry_RS = ((place_RS >> 1) & (num_slots - 1)) + level * num_slots
        entry_RS = torch.where(is_new_RS, new_entry_RS, entry_RS.gather(1, place_RS >> (shift + 1)))
        parent_RS = torch.where(is_new_RS, bits_RS.to(torch.int32).view(torch.float32), torch.nan)
    return (entry_RS >> shift) + 1, entry_RS & (num_slots - 1)


def _key(cost: Tensor, place: Tensor) -> Tensor:
    """Integers that order by cost, then by place: no ties."""
    return torch.add(place, cost.view(torch.int32), alpha=1 << 32)


def _smallest(key_RC: Tensor, num_keys: int) -> Tensor:
    """The smallest keys, in no order; all where there are fewer."""
    if key_RC.shape[1] <= num_keys:
        return key_RC
    return key_RC.topk(num_keys, dim=1, largest=False, sorted=False).values
