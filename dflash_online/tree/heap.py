"""The best trees of a batch with one heap per request, in machine code: what `build` uses on a CPU.

    log-probabilities --heap_nodes--> parents, depths, ranks, as of `build.level_nodes`

A tree of 64 nodes takes some hundred heap steps, and a heap step takes less than a tenth of a microsecond
where a tensor operation takes several. Same nodes and same ties as `build.level_nodes`; tests hold the two
against each other and both against `reference.heap_tree`.

Importing this module compiles it with numba, which takes seconds (`build.warm_up`), so `build.compiled_heap`
does it when a tree on a CPU is due, and does without where it fails. Machine code is not kept in files:
numba's cache raises whatever a read-only, full or damaged folder makes it raise, and of two processes that
start after an upgrade one may find the new index and still the old code.

Raises ImportError on import. Shape letters: R = requests, D = depths, K = candidates per depth, N = nodes,
root included; E = entries, which are the prefixes looked at; F = fields of an entry; H = entries in the heap.

Source: DDTree (arXiv 2604.12989); specification, section D.2.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import numba
import numpy as np
import numpy.typing as npt
import torch
from numba.core.errors import NumbaError
from torch import Tensor

Function = TypeVar("Function", bound=Callable[..., Any])
Array = npt.NDArray[Any]

NONE = -1
# Fields of an entry: the entry of the prefix without its last rank; depth; last rank; then, of an entry that
# has become a node, its eldest and its youngest child so far, its next sibling, and its place in the tree.
PARENT, DEPTH, RANK, ELDEST, YOUNGEST, NEXT, PLACE = range(7)
NUM_FIELDS = 7


def heap_nodes(log_prob_RDK: Tensor, num_nodes: int) -> tuple[Tensor, Tensor, Tensor]:
    """Parent, depth and rank of the best trees' nodes, by depth, then by rank tuple.

    Args:
        log_prob_RDK: [R, D, K] float32 on the CPU, at most 0, no NaN, falling along K; D and K at least 1.
        num_nodes: most nodes of a tree, at least 1; the root is not counted.

    Returns:
        Three tensors [R, N] int64. Parents are indices along N, -1 for the root, whose rank is 0.
    """
    # Costs are negated weights.
    cost_RDK = log_prob_RDK.detach().abs().contiguous().numpy()
    num_requests, num_depths, width = cost_RDK.shape
    num_kept = num_level = 1
    for _ in range(num_depths):
        num_level = min(num_level * width, num_nodes)
        num_kept = min(num_kept + num_level, num_nodes + 1)
    node_3RN = np.empty((3, num_requests, num_kept), dtype=np.int64)
    # A node puts at most two entries into the heap: its next sibling and its first child.
    num_entries = 2 * num_kept
    _grow_trees(
        cost_RDK,
        node_3RN,
        np.empty(num_entries, dtype=np.float32),
        np.empty((num_entries, NUM_FIELDS), dtype=np.int32),
        np.empty(num_entries, dtype=np.int32),
    )
    parent_RN, depth_RN, rank_RN = torch.from_numpy(node_3RN)
    return parent_RN, depth_RN, rank_RN


def _compiled(signature: str) -> Callable[[Function], Function]:
    """Compiles a function for this signature alone, at once; what numba raises becomes an ImportError."""

    def compile_now(function: Function) -> Function:
        try:
            return numba.njit(signature)(function)
        except (NumbaError, RuntimeError) as error:
            # LLVM's own complaints are RuntimeErrors.
            raise ImportError(f"numba {numba.__version__} cannot compile {function.__name__}") from error

    return compile_now


@_compiled("boolean(int32, int32, float32[::1], int32[:, ::1])")
def _is_before(one: int, other: int, cost_E: Array, entry_EF: Array) -> bool:
    """Whether an entry of the heap is better than another: cheaper, or the smaller rank tuple."""
    if cost_E[one] != cost_E[other]:
        return cost_E[one] < cost_E[other]
    # What has children has left the heap, so neither begins the other: somewhere their ranks differ.
    while entry_EF[one, DEPTH] > entry_EF[other, DEPTH]:
        one = entry_EF[one, PARENT]
    while entry_EF[other, DEPTH] > entry_EF[one, DEPTH]:
        other = entry_EF[other, PARENT]
    while entry_EF[one, PARENT] != entry_EF[other, PARENT]:
        one, other = entry_EF[one, PARENT], entry_EF[other, PARENT]
    return entry_EF[one, RANK] < entry_EF[other, RANK]


@_compiled("void(int64, int64, int64, float32[:, ::1], float32[::1], int32[:, ::1], int32[::1], int64)")
def _push(
    entry: int,
    parent: int,
    rank: int,
    cost_DK: Array,
    cost_E: Array,
    entry_EF: Array,
    heap_H: Array,
    size: int,
) -> None:
    """Fill in a new entry and put it into a heap of that size."""
    depth = entry_EF[parent, DEPTH] + 1
    # A sum of two float32 numbers, rounded to float32.
    cost_E[entry] = cost_E[parent] + cost_DK[depth - 1, rank]
    entry_EF[entry, PARENT], entry_EF[entry, DEPTH], entry_EF[entry, RANK] = parent, depth, rank
    entry_EF[entry, ELDEST] = entry_EF[entry, NEXT] = NONE
    place = size
    while place > 0:
        above = (place - 1) // 2
        if not _is_before(entry, heap_H[above], cost_E, entry_EF):
            break
        heap_H[place] = heap_H[above]
        place = above
    heap_H[place] = entry


@_compiled("int64(float32[::1], int32[:, ::1], int32[::1], int64)")
def _pop(cost_E: Array, entry_EF: Array, heap_H: Array, size: int) -> int:
    """Take the best entry out of a heap of that size."""
    best, last, place = heap_H[0], heap_H[size - 1], 0
    while 2 * place + 1 < size - 1:
        below = 2 * place + 1
        if below + 1 < size - 1 and _is_before(heap_H[below + 1], heap_H[below], cost_E, entry_EF):
            below += 1
        if _is_before(last, heap_H[below], cost_E, entry_EF):
            break
        heap_H[place] = heap_H[below]
        place = below
    heap_H[place] = last
    return best


@_compiled("void(int64[:, :], int32[:, ::1], int32[::1])")
def _write_nodes(node_3N: Array, entry_EF: Array, queue_N: Array) -> None:
    """Parents, depths and ranks, breadth first and siblings by rank: by depth, then by rank tuple."""
    queue_N[0] = 0
    num_queued = 1
    for place in range(node_3N.shape[1]):
        entry = queue_N[place]
        entry_EF[entry, PLACE] = place
        parent = entry_EF[entry, PARENT]
        node_3N[0, place] = NONE if parent == NONE else entry_EF[parent, PLACE]
        node_3N[1, place] = entry_EF[entry, DEPTH]
        node_3N[2, place] = entry_EF[entry, RANK]
        child = entry_EF[entry, ELDEST]
        while child != NONE:
            queue_N[num_queued] = child
            num_queued += 1
            child = entry_EF[child, NEXT]


@_compiled("void(float32[:, :, ::1], int64[:, :, ::1], float32[::1], int32[:, ::1], int32[::1])")
def _grow_trees(cost_RDK: Array, node_3RN: Array, cost_E: Array, entry_EF: Array, heap_H: Array) -> None:
    """Write parents, depths and ranks of every request's nodes; the last three arrays are room to work in."""
    num_requests, num_depths, width = cost_RDK.shape
    for request in range(num_requests):
        cost_DK = cost_RDK[request]
        cost_E[0] = 0.0
        entry_EF[0, PARENT], entry_EF[0, DEPTH], entry_EF[0, RANK] = NONE, 0, 0
        _push(1, 0, 0, cost_DK, cost_E, entry_EF, heap_H, 0)
        num_entries = 2
        for node in range(1, node_3RN.shape[2]):
            # In the heap wait all entries but the root and the nodes.
            best = _pop(cost_E, entry_EF, heap_H, num_entries - node)
            parent, rank = entry_EF[best, PARENT], entry_EF[best, RANK]
            # Siblings leave the heap in the order of their ranks.
            if rank == 0:
                entry_EF[parent, ELDEST] = best
            else:
                entry_EF[entry_EF[parent, YOUNGEST], NEXT] = best
            entry_EF[parent, YOUNGEST] = best
            size = num_entries - node - 1
            if rank + 1 < width:
                _push(num_entries, parent, rank + 1, cost_DK, cost_E, entry_EF, heap_H, size)
                num_entries, size = num_entries + 1, size + 1
            if entry_EF[best, DEPTH] < num_depths:
                _push(num_entries, best, 0, cost_DK, cost_E, entry_EF, heap_H, size)
                num_entries += 1
        _write_nodes(node_3RN[:, request], entry_EF, heap_H)
