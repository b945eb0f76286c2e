"""The slow, obvious twin of `build`: one request, one heap, plain Python.

    log-probabilities and tokens of one request --heap_tree--> nodes, best first

Exists for tests and benchmarks; serving does not call it. Raises nothing of its own.

Shape letters: D = depths, K = candidates per depth.

Source: DDTree (arXiv 2604.12989); specification, section D.2.
"""

from __future__ import annotations

import ctypes
import heapq
from typing import NamedTuple

import torch
from torch import Tensor


class HeapNode(NamedTuple):
    """One node. The first token of depth 1: `HeapNode(parent=0, path=(17,), weight=-0.3)`."""

    parent: int  # index of the parent; 0 is the root, 1 the first node of the list
    path: tuple[int, ...]  # tokens from depth 1 down to this node
    weight: float  # sum of log-probabilities, rounded to float32 at each step from the root down


def heap_tree(log_prob_DK: Tensor, token_DK: Tensor, num_nodes: int) -> list[HeapNode]:
    """The `num_nodes` best prefixes, best first; equal weights by rank tuple, a prefix before its extensions.

    A sibling's weight is its parent's weight plus its own log-probability. The specification's update by
    differences equals that in exact arithmetic, but rounds differently.

    Args:
        log_prob_DK: [D, K] float32, at most 0, falling along K; NaN counts as -inf.
        token_DK: [D, K] int64.
        num_nodes: most nodes to return; the root is not counted.
    """
    num_depths, width = log_prob_DK.shape
    log_prob = log_prob_DK.double().nan_to_num(nan=-torch.inf, neginf=-torch.inf).tolist()
    token = token_DK.tolist()
    found: list[HeapNode] = []
    if num_nodes < 1 or num_depths < 1 or width < 1:
        return found
    # (negative weight, rank tuple, parent index, weight of the parent); the rank tuple is unique.
    heap: list[tuple[float, tuple[int, ...], int, float]] = [(-log_prob[0][0], (0,), 0, 0.0)]
    while heap and len(found) < num_nodes:
        negative, ranks, parent, above = heapq.heappop(heap)
        depth, rank, weight = len(ranks), ranks[-1], -negative
        prefix = found[parent - 1].path if parent else ()
        found.append(HeapNode(parent, (*prefix, token[depth - 1][rank]), weight))
        if rank + 1 < width:
            sibling = _float32(above + log_prob[depth - 1][rank + 1])
            heapq.heappush(heap, (-sibling, (*ranks[:-1], rank + 1), parent, above))
        if depth < num_depths:
            child = _float32(weight + log_prob[depth][0])
            heapq.heappush(heap, (-child, (*ranks, 0), len(found), weight))
    return found


def _float32(value: float) -> float:
    """Nearest float32; a sum of two float32 numbers in double precision, rounded so, is float32 addition."""
    return ctypes.c_float(value).value
