"""Which tree pays now: the decision of policy `auto`. No SGLang, no torch, no clock of its own.

    choose(batch size, version) --> Choice --> the server runs one step --> record(Step)
                 ^                                                             |
                 +------------- review, every REVIEW_STEPS steps <-------------+

A small ladder (off, chain, tree of 4, 8, 16, ...) is compared by tokens per second = tokens committed per
step / seconds per step. Seconds are measured per choice and batch bucket (batch sizes up to 1, 2, 4, 8, ...).
Tokens are measured per choice, and predicted from acceptance by depth and rank (`ranks`) where a choice has
few steps: mean of both, the prediction weighing `MODEL_WEIGHT` steps. All estimates forget: what is old
weighs half at the latest after its limit of samples, seconds also by age. Tokens and ranks start anew with
each drafter version; seconds stay.

Exploration: a step runs another choice, one that lacks samples first, else the least recently tried, only
while the time spent so is within `WARM_SHARE` of the bucket's decode time as long as some choice lacks
samples, `STEADY_SHARE` after that. Choices that could not win even if every draft were accepted are not
tried. Hysteresis: another choice is taken only if it is better by `MARGIN`.

Raises ConfigError. Called by one thread.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from dflash_online.errors import ConfigError
from dflash_online.tree.ladder import Choice, bucket_of, ladder
from dflash_online.tree.policy import PolicyMode
from dflash_online.tree.ranks import PathRanks, RankTable, expected_accepted, expected_of_chain

REVIEW_STEPS = 8
MARGIN = 1.05
WARM_SHARE, STEADY_SHARE = 0.25, 0.05
MIN_TIMED = 2
"""Timed steps that a choice needs at a batch size; its very first step there warms caches and is left out."""
MIN_TRIALS = 16
"""Steps that a token estimate needs, measured or predicted."""
MODEL_WEIGHT = 16
TIME_LIMIT, TOKEN_LIMIT, RANK_LIMIT = 64, 512, 1024
OUTLIER = 3.0
"""A step slower than this many times the estimate counts as that many times: the machine was busy. One faster
by as much replaces the estimate: no step is faster than the machine."""
HALF_LIFE_S = 30.0
"""Age at which the measured seconds of a choice weigh half against its next step."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """One decode step as it went."""

    choice: Choice
    batch_size: int
    seconds: float
    """Draft, verify and commit together."""
    drafter_version: str
    paths: Sequence[PathRanks] = ()
    """One per request that went on; empty when nothing was drafted."""

    def __post_init__(self) -> None:
        if self.batch_size < 1:
            raise ConfigError("batch_size", self.batch_size, ">= 1")
        if not 0.0 < self.seconds < float("inf"):
            raise ConfigError("seconds", self.seconds, "> 0 and finite")


@dataclass(slots=True)
class Mean:
    """A mean that halves the weight of its past at `limit` samples."""

    limit: int
    total: float = 0.0
    weight: float = 0.0

    def add(self, value: float) -> None:
        if self.weight >= self.limit:
            self.fade(0.5)
        self.total, self.weight = self.total + value, self.weight + 1

    def fade(self, share: float) -> None:
        """Let the past weigh that share of what it did."""
        self.total, self.weight = self.total * share, self.weight * share

    @property
    def value(self) -> float:
        return self.total / self.weight


@dataclass(slots=True)
class Timing:
    """What a choice costs at a batch size."""

    seconds: Mean = field(default_factory=lambda: Mean(TIME_LIMIT))
    num_steps: int = 0
    last_tried: float = float("-inf")

    def add(self, seconds: float, now: float) -> None:
        age, self.last_tried = now - self.last_tried, now
        self.num_steps += 1
        if self.num_steps == 1:
            return
        if self.is_known:
            if seconds * OUTLIER < self.seconds.value:
                self.seconds = Mean(TIME_LIMIT, MIN_TIMED * seconds, MIN_TIMED)
            # Not below one step, so that what was known stays known.
            self.seconds.fade(max(0.5 ** (age / HALF_LIFE_S), 1.0 / self.seconds.weight))
            seconds = min(seconds, OUTLIER * self.seconds.value)
        self.seconds.add(seconds)

    @property
    def is_known(self) -> bool:
        return self.seconds.weight >= MIN_TIMED


@dataclass(slots=True)
class Bucket:
    """What is known at batch sizes up to `size`, and what is picked there."""

    size: int
    pick: Choice
    reason: str
    timings: dict[Choice, Timing]
    num_steps: int = 0
    num_explored: int = 0
    decode_s: float = 0.0
    explored_s: float = 0.0
    next_trial: Choice | None = None


class AutoChooser:
    """Chooses before each step, learns after it. `clock` gives seconds that never run backwards."""

    def __init__(self, num_drafts: int, max_nodes: int, clock: Callable[[], float]) -> None:
        self.rungs = ladder(num_drafts, max_nodes)
        self._num_drafts, self._clock = num_drafts, clock
        self._buckets: dict[int, Bucket] = {}
        self._start_version("")

    def _start_version(self, version: str) -> None:
        self.version = version
        self.ranks = RankTable()
        self._tokens = {choice: Mean(TOKEN_LIMIT) for choice in self.rungs}
        self._predicted: dict[Choice, float] = {}

    # ---- before a step --------------------------------------------------------------------------------

    def choose(self, batch_size: int, drafter_version: str) -> Choice:
        """The choice of the next step: the pick of this batch size, or now and then a trial."""
        if drafter_version != self.version:
            self._start_version(drafter_version)
            for bucket in self._buckets.values():
                self._review(bucket)
        bucket = self._bucket(batch_size)
        trial = bucket.next_trial
        if trial is None or not bucket.num_steps:
            return bucket.pick
        cost = self._expected_seconds(bucket, trial)
        share = WARM_SHARE if self._lacks_samples(bucket) else STEADY_SHARE
        if bucket.explored_s + cost > share * (bucket.decode_s + cost):
            return bucket.pick
        return trial

    def _bucket(self, batch_size: int) -> Bucket:
        size = bucket_of(batch_size)
        if size not in self._buckets:
            nearest = min(self._buckets.values(), key=lambda known: abs(known.size - size), default=None)
            pick = nearest.pick if nearest is not None else self._chain
            timings = {choice: Timing() for choice in self.rungs}
            self._buckets[size] = Bucket(size, pick, "start: nothing measured at this batch size", timings)
            self._review(self._buckets[size])
        return self._buckets[size]

    @property
    def _chain(self) -> Choice:
        return next(choice for choice in self.rungs if choice.mode is PolicyMode.CHAIN)

    def pick_of(self, batch_size: int) -> tuple[Choice, str]:
        """The pick at this batch size, and the reason in words; its first word is one of a few."""
        bucket = self._bucket(batch_size)
        return bucket.pick, bucket.reason

    def drafting(self, choice: Choice) -> Choice:
        """The choice itself, or the chain where it would draft nothing."""
        return choice if choice.num_nodes else self._chain

    def _expected_seconds(self, bucket: Bucket, choice: Choice) -> float:
        """Measured, else scaled by verify width from the widest narrower choice, the dearest guess."""
        if bucket.timings[choice].is_known:
            return bucket.timings[choice].seconds.value
        known = [c for c in self.rungs if bucket.timings[c].is_known]
        if not known:
            return bucket.decode_s / bucket.num_steps
        near = max(
            (c for c in known if c.num_nodes <= choice.num_nodes), key=lambda c: c.width, default=known[0]
        )
        return bucket.timings[near].seconds.value * max(1.0, choice.width / near.width)

    # ---- after a step ---------------------------------------------------------------------------------

    def record(self, step: Step) -> bool:
        """Learn from a step. Returns whether its bucket was reviewed.

        Raises:
            ConfigError: the choice is not of this ladder.
        """
        if step.choice not in self._tokens:
            raise ConfigError("choice", step.choice.name, f"one of {[choice.name for choice in self.rungs]}")
        bucket = self._bucket(step.batch_size)
        bucket.timings[step.choice].add(step.seconds, self._clock())
        bucket.num_steps += 1
        bucket.decode_s += step.seconds
        is_trial = step.choice != bucket.pick
        if is_trial:
            bucket.num_explored += 1
            bucket.explored_s += step.seconds
        if bucket.num_steps % (TIME_LIMIT * REVIEW_STEPS) == 0:
            bucket.decode_s, bucket.explored_s = bucket.decode_s / 2, bucket.explored_s / 2
        if step.drafter_version == self.version:
            for path in step.paths:
                self._tokens[step.choice].add(1.0 + len(path.accepted))
                self.ranks.add(path)
            if self.ranks.num_trials(0) > RANK_LIMIT:
                self.ranks.halve()
        if is_trial or bucket.num_steps % REVIEW_STEPS == 0:
            self._review(bucket)
            return True
        return False

    def _predict(self) -> None:
        prob_DK = self.ranks.probabilities()
        of_tree = expected_accepted(prob_DK, self.rungs[-1].num_nodes)
        self._predicted = {
            choice: 1.0
            + (
                of_tree[choice.num_nodes]
                if choice.mode is PolicyMode.TREE
                else expected_of_chain(prob_DK, choice.num_nodes)
            )
            for choice in self.rungs
        }

    def tokens_per_step(self, choice: Choice) -> tuple[float, str] | None:
        """Expected committed tokens of a request's step, and where that comes from; None: not known yet."""
        if not choice.num_nodes:
            return 1.0, "exact"
        measured = self._tokens[choice]
        rank = 1 if choice.mode is PolicyMode.TREE else 0
        can_predict = self.ranks.num_trials(rank) >= MIN_TRIALS and choice in self._predicted
        if not can_predict:
            return (measured.value, "measured") if measured.weight >= MIN_TRIALS else None
        total = measured.total + MODEL_WEIGHT * self._predicted[choice]
        source = "measured" if measured.weight >= MODEL_WEIGHT else "predicted"
        return total / (measured.weight + MODEL_WEIGHT), source

    def _rate(self, bucket: Bucket, choice: Choice) -> float | None:
        """Tokens per second of one request; None: not known yet."""
        tokens, timing = self.tokens_per_step(choice), bucket.timings[choice]
        return tokens[0] / timing.seconds.value if tokens is not None and timing.is_known else None

    def _lacks_samples(self, bucket: Bucket) -> bool:
        return any(
            self._rate(bucket, choice) is None and not self._is_hopeless(bucket, choice)
            for choice in self.rungs
        )

    def _is_hopeless(self, bucket: Bucket, choice: Choice) -> bool:
        """Whether it could not win with every draft accepted: wider passes are not faster than narrower."""
        best = max((rate for c in self.rungs if (rate := self._rate(bucket, c)) is not None), default=0.0)
        narrower = (c for c in self.rungs if c.num_nodes < choice.num_nodes and bucket.timings[c].is_known)
        least_s = max((bucket.timings[c].seconds.value for c in narrower), default=0.0)
        return choice.most_tokens(self._num_drafts) < best * least_s

    def _review(self, bucket: Bucket) -> None:
        self._predict()
        rates = {c: rate for c in self.rungs if (rate := self._rate(bucket, c)) is not None}
        own = rates.get(bucket.pick)
        best = max(rates, key=lambda choice: rates[choice], default=bucket.pick)
        if own is None:
            if bucket.num_steps:
                bucket.reason = f"kept: {bucket.pick.name} lacks samples of drafter {self.version or 'none'}"
        elif best != bucket.pick and rates[best] > MARGIN * own:
            bucket.reason = (
                f"faster: {best.name} at {rates[best]:.1f} tok/s per request, {bucket.pick.name} at {own:.1f}"
            )
            bucket.pick = best
        elif best != bucket.pick:
            percent = 100 * (MARGIN - 1)
            bucket.reason = (
                f"kept: {best.name} is better than {bucket.pick.name} by less than {percent:.0f} %"
            )
        elif len(rates) == 1:
            bucket.reason = f"kept: only {best.name} is measured"
        else:
            second = max((c for c in rates if c != best), key=lambda choice: rates[choice])
            bucket.reason = (
                f"best: {best.name} at {rates[best]:.1f} tok/s per request, next {second.name} at"
                f" {rates[second]:.1f}"
            )
        bucket.next_trial = self._pick_trial(bucket, rates)

    def _pick_trial(self, bucket: Bucket, rates: dict[Choice, float]) -> Choice | None:
        """The one that lacks samples and has most of them, so that one is known before the next begins; when
        none lacks any, the least recently tried."""
        others = [c for c in self.rungs if c != bucket.pick and not self._is_hopeless(bucket, c)]
        lacking = [c for c in others if c not in rates]
        if lacking:
            return max(lacking, key=lambda c: bucket.timings[c].num_steps)
        return min(others, key=lambda c: bucket.timings[c].last_tried, default=None)

    # ---- what it knows --------------------------------------------------------------------------------

    def describe(self) -> dict[str, Any]:
        """The `auto` object of /dflash/info."""
        return {
            "drafter_version": self.version,
            "batch_sizes": [self.describe_bucket(size) for size in sorted(self._buckets)],
            "accepted_by_depth_and_rank": _rounded(self.ranks.probabilities()),
        }

    def describe_bucket(self, size: int) -> dict[str, Any]:
        """One batch bucket: the pick, why, and every choice with its estimates."""
        bucket = self._buckets[size]
        choices = []
        for choice in self.rungs:
            tokens, timing, rate = (
                self.tokens_per_step(choice),
                bucket.timings[choice],
                self._rate(bucket, choice),
            )
            choices.append(
                {
                    "policy": choice.name,
                    "tokens_per_second_per_request": None if rate is None else round(rate, 2),
                    "tokens_per_step": None if tokens is None else round(tokens[0], 3),
                    "tokens_from": "unknown" if tokens is None else tokens[1],
                    "step_ms": round(1e3 * timing.seconds.value, 3) if timing.seconds.weight else None,
                    "num_steps": timing.num_steps,
                    "num_accepted_samples": round(self._tokens[choice].weight),
                    "is_hopeless": self._is_hopeless(bucket, choice),
                }
            )
        return {
            "max_batch_size": size,
            "policy": bucket.pick.name,
            "reason": bucket.reason,
            "num_steps": bucket.num_steps,
            "num_explored": bucket.num_explored,
            "explored_time_share": round(bucket.explored_s / bucket.decode_s, 4) if bucket.decode_s else 0.0,
            "choices": choices,
        }


def _rounded(prob_DK: Sequence[Sequence[float]]) -> list[list[float]]:
    return [[round(prob, 4) for prob in row] for row in prob_DK]
