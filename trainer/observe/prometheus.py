"""The store as Prometheus series, read at each scrape.

    GET /metrics --> registry --> [ StoreCollector ] --> store, guard

Series describe the run that is alive, else the last one; a new run starts its counters at zero. Names and
meanings: docs/trainer-api.md.
"""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from trainer.observe.instruments import Instruments
from trainer.runs.controller import RunController
from trainer.runs.state import RunState
from trainer.store.checkpoint_rows import CheckpointState
from trainer.store.event_rows import EventKind
from trainer.store.run_rows import RunRow
from trainer.store.store import Store

_PREFIX = "dflash_trainer_"
_OUTCOMES = (
    CheckpointState.PUBLISHED,
    CheckpointState.HELD_BACK,
    CheckpointState.REJECTED,
    CheckpointState.SUPERSEDED,
    CheckpointState.ROLLED_BACK,
)


class StoreCollector(Collector):
    """All series that the store can tell."""

    def __init__(self, store: Store, controller: RunController, instruments: Instruments) -> None:
        self._store, self._controller, self._instruments = store, controller, instruments
        self._observed: tuple[str, int] = ("", 0)  # run and step up to which step_seconds has counted

    def collect(self) -> Iterator[Metric]:
        """Called by the registry at each scrape."""
        run = self._controller.latest()
        if run is None:
            return
        yield from self._training(run)
        yield from self._records(run)
        yield from self._rollout(run)
        yield from self._health(run)

    def describe(self) -> list[Metric]:
        """Nothing in advance: names depend on no run, but values do."""
        return []

    def observe_steps(self) -> None:
        """Count the steps since the last scrape into the histogram; called before each scrape."""
        run = self._controller.latest()
        if run is None:
            return
        last = self._observed[1] if self._observed[0] == run.run_id else 0
        for metrics in self._store.steps.since(run.run_id, last):
            self._instruments.step_seconds.observe(metrics.step_s)
            last = metrics.step
        self._observed = (run.run_id, last)

    def _training(self, run: RunRow) -> Iterator[Metric]:
        latest = self._store.steps.latest(run.run_id)
        yield _gauge("step", "Optimizer steps taken", 0 if latest is None else latest.step)
        if latest is None:
            return
        yield _gauge("loss", "Loss of the last step, nats per unit of weight", latest.loss)
        yield _gauge("grad_norm", "Gradient norm of the last step, before clipping", latest.grad_norm)
        yield _gauge("learning_rate", "Learning rate of the last step", latest.learning_rate)
        yield _gauge(
            "data_wait_seconds", "Seconds that the last step waited for its records", latest.data_wait_s
        )
        agreement = "Share of labels of the last step that equal the target's tokens"
        yield _gauge("label_agreement", agreement, latest.label_agreement)
        yield _counter("tokens_seen", "Supervised slots trained on, repetitions counted", latest.tokens_seen)
        accuracy = GaugeMetricFamily(
            _PREFIX + "slot_accuracy",
            "Top-1 accuracy of the last step by slot, teacher-forced",
            labels=["slot"],
        )
        for slot, share in enumerate(latest.slot_accuracy, start=1):
            accuracy.add_metric([str(slot)], share)
        yield accuracy

    def _records(self, run: RunRow) -> Iterator[Metric]:
        totals = self._store.records.totals(run.run_id)
        yield _counter("records", "Train records that arrived", totals.num_total)
        yield _counter("tokens", "Tokens of the train records that arrived", totals.num_tokens)
        yield _gauge("buffer_bytes", "Bytes of record files in the buffer", totals.buffer_bytes)
        yield _gauge("buffer_bound_bytes", "Bound of the buffer", run.config.buffer_bytes)
        yield _gauge("buffer_records", "Train records in the buffer", totals.num_ready)
        yield _gauge("held_out_records", "Records kept apart for the gate", totals.num_held_out)
        yield _gauge(
            "prompts_waiting", "Added prompts not yet captured", self._store.added_prompts.count(run.run_id)
        )
        dropped = CounterMetricFamily(_PREFIX + "dropped", "Prompts that gave no record", labels=["reason"])
        for reason, count in self._store.records.dropped(run.run_id).items():
            dropped.add_metric([reason.value], count)
        yield dropped
        active = self._controller.active
        in_flight = active.feed.num_in_flight if active else 0
        yield _gauge("captures_in_flight", "Captures on their way, waiting for room included", in_flight)

    def _rollout(self, run: RunRow) -> Iterator[Metric]:
        rows = self._store.checkpoints.all(run.run_id)
        publishes = CounterMetricFamily(
            _PREFIX + "publishes", "Versions by what became of them", labels=["outcome"]
        )
        for outcome in _OUTCOMES:
            publishes.add_metric([outcome.value], sum(row.state is outcome for row in rows))
        yield publishes
        held_out = GaugeMetricFamily(
            _PREFIX + "held_out_tau", "Chain tau on held-out records at the gate", labels=["drafter_version"]
        )
        for row in rows:
            if row.held_out_tau is not None:
                held_out.add_metric([row.version], row.held_out_tau)
        yield held_out
        live = GaugeMetricFamily(
            _PREFIX + "live_tau", "Tau that the target reports", labels=["drafter_version", "policy"]
        )
        for entry in self._controller.active.guard.live if self._controller.active else ():
            live.add_metric([entry.drafter_version, entry.policy], entry.tau)
        yield live

    def _health(self, run: RunRow) -> Iterator[Metric]:
        worker = self._store.runs.worker(run.run_id)
        yield _counter(
            "worker_restarts", "Lost workers that were started again", worker.num_restarts if worker else 0
        )
        events = self._store.events
        alarms = events.count(run.run_id, EventKind.ALARM)
        failures = events.count(run.run_id, EventKind.CHECKPOINT_FAILED)
        yield _counter("alarms", "Times that the target was another one", alarms)
        yield _counter("checkpoint_failures", "Checkpoints that could not be written", failures)
        state = GaugeMetricFamily(
            _PREFIX + "run_state", "1 for the state that the run is in", labels=["state"]
        )
        for name in RunState:
            state.add_metric([name.value], float(run.state is name))
        yield state


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(_PREFIX + name, text, value=value)


def _counter(name: str, text: str, value: float) -> Metric:
    return CounterMetricFamily(_PREFIX + name, text, value=value)
