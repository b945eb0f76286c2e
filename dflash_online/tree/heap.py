"""The best tree of one request with a heap, in plain Python: what `build` uses for few requests on a CPU.

    candidates of one request --heap_nodes--> parents, depths, ranks, in the order of `build`

A tree of 64 nodes takes some hundred heap steps; the same in tensors is some hundred tensor operations, each
of which costs more than a heap step when there is one request. Same nodes and same ties as
`build._best_prefixes`, which tests hold against each other and both against `reference.heap_tree`.

Shape letters: D = depths, K = candidates per depth, N = nodes, root included.
"""

from __future__ import annotations

import heapq
from ctypes import c_float

from torch import Tensor


def heap_nodes(log_prob_DK: Tensor, num_nodes: int) -> tuple[list[int], list[int], list[int]]:
    """Parent, depth and rank of each node of the best tree, root first, by depth, then by rank tuple.

    Args:
        log_prob_DK: [D, K] float32 on the CPU, at most 0, falling along K; D and K at least 1.
        num_nodes: most nodes; the root is not counted.

    Returns:
        Three lists of N. Parents are indices into the lists, -1 for the root, whose rank is 0.
    """
    pop, push = heapq.heappop, heapq.heappush
    # Costs are negated weights. A cost is a sum of two float32 numbers rounded to float32.
    cost_DK = [[-value for value in row] for row in log_prob_DK.tolist()]
    num_depths, width = len(cost_DK), len(cost_DK[0])
    # (cost, rank tuple, cost of the parent); rank tuples are unique.
    heap: list[tuple[float, tuple[int, ...], float]] = [(cost_DK[0][0], (0,), 0.0)]
    found: list[tuple[int, ...]] = []
    while heap and len(found) < num_nodes:
        cost, ranks, above = pop(heap)
        found.append(ranks)
        depth, rank = len(ranks), ranks[-1] + 1
        if rank < width:
            sibling = c_float(above + cost_DK[depth - 1][rank]).value
            push(heap, (sibling, (*ranks[:-1], rank), above))
        if depth < num_depths:
            child = c_float(cost + cost_DK[depth][0]).value
            push(heap, (child, (*ranks, 0), cost))
    found.sort()
    found.sort(key=len)
    place: dict[tuple[int, ...], int] = {(): 0}
    parents, depths, last = [-1], [0], [0]
    for node, ranks in enumerate(found, start=1):
        place[ranks] = node
        parents.append(place[ranks[:-1]])
        depths.append(len(ranks))
        last.append(ranks[-1])
    return parents, depths, last
