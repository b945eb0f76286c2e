"""Exact acceptance: how many drafts each verify step accepted, by drafter version and policy.

    worker tags each result (StepTag, StepRanks) --> scheduler resolves tokens on the host --> ResolvedStep
        --> scheduler ends requests --> AcceptanceCounter --> GET /dflash/acceptance and /metrics

Steps are taken where SGLang updates a request's histogram, and under the same condition. A step that ends
its request at a length limit, a stop token or a stop string counts the drafts that the answer kept, so that
the offline walk over the same text gives the same counts; `meta_info.spec_correct_drafts_histogram` counts
all that fitted, and differs in that one step. Runs in the scheduler's loop; bounded by the number of
versions served. Steps that drafted nothing are no verify steps and are not counted.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from dflash_online.tree.draft_tree import DraftTrees
from dflash_online.tree.ranks import PathRanks, RankTable
from dflash_online.tree.walk import Walk, path_ranks

MAX_LABELLED_VERSIONS = 64
"""Drafter versions with ranks of their own on /metrics; later ones are counted as `other`."""


@dataclass(frozen=True, slots=True)
class StepTag:
    """What a verify step was drafted with."""

    drafter_version: str
    num_nodes: int
    """Draft nodes of each tree of the step; 0 when nothing was drafted."""
    is_chain: bool

    @property
    def policy(self) -> str:
        """`off`, `chain`, or `tree:16` with the number of nodes, on which tau depends."""
        if not self.num_nodes:
            return "off"
        return "chain" if self.is_chain else f"tree:{self.num_nodes}"


class StepRanks:
    """Ranks along the path of each request of a verify step, on their way to the host."""

    def __init__(self, trees: DraftTrees, committed: Walk) -> None:
        self._chain_length = trees.max_depth if trees.is_chain else None
        self._pair: tuple[Any, Any] | None = None
        if not trees.is_chain:
            rank_RP, offered_RP = path_ranks(trees, committed.path_RP)
            # Complete when the step's other results are: copied by the same stream before them.
            self._pair = rank_RP.to("cpu", non_blocking=True), offered_RP.to("cpu", non_blocking=True)

    def path(self, row: int, num_accepted: int, *, is_cut: bool) -> PathRanks:
        """The path of the request in that row.

        Args:
            is_cut: the walk went on but its rest was not kept: no miss after `num_accepted` drafts.
        """
        num_offered = num_accepted + (not is_cut)
        if self._chain_length is not None:
            return PathRanks((0,) * num_accepted, (1,) * min(num_offered, self._chain_length))
        assert self._pair is not None
        if isinstance(self._pair[0], torch.Tensor):
            self._pair = self._pair[0].tolist(), self._pair[1].tolist()
        ranks, offered = self._pair[0][row], self._pair[1][row]
        return PathRanks(
            tuple(ranks[1 : num_accepted + 1]), tuple(width for width in offered[:num_offered] if width)
        )


class StepCounter(Protocol):
    """The part of a Prometheus counter that is used here."""

    def labels(self, **labels: str) -> Any: ...


class AcceptanceCounter:
    """Histograms per (drafter version, policy). Entry a counts steps of a request with a accepted drafts."""

    def __init__(self, series: StepCounter | None = None, rank_series: StepCounter | None = None) -> None:
        self._histograms: dict[tuple[str, str], list[int]] = defaultdict(list)
        self._ranks: dict[tuple[str, str], RankTable] = defaultdict(RankTable)
        self._series, self._rank_series = series, rank_series
        self._labelled: set[str] = set()

    def add_path(self, tag: StepTag, path: PathRanks) -> None:
        """Count the ranks of one verify step of one request."""
        self._ranks[tag.drafter_version, tag.policy].add(path)
        if self._rank_series is None:
            return
        if len(self._labelled) < MAX_LABELLED_VERSIONS:
            self._labelled.add(tag.drafter_version)
        version = tag.drafter_version if tag.drafter_version in self._labelled else "other"
        for depth, rank in enumerate(path.accepted, start=1):
            self._rank_series.labels(
                drafter_version=version, policy=tag.policy, depth=depth_label(depth), rank=rank_label(rank)
            ).inc()

    def add(self, tag: StepTag, num_accepted: int) -> None:
        """Count one verify step of one request."""
        histogram = self._histograms[tag.drafter_version, tag.policy]
        histogram.extend([0] * (num_accepted + 1 - len(histogram)))
        histogram[num_accepted] += 1
        if self._series is not None:
            self._series.labels(
                drafter_version=tag.drafter_version, policy=tag.policy, accepted=str(num_accepted)
            ).inc()

    def report(self) -> list[dict[str, Any]]:
        """One JSON object per version and policy, as GET /dflash/acceptance answers."""
        return [
            {
                "drafter_version": version,
                "policy": policy,
                "histogram": histogram,
                "num_steps": (num_steps := sum(histogram)),
                "num_committed": (num_committed := num_steps + sum(a * n for a, n in enumerate(histogram))),
                "tau": num_committed / num_steps,
                "accepted_by_depth_and_rank": self._ranks[version, policy].accepted_DK,
                "offered_by_depth_and_rank": self._ranks[version, policy].offered_DK,
            }
            for (version, policy), histogram in self._histograms.items()
        ]


def depth_label(depth: int) -> str:
    """Depth from 1 as a label: exact up to 8, then `9+`."""
    return str(depth) if depth <= 8 else "9+"


def rank_label(rank: int) -> str:
    """Rank from 0 as a label: `0`, `1`, `2-3`, `4-7`, `8+`."""
    return str(rank) if rank <= 1 else "2-3" if rank <= 3 else "4-7" if rank <= 7 else "8+"


@dataclass(frozen=True, slots=True)
class ResolvedStep:
    """One request's part of a verify step, before SGLang looks whether it ends the request."""

    tag: StepTag
    ranks: StepRanks
    row: int
    """Of the request in the step's batch."""
    request: Any
    num_accepted: int
    num_tokens: int
    """Appended to the request, bonus included; a grammar may have taken some back."""

    def num_kept(self) -> int:
        """Accepted drafts within the answer; call when the request's end is decided."""
        end = self.request.finished_len
        num_beyond = 0 if end is None else max(0, len(self.request.output_ids) - end)
        return max(0, min(self.num_accepted, self.num_tokens - num_beyond))


def resolved_steps(tokens: Any, result: Any, batch: Any) -> Iterator[ResolvedStep]:
    """Every request of a resolved verify step that was still running, as SGLang counts for its own histogram.

    Args:
        tokens: by request, what SGLang is about to append.

    Yields:
        Nothing for prefill and for steps without drafts.
    """
    tag: StepTag | None = getattr(result, "dflash_step", None)
    if tag is None or not tag.num_nodes:
        return
    for row, (request, num_accepted, appended) in enumerate(
        zip(batch.reqs, result.num_correct_drafts_per_req_cpu, tokens, strict=True)
    ):
        if not (request.is_retracted or request.finished()):
            yield ResolvedStep(tag, result.dflash_ranks, row, request, num_accepted, len(appended))
