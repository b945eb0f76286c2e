"""Metrics that only this process can measure: latencies and retries.

feed --observe--> [ Instruments ] --> GET /metrics      (all other series are read from the store)
"""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Histogram

_SECONDS = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 60, 150, 600)
_STEP_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 60)


class Instruments:
    """One registry per service, never the global one."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.capture_seconds = Histogram(
            "dflash_trainer_capture_seconds",
            "Wall time of a successful capture, from request to last byte",
            buckets=_SECONDS,
            registry=self.registry,
        )
        self.step_seconds = Histogram(
            "dflash_trainer_step_seconds",
            "Wall time of a training step, without the wait for records to arrive",
            buckets=_STEP_SECONDS,
            registry=self.registry,
        )
        self.retries = Counter(
            "dflash_trainer_capture_retries",
            "Captures asked for again",
            ["reason"],
            registry=self.registry,
        )
