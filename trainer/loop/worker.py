"""The training loop of one rank. Rank 0 decides, all ranks step.

    runs row (desired, requests) --> [ rank 0: next order ] --share--> every rank: train | wait | end
    records table --> plan --> StepLoader (one step ahead) --> train_step --> steps row
                                                       +--> Saver: checkpoint, gate, candidate

Waits       for records (phase `waiting`), while paused (phase `paused`): orders keep flowing, so ranks never
            time out on each other.
Ends        desired `stop` or `suspend`, a bound of the config, or no record left to use.
Knows neither HTTP nor the target server.
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

from trainer.loop.due import Due
from trainer.loop.optimizer import DecayPhase, learning_rate, planned_decay
from trainer.loop.parallel import Ranks
from trainer.loop.records import StepLoader, StepPlan, pick_records
from trainer.loop.saving import Saver
from trainer.loop.setup import Training
from trainer.loop.step import StepOutcome, train_step
from trainer.runs.state import Desired, WorkerPhase
from trainer.store.event_rows import EventKind
from trainer.store.run_rows import Control, RunRow
from trainer.store.step_rows import StepMetrics
from trainer.store.store import Store

_IDLE_S = 0.1
_HEARTBEAT_S = 1.0
_MAX_SKIPPED_STEPS = 20


class TrainingDivergedError(RuntimeError):
    """Too many steps in a row without a finite gradient: the worker restarts from a checkpoint."""


class WorkerLoop:
    """One rank's loop over one run. `store` is used by rank 0 alone."""

    def __init__(self, store: Store, run: RunRow, training: Training, ranks: Ranks) -> None:
        self._store, self._run, self._training, self._ranks = store, run, training, ranks
        self._config, self._run_id = run.config, run.run_id
        self._loader = StepLoader(run.config, ranks, training.drafter.config.block_size)
        self._saver = Saver(store, run, training)
        self._phase = WorkerPhase.LOADING
        self._last_report = 0.0
        self._last_clock = time.monotonic()
        self._due = Due(run.config, training.progress)
        self._num_skipped = 0
        self._waiting_since: float | None = None

    def run(self) -> WorkerPhase:
        """Train until an end is ordered; returns the phase that says why."""
        try:
            if self._ranks.is_first:
                self._begin()
            while True:
                order = self._ranks.share(self._next_order() if self._ranks.is_first else None)
                if order["do"] == "end":
                    return WorkerPhase(order["phase"])
                if order["do"] == "train":
                    self._train(order)
                else:
                    time.sleep(_IDLE_S)
        finally:
            self._loader.close()

    def _begin(self) -> None:
        """Forget what was lost with the last attempt; write the very first checkpoint."""
        step = self._training.progress.step
        with self._store.db.transaction():
            self._store.steps.take_back(self._run_id, step)
            self._store.records.take_back_uses(self._run_id, step)
        self._store.events.add(
            self._run_id, EventKind.WORKER_STARTED, step=step, num_ranks=self._ranks.world_size
        )
        if self._store.checkpoints.latest(self._run_id) is None:
            self._saver.save(cursor=0, publish=self._config.publish_initial)

    def _next_order(self) -> dict[str, Any]:
        control = self._store.runs.control(self._run_id)
        self._count_time(control)
        self._take_requests(control)
        ending = self._due.ending(control, self._training.progress)
        if ending is not None:
            return self._end(control, ending)
        self._save_when_due(control)
        if control.desired is Desired.PAUSE:
            return self._wait(WorkerPhase.PAUSED)
        plan = self._loader.pending or self._plan(self._training.progress.step + 1, control, running=None)
        if plan is None:
            if control.is_feed_done:
                return self._end(control, WorkerPhase.COMPLETED)
            return self._wait(WorkerPhase.WAITING)
        self._report(WorkerPhase.TRAINING)
        waited_s = 0.0 if self._waiting_since is None else time.monotonic() - self._waiting_since
        self._waiting_since = None
        following = self._plan(plan.step + 1, control, running=plan)
        rate = learning_rate(self._config, self._training.progress.step, self._decay())
        return {
            "do": "train",
            "plan": plan.to_json(),
            "next": None if following is None else following.to_json(),
            "rate": rate,
            "waited_s": waited_s,
        }

    def _plan(self, step: int, control: Control, *, running: StepPlan | None) -> StepPlan | None:
        taken = set(running.seqs()) if running else set()
        available = self._store.records.trainable(self._run_id, self._config.max_uses)
        # A record of the running step may be used again by the next one when it has a use left after it.
        usable = [r for r in available if r.seq not in taken or r.num_uses + 1 < self._config.max_uses]
        return pick_records(
            usable,
            self._config,
            step,
            self._training.pick,
            is_last_call=control.is_feed_done and running is None,
        )

    def _train(self, order: dict[str, Any]) -> None:
        start = time.monotonic()
        plan = StepPlan.from_json(order["plan"])
        if self._loader.pending is None:
            self._loader.submit(plan)
        plan, loaded, wait_s = self._loader.take()
        if order["next"] is not None:
            self._loader.submit(StepPlan.from_json(order["next"]))
        outcome = train_step(
            self._training.drafter,
            self._training.frozen,
            self._training.optimizer,
            loaded.batches,
            self._training.recipe,
            self._ranks,
            step=plan.step - 1,
            noise=loaded.generators,
            learning_rate=order["rate"],
            clip=self._config.optimizer.clip,
            chunk_slots=self._config.chunk_slots,
        )
        num_tokens = sum(self._ranks.gather(loaded.num_tokens))
        supervised = int(outcome.stats.num_total_B.sum())
        progress = self._training.progress
        self._training.progress = replace(
            progress, step=plan.step, tokens_seen=progress.tokens_seen + supervised
        )
        if self._ranks.is_first:
            for seq in loaded.unreadable:
                self._store.records.mark_unreadable(seq)
            step_s = time.monotonic() - start
            self._record(plan, outcome, order["rate"], num_tokens, order["waited_s"] + wait_s, step_s)

    def _record(
        self, plan: StepPlan, outcome: StepOutcome, rate: float, num_tokens: int, wait_s: float, step_s: float
    ) -> None:
        metrics = StepMetrics(
            step=plan.step,
            loss=outcome.loss,
            grad_norm=outcome.grad_norm,
            learning_rate=rate,
            slot_accuracy=tuple(round(share, 4) for share in outcome.stats.accuracy()),
            label_agreement=outcome.stats.label_agreement(),
            num_records=len(plan.seqs()),
            num_tokens=num_tokens,
            data_wait_s=wait_s,
            step_s=step_s,
            tokens_seen=self._training.progress.tokens_seen,
        )
        with self._store.db.transaction():
            self._store.records.use(self._run_id, plan.step, plan.seqs())
            if outcome.is_applied:
                self._store.steps.add(self._run_id, metrics)
        self._count_skipped(plan.step, outcome)

    def _count_skipped(self, step: int, outcome: StepOutcome) -> None:
        self._num_skipped = 0 if outcome.is_applied else self._num_skipped + 1
        if self._num_skipped:
            figures = {"loss": str(outcome.loss), "grad_norm": str(outcome.grad_norm)}
            self._store.events.add(self._run_id, EventKind.STEP_SKIPPED, step=step, **figures)
        if self._num_skipped >= _MAX_SKIPPED_STEPS:
            raise TrainingDivergedError(
                f"{self._num_skipped} steps in a row without a finite loss and gradient"
            )

    def _count_time(self, control: Control) -> None:
        """Add the time since the last order to the training time, unless it was a pause."""
        elapsed_s = time.monotonic() - self._last_clock
        self._last_clock += elapsed_s
        if control.desired is not Desired.PAUSE:
            progress = self._training.progress
            self._training.progress = replace(
                progress, trained_s=progress.trained_s + elapsed_s, cursor=control.cursor
            )

    def _take_requests(self, control: Control) -> None:
        if control.is_publish_requested:
            self._due.is_publish_due = True
            self._store.runs.request_publish(self._run_id, False)
        if control.decay_requested:
            progress = self._training.progress
            self._training.progress = replace(
                progress, decay_start=progress.step, decay_steps=control.decay_requested
            )
            self._store.runs.request_decay(self._run_id, 0)
            self._store.events.add(
                self._run_id, EventKind.DECAY, start_step=progress.step, num_steps=control.decay_requested
            )

    def _decay(self) -> DecayPhase | None:
        progress = self._training.progress
        if progress.decay_start is not None:
            return DecayPhase(start_step=progress.decay_start, num_steps=progress.decay_steps)
        return planned_decay(self._config)

    def _end(self, control: Control, ending: WorkerPhase) -> dict[str, Any]:
        self._save(control, publish=self._due.publishes_at_end(ending))
        return {"do": "end", "phase": ending.value}

    def _save_when_due(self, control: Control) -> None:
        is_save_due = self._due.look(self._training.progress)
        publish = self._due.is_publish_due and self._saver.gate_is_ready()
        if self._due.may_save and (publish or is_save_due):
            self._save(control, publish=publish)

    def _save(self, control: Control, *, publish: bool) -> None:
        self._report(WorkerPhase.SAVING, force=True)
        if self._saver.save(cursor=control.cursor, publish=publish):
            self._due.saved(self._training.progress, published=publish)
        else:
            self._due.failed(self._training.progress)

    def _wait(self, phase: WorkerPhase) -> dict[str, Any]:
        self._report(phase)
        if phase is WorkerPhase.WAITING and self._waiting_since is None:
            self._waiting_since = time.monotonic()
        return {"do": "wait"}

    def _report(self, phase: WorkerPhase, *, force: bool = False) -> None:
        is_due = time.monotonic() - self._last_report >= _HEARTBEAT_S
        if force or phase is not self._phase or is_due:
            self._phase, self._last_report = phase, time.monotonic()
            self._store.runs.worker_says(self._run_id, phase, step=self._training.progress.step)
