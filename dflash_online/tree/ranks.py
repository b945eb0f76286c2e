"""Acceptance by depth and by rank, and what it predicts for trees that were not tried.

    (rank, offered width) of each depth --RankTable.add--> counts --probabilities--> expected_accepted

A draft's rank is its place among the candidates of its slot, 0 = the drafter's best. At depth d a tree offers
the ranks 0..width-1 below the node that the walk stands on: each of these is one trial, and the accepted one
is a hit. Ranks that were not offered say nothing, and are no trials.

The model of independent slots: P(rank r at depth d) is the same at every step and does not depend on the
ranks above. Then a prefix of ranks is accepted with the product of its probabilities, and the best tree of b
nodes accepts the sum of its b heaviest prefixes. A real tree follows the drafter's confidence at each step
and so does a little better than this. Pure Python; knows no torch and no SGLang.

Shape letters: D = depths, K = ranks.

Source of the objective: DDTree (arXiv 2604.12989); specification, section D.1.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class PathRanks:
    """One verify step of one request. `PathRanks((0, 2), (3, 3, 1))`: two drafts accepted, then a miss."""

    accepted: tuple[int, ...]
    """Rank of the accepted draft of depth 1, 2, ..."""
    offered: tuple[int, ...]
    """Ranks offered at depth 1, 2, ...: one entry more than `accepted` when the walk ended at a miss."""


@dataclass(slots=True)
class RankTable:
    """Counts by depth (from 1, entry 0) and rank. Rows grow as paths do."""

    accepted_DK: list[list[float]] = field(default_factory=list)
    offered_DK: list[list[float]] = field(default_factory=list)

    def add(self, path: PathRanks) -> None:
        """Count one step of one request."""
        for depth, width in enumerate(path.offered):
            if depth == len(self.offered_DK):
                self.accepted_DK.append([])
                self.offered_DK.append([])
            offered, accepted = self.offered_DK[depth], self.accepted_DK[depth]
            missing = width - len(offered)
            if missing > 0:
                offered.extend([0] * missing)
                accepted.extend([0] * missing)
            for rank in range(width):
                offered[rank] += 1
            if depth < len(path.accepted):
                accepted[path.accepted[depth]] += 1

    def num_trials(self, rank: int) -> float:
        """Steps that offered this rank at depth 1."""
        return self.offered_DK[0][rank] if self.offered_DK and rank < len(self.offered_DK[0]) else 0.0

    def halve(self) -> None:
        """Forget half of everything, so that new steps weigh more."""
        for rows in (self.accepted_DK, self.offered_DK):
            rows[:] = [[count / 2 for count in row] for row in rows]

    def probabilities(self) -> list[list[float]]:
        """[D][K] share of trials accepted; 0 where there were none."""
        return [
            [hit / trials if trials else 0.0 for hit, trials in zip(hits, offers, strict=True)]
            for hits, offers in zip(self.accepted_DK, self.offered_DK, strict=True)
        ]


def expected_accepted(prob_DK: Sequence[Sequence[float]], num_nodes: int) -> list[float]:
    """Expected accepted drafts of the best tree of b nodes, for b = 0 .. `num_nodes`; never falling.

    A rank more probable than the one before it is moved ahead: which order the ranks have does not matter to
    the best tree.
    """
    rows = [sorted(row, reverse=True) for row in prob_DK if row]
    expected, total = [0.0], 0.0
    heap = [(-rows[0][0], 0, 0, 1.0)] if rows else []
    while len(expected) <= num_nodes:
        if heap:
            negative, depth, rank, above = heapq.heappop(heap)
            total -= negative
            if rank + 1 < len(rows[depth]):
                heapq.heappush(heap, (-above * rows[depth][rank + 1], depth, rank + 1, above))
            if depth + 1 < len(rows):
                heapq.heappush(heap, (negative * rows[depth + 1][0], depth + 1, 0, -negative))
        expected.append(total)
    return expected


def expected_of_chain(prob_DK: Sequence[Sequence[float]], num_nodes: int) -> float:
    """Expected accepted drafts of a chain of `num_nodes` best drafts."""
    total, reach = 0.0, 1.0
    for row in prob_DK[:num_nodes]:
        reach *= row[0] if row else 0.0
        total += reach
    return total
