"""What a benchmark found: figures of each pass, comparison of outputs, table and JSON.

    measure --PassResult--> BenchReport --> rich table | JSON

tau is pooled over verify steps from exact histograms, bonus token included. Latencies are distributions:
median and 99th percentile. Outputs are compared only between passes of temperature 0 and of equal
concurrency, the first policy being the reference. A speedup is over `off` at the same concurrency and
temperature, prompt by prompt; estimates carry 95 % bootstrap intervals. Knows neither network nor clock.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

from rich.table import Table

from dflash_online.bench.client import Answer, Exchange
from dflash_online.bench.policy import OFF_POLICY
from dflash_online.evaluate.interval import Interval, mean_interval, ratio_interval, tau_interval

BOOTSTRAP_SEED = 0
"""Of every interval: the same passes give the same report."""


@dataclass(frozen=True, slots=True)
class AcceptanceDelta:
    """Verify steps of one drafter version within a pass: entry a counts steps with a accepted drafts."""

    drafter_version: str
    policy: str
    histogram: tuple[int, ...]


def pooled_tau(histograms: Iterable[Sequence[int]]) -> float | None:
    """Mean tokens committed per verify step over all histograms, bonus included; None without steps."""
    counts: Counter[int] = Counter()
    for histogram in histograms:
        counts.update(dict(enumerate(histogram)))
    num_steps = counts.total()
    return 1 + sum(accepted * count for accepted, count in counts.items()) / num_steps if num_steps else None


@dataclass(frozen=True, slots=True)
class Spread:
    """Median and 99th percentile, in milliseconds."""

    median_ms: float
    p99_ms: float

    @classmethod
    def of(cls, values_s: Iterable[float]) -> Spread | None:
        """None without values. Percentiles by the nearest rank: a value that was really seen."""
        ordered = sorted(values_s)
        if not ordered:
            return None
        rank = {share: math.ceil(share * len(ordered)) - 1 for share in (0.5, 0.99)}
        return cls(*(1000 * ordered[max(0, rank[share])] for share in (0.5, 0.99)))


@dataclass(frozen=True, kw_only=True, slots=True)
class PassResult:
    """One pass over all prompts."""

    policy: str
    concurrency: int
    wall_s: float
    exchanges: tuple[Exchange | None, ...]
    """In the order of the prompts; None where time ran out before sending."""
    acceptance: tuple[AcceptanceDelta, ...]
    has_own_cache: bool
    """No prompt could be served from a prefix cache that an earlier pass had filled."""
    temperature: float = 0.0
    num_nodes: int | None = None
    """Draft nodes per verify step, as the server says; None when it says nothing."""

    @property
    def answers(self) -> list[Answer]:
        return [answer for exchange in self.exchanges if exchange for answer in exchange.answers]

    @property
    def num_requests(self) -> int:
        return sum(exchange.num_requests for exchange in self.exchanges if exchange)

    @property
    def errors(self) -> dict[str, int]:
        """Failed requests by kind."""
        return dict(Counter(exchange.failure for exchange in self.exchanges if exchange and exchange.failure))

    @property
    def tok_per_s(self) -> float:
        """Output tokens of all requests over the wall time of the pass."""
        return sum(answer.num_tokens for answer in self.answers) / self.wall_s

    @property
    def tau(self) -> float | None:
        return pooled_tau(delta.histogram for delta in self.acceptance)

    @property
    def tau_interval(self) -> Interval | None:
        """Of tau, verify steps resampled."""
        columns = zip_longest(*(delta.histogram for delta in self.acceptance), fillvalue=0)
        return tau_interval([sum(column) for column in columns], seed=BOOTSTRAP_SEED)

    @property
    def prompt_tpot_s(self) -> list[float | None]:
        """Seconds per token after the first of each prompt, all turns together; None where one failed."""
        return [_prompt_tpot(exchange) for exchange in self.exchanges]

    @property
    def mean_tpot(self) -> Interval | None:
        """Mean over prompts in seconds, prompts resampled."""
        values = [value for value in self.prompt_tpot_s if value is not None]
        return mean_interval(values, seed=BOOTSTRAP_SEED)

    def to_json(self) -> dict[str, Any]:
        ttft = Spread.of(answer.ttft_s for answer in self.answers)
        tpot = Spread.of(answer.tpot_s for answer in self.answers if answer.tpot_s is not None)
        return {
            "policy": self.policy,
            "concurrency": self.concurrency,
            "temperature": self.temperature,
            "num_nodes": self.num_nodes,
            "tau": self.tau,
            "tau_interval": _json(self.tau_interval),
            "acceptance": [
                {
                    "drafter_version": delta.drafter_version,
                    "policy": delta.policy,
                    "histogram": list(delta.histogram),
                    "tau": pooled_tau([delta.histogram]),
                }
                for delta in self.acceptance
            ],
            "tok_per_s": self.tok_per_s,
            "ttft_ms": {"median": ttft.median_ms, "p99": ttft.p99_ms} if ttft else None,
            "tpot_ms": {"median": tpot.median_ms, "p99": tpot.p99_ms} if tpot else None,
            "tpot_mean_s": _json(self.mean_tpot),
            "output_tokens": sum(answer.num_tokens for answer in self.answers),
            "requests_sent": self.num_requests,
            "requests_failed": sum(self.errors.values()),
            "errors": self.errors,
            "prompts_unsent": sum(exchange is None for exchange in self.exchanges),
            "wall_s": self.wall_s,
            "has_own_cache": self.has_own_cache,
        }


@dataclass(frozen=True, slots=True)
class OutputComparison:
    """How often two passes said the same."""

    num_compared: int
    num_identical: int
    first_difference: str | None

    def __add__(self, other: OutputComparison) -> OutputComparison:
        return OutputComparison(
            self.num_compared + other.num_compared,
            self.num_identical + other.num_identical,
            self.first_difference or other.first_difference,
        )


def compare_outputs(reference: PassResult, other: PassResult) -> OutputComparison:
    """Compare prompt by prompt what both passes answered completely."""
    result = OutputComparison(0, 0, None)
    for index, (left, right) in enumerate(zip(reference.exchanges, other.exchanges, strict=True)):
        if left is None or right is None or left.failure or right.failure:
            continue
        difference = None if left.text == right.text else _difference(index, reference, other)
        result += OutputComparison(1, int(difference is None), difference)
    return result


def _difference(index: int, reference: PassResult, other: PassResult) -> str:
    left, right = reference.exchanges[index], other.exchanges[index]
    assert left is not None
    assert right is not None
    pairs = zip(left.text, right.text, strict=False)
    shorter = min(len(left.text), len(right.text))
    place = next((i for i, (a, b) in enumerate(pairs) if a != b), shorter)
    cut = slice(max(0, place - 20), place + 20)
    return (
        f"prompt {index}, character {place}: {reference.policy} has {left.text[cut]!r}, "
        f"{other.policy} has {right.text[cut]!r} (concurrency {other.concurrency})"
    )


@dataclass(frozen=True, slots=True)
class BenchReport:
    """A whole benchmark."""

    url: str
    model: str
    info: dict[str, Any] | None  # GET /dflash/info at the start; None when the server is not ours
    num_prompts: int
    max_tokens: int
    temperature: float  # of the first passes; each pass has its own
    passes: tuple[PassResult, ...]

    def comparison(self) -> OutputComparison:
        """All greedy passes against the first policy's pass of the same concurrency."""
        result = OutputComparison(0, 0, None)
        references: dict[int, PassResult] = {}
        for one in self.passes:
            if one.temperature > 0:
                continue
            reference = references.setdefault(one.concurrency, one)
            if reference is not one:
                result += compare_outputs(reference, one)
        return result

    def find(self, policy: str) -> PassResult | None:
        """The first pass with that policy."""
        return next((one for one in self.passes if one.policy == policy), None)

    def speedup(self, one: PassResult) -> Interval | None:
        """Mean TPOT of `off` over that of this pass, paired by prompt; None without such a pass of `off`."""
        plain = (other for other in self.passes if other.policy == OFF_POLICY and _is_comparable(other, one))
        off = next(plain, None)
        if off is None or off is one:
            return None
        pairs = [
            (before, after)
            for before, after in zip(off.prompt_tpot_s, one.prompt_tpot_s, strict=True)
            if before is not None and after is not None
        ]
        return ratio_interval([b for b, _ in pairs], [a for _, a in pairs], seed=BOOTSTRAP_SEED)

    def to_json(self) -> dict[str, Any]:
        comparison = self.comparison()
        passes = [one.to_json() | {"speedup": _json(self.speedup(one))} for one in self.passes]
        return {
            "url": self.url,
            "model": self.model,
            "server": self.info,
            "prompts": self.num_prompts,
            "max_tokens": self.max_tokens,
            "temperature": self.temperature,
            "temperatures": sorted({one.temperature for one in self.passes}),
            "passes": passes,
            "outputs_compared": comparison.num_compared,
            "outputs_identical": comparison.num_identical,
            "first_difference": comparison.first_difference,
            "requests_sent": sum(one["requests_sent"] for one in passes),
            "requests_failed": sum(one["requests_failed"] for one in passes),
        }

    def table(self) -> Table:
        """For people."""
        table = Table(
            title=f"{self.model}: {self.num_prompts} prompts, at most {self.max_tokens} tokens each"
        )
        several = len({one.temperature for one in self.passes}) > 1
        for name in (
            "policy",
            "concurrency",
            *(["temperature"] if several else []),
            "tau",
            "tok/s",
            "TTFT ms",
            "p99",
            "TPOT ms",
            "p99",
            "speedup",
            "failed",
        ):
            table.add_column(name, justify="left" if name == "policy" else "right")
        for one in self.passes:
            ttft = Spread.of(answer.ttft_s for answer in one.answers)
            tpot = Spread.of(answer.tpot_s for answer in one.answers if answer.tpot_s is not None)
            failed = ", ".join(f"{count} {kind}" for kind, count in one.errors.items()) or "0"
            tau = "n/a" if one.tau is None else f"{one.tau:.3f}{_range(one.tau_interval)}"
            speedup = self.speedup(one)
            cells = [
                one.policy,
                str(one.concurrency),
                *([f"{one.temperature:g}"] if several else []),
                tau,
                f"{one.tok_per_s:.1f}",
                *_cells(ttft),
                *_cells(tpot),
                f"{speedup.estimate:.2f}{_range(speedup)}" if speedup else "n/a",
            ]
            table.add_row(*cells, failed)
        return table


def _cells(spread: Spread | None) -> tuple[str, str]:
    return (f"{spread.median_ms:.1f}", f"{spread.p99_ms:.1f}") if spread else ("n/a", "n/a")


def _range(interval: Interval | None) -> str:
    return f" ({interval.low:.2f}-{interval.high:.2f})" if interval else ""


def _json(interval: Interval | None) -> dict[str, float | int] | None:
    return interval.to_json() if interval else None


def _is_comparable(left: PassResult, right: PassResult) -> bool:
    return (left.concurrency, left.temperature) == (right.concurrency, right.temperature)


def _prompt_tpot(exchange: Exchange | None) -> float | None:
    if exchange is None or exchange.failure:
        return None
    num_later = sum(max(0, answer.num_tokens - 1) for answer in exchange.answers)
    later_s = sum(answer.last_token_s - answer.ttft_s for answer in exchange.answers)
    return later_s / num_later if num_later else None
