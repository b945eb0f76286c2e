"""Exact acceptance: how many drafts each verify step accepted, by drafter version and policy.

    worker tags each result (StepTag) --> scheduler resolves counts on the host --> AcceptanceCounter
        --> GET /dflash/acceptance and dflash:verify_steps_total on /metrics

Counted where SGLang itself updates a request's histogram, and under the same condition, so the sum over
requests agrees with `meta_info.spec_correct_drafts_histogram`. Runs in the scheduler's loop; bounded by the
number of versions served. Steps that drafted nothing are no verify steps and are not counted.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol


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


class StepCounter(Protocol):
    """The part of a Prometheus counter that is used here."""

    def labels(self, **labels: str) -> Any: ...


class AcceptanceCounter:
    """Histograms per (drafter version, policy). Entry a counts steps of a request with a accepted drafts."""

    def __init__(self, series: StepCounter | None = None) -> None:
        self._histograms: dict[tuple[str, str], list[int]] = defaultdict(list)
        self._series = series

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
            }
            for (version, policy), histogram in self._histograms.items()
        ]


def drafted_requests(result: Any, batch: Any) -> Iterator[tuple[StepTag, Any, int]]:
    """Every request of a resolved verify step that was still running, as SGLang counts for its own histogram.

    Yields:
        The step's tag, the request, its accepted drafts. Nothing for prefill and for steps without drafts.
    """
    tag: StepTag | None = getattr(result, "dflash_step", None)
    if tag is None or not tag.num_nodes:
        return
    for request, num_accepted in zip(batch.reqs, result.num_correct_drafts_per_req_cpu, strict=True):
        if not (request.is_retracted or request.finished()):
            yield tag, request, num_accepted
