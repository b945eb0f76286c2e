"""Policy `auto` in the server: times each step, asks the chooser before it and tells it afterwards.

    worker --begin--> AutoChooser.choose --> TimedStep --one decode step--> finish
        --> scheduler resolves the counts --record--> AutoChooser.record --> gauges on /metrics

The decision is `dflash_online.tree.auto`. Runs in the scheduler's loop, one rank only: ranks would measure
different times and choose differently.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from dflash_online.tree.auto import AutoChooser, Step
from dflash_online.tree.ladder import Choice, bucket_of
from dflash_online.tree.policy import Policy, PolicyMode
from dflash_online.tree.ranks import PathRanks


class StepTimer:
    """Seconds from its making to `finish`; on a GPU between two events of the stream."""

    def __init__(self, device: str) -> None:
        self._on_cpu = torch.device(device).type == "cpu"
        self._start, self._end = self._mark(device), None
        self._device = device

    def _mark(self, device: str) -> Any:
        if self._on_cpu:
            return time.perf_counter()
        event = torch.get_device_module(device).Event(enable_timing=True)
        event.record()
        return event

    def finish(self) -> None:
        self._end = self._mark(self._device)

    @property
    def seconds(self) -> float:
        """Call it after `finish`, and on a GPU once the step's results are on the host."""
        if self._on_cpu:
            return float(self._end - self._start)
        return float(self._start.elapsed_time(self._end)) / 1e3


@dataclass(frozen=True, slots=True)
class TimedStep:
    """One decode step under `auto`."""

    choice: Choice
    batch_size: int
    drafter_version: str
    timer: StepTimer
    is_forced: bool
    """Drafting was not allowed at this batch size; such a step says nothing of the choice."""

    @property
    def policy(self) -> Policy:
        """What to draft in this step."""
        return Policy(mode=self.choice.mode, num_nodes=self.choice.num_nodes)


class AutoPolicy:
    """The chooser of one scheduler process, made anew when the ladder changes."""

    def __init__(self, device: str, series: AutoSeries | None = None) -> None:
        self._device, self._series = device, series
        self._shape: tuple[int, int] | None = None
        self.chooser: AutoChooser | None = None

    def prepare(self, num_drafts: int, max_nodes: int) -> None:
        """Begin with a ladder of these bounds; what is known of the same ladder is kept."""
        if self._shape != (num_drafts, max_nodes):
            self.chooser = AutoChooser(num_drafts, max_nodes, time.monotonic)
            self._shape = num_drafts, max_nodes

    def begin(self, policy: Policy, batch_size: int, step: int, drafter_version: str) -> TimedStep | None:
        """The choice for a step that starts now; None under any other policy."""
        if policy.mode is not PolicyMode.AUTO:
            return None
        assert self.chooser is not None, "the policy was set through `prepare`"
        choice = self.chooser.choose(batch_size, drafter_version)
        is_forced = not policy.may_draft(batch_size, step)
        if is_forced:
            choice = Choice(PolicyMode.OFF, 0)
        elif policy.is_above_limit(batch_size):
            # A probe: its point is to draft.
            choice = self.chooser.drafting(choice)
        return TimedStep(choice, batch_size, drafter_version, StepTimer(self._device), is_forced)

    def record(self, timed: TimedStep, paths: Sequence[PathRanks]) -> None:
        """Learn from a step whose counts are on the host."""
        chooser = self.chooser
        if chooser is None or timed.is_forced or timed.choice not in chooser.rungs:
            return
        step = Step(
            choice=timed.choice,
            batch_size=timed.batch_size,
            seconds=timed.timer.seconds,
            drafter_version=timed.drafter_version,
            paths=paths,
        )
        was_reviewed = chooser.record(step)
        if self._series is not None:
            bucket = chooser.describe_bucket(bucket_of(step.batch_size)) if was_reviewed else None
            self._series.count(step, chooser.pick_of(step.batch_size), bucket)

    def describe(self, policy: Policy) -> dict[str, Any] | None:
        """The `auto` object of /dflash/info; None under any other policy."""
        if policy.mode is not PolicyMode.AUTO or self.chooser is None:
            return None
        return self.chooser.describe()


class AutoSeries:
    """What `auto` does, on /metrics. Labels are bounded by the ladder and the powers of two."""

    def __init__(self) -> None:
        # The library reads SGLang's folder for several processes when it is imported: hence late.
        from prometheus_client import Counter, Gauge

        labels = ("max_batch_size", "policy")

        def gauge(name: str, text: str) -> Any:
            return Gauge(name, text, labelnames=labels, multiprocess_mode="mostrecent")

        self._steps = Counter(
            "dflash:auto_steps",
            "Decode steps under policy auto; reason: trial, or why the policy was the pick.",
            labelnames=(*labels, "reason"),
        )
        self._is_pick = gauge("dflash:auto_is_pick", "1 for the policy that auto picks, else 0.")
        self._rate = gauge(
            "dflash:auto_tokens_per_second_per_request", "Estimated tokens per second of one request."
        )
        self._samples = gauge("dflash:auto_timed_steps", "Steps timed under this policy.")

    def count(self, step: Step, pick: tuple[Choice, str], bucket: dict[str, Any] | None) -> None:
        """Count one step; set the gauges where its bucket was reviewed."""
        size, (picked, reason) = str(bucket_of(step.batch_size)), pick
        why = reason.split(":")[0] if step.choice == picked else "trial"
        self._steps.labels(max_batch_size=size, policy=step.choice.name, reason=why).inc()
        if bucket is None:
            return
        for choice in bucket["choices"]:
            labels = {"max_batch_size": size, "policy": choice["policy"]}
            self._is_pick.labels(**labels).set(choice["policy"] == bucket["policy"])
            self._samples.labels(**labels).set(choice["num_steps"])
            if choice["tokens_per_second_per_request"] is not None:
                self._rate.labels(**labels).set(choice["tokens_per_second_per_request"])
