"""Exact acceptance: how many drafts each verify step accepted, by drafter version and policy.

    worker tags each result (StepTag) --> scheduler resolves tokens on the host --> ResolvedStep
        --> scheduler ends requests --> AcceptanceCounter --> GET /dflash/acceptance,
        dflash:verify_steps_total

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


@dataclass(frozen=True, slots=True)
class ResolvedStep:
    """One request's part of a verify step, before SGLang looks whether it ends the request."""

    tag: StepTag
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
    for request, num_accepted, appended in zip(
        batch.reqs, result.num_correct_drafts_per_req_cpu, tokens, strict=True
    ):
        if not (request.is_retracted or request.finished()):
            yield ResolvedStep(tag, request, num_accepted, len(appended))
