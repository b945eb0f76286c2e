"""Checkpoints of the running worker: gate, write, name, and delete old ones. Rank 0 only.

    Training --export--> held-out gate (when it shall be published) --> checkpoint + optimizer state
        --> row `candidate` (rollout publishes it) | `held_back` | `saved`

What the gate measures is what is served: the weights as rounded for the file, not the float32 masters.
Disk full   CheckpointError becomes an event; training goes on, and the caller tries again later.
"""

from __future__ import annotations

import shutil
from dataclasses import asdict
from pathlib import Path

import torch

from dflash_online.drafter.checkpoint import TrainingInfo, export_tensors, load_checkpoint, save_checkpoint
from dflash_online.drafter.model import DFlashDrafter
from dflash_online.errors import CheckpointError
from dflash_online.evaluate.tau import EvaluationResult, compare, evaluate_drafter
from dflash_online.wire.record import Record
from trainer.loop.records import read_record
from trainer.loop.setup import Training
from trainer.loop.state_files import save_state
from trainer.rollout.gate import GateResult, decide
from trainer.store.checkpoint_rows import CheckpointRow, CheckpointState
from trainer.store.event_rows import EventKind
from trainer.store.run_rows import RunRow
from trainer.store.store import Store

_KEPT_STATES = 2


class Saver:
    """Writes this run's checkpoints."""

    def __init__(self, store: Store, run: RunRow, training: Training) -> None:
        self._store, self._run, self._training = store, run, training
        self._folder = store.folder(run.run_id)
        self._held_out: dict[int, Record] = {}
        self._measured: dict[tuple[str, int], EvaluationResult] = {}

    def gate_is_ready(self) -> bool:
        """Whether there are as many held-out records as the gate asks for, or as there will ever be."""
        gate, run_id = self._run.config.gate, self._run.run_id
        expected = self._run.resolved.num_held_out - self._store.records.num_dropped_held_out(run_id)
        needed = min(gate.min_records, expected)
        return not gate.enabled or len(self._store.records.held_out(run_id)) >= needed

    def save(self, *, cursor: int, publish: bool) -> bool:
        """Write one checkpoint, unless nothing changed since the last one.

        Returns:
            False when it could not be written; an event says why.
        """
        if self._is_saved(publish=publish):
            return True
        number = self._next_number()
        path, state_path = self._folder.checkpoint(number), self._folder.optimizer_state(number)
        tensors = export_tensors(self._training.drafter, self._training.drafter.config)
        gate = self._gate(tensors) if publish and self._training.progress.step else None
        # Without a row it is a leftover of a worker that was killed between the two.
        shutil.rmtree(path, ignore_errors=True)
        try:
            save_state(
                state_path,
                self._training.drafter,
                self._training.optimizer,
                self._training.pick,
                self._training.progress,
            )
            version = save_checkpoint(
                path, self._training.drafter.config, tensors, training=self._info(number, cursor, gate)
            )
        except CheckpointError as exc:
            shutil.rmtree(state_path, ignore_errors=True)
            self._store.events.add(
                self._run.run_id, EventKind.CHECKPOINT_FAILED, path=exc.path, reason=exc.reason
            )
            return False
        state = CheckpointState.SAVED
        if publish:
            state = CheckpointState.CANDIDATE if gate is None or gate.passed else CheckpointState.HELD_BACK
        self._record(str(version), path, state, gate)
        self._prune()
        return True

    def _record(self, version: str, path: Path, state: CheckpointState, gate: GateResult | None) -> None:
        run_id, step = self._run.run_id, self._training.progress.step
        judged = None if gate is None else asdict(gate)
        with self._store.db.transaction():
            self._store.checkpoints.add(
                run_id,
                version=version,
                path=str(path),
                step=step,
                state=state,
                gate=judged,
                held_out_tau=None if gate is None else gate.new_tau,
            )
            self._store.events.add(
                run_id, EventKind.CHECKPOINT, version=version, step=step, state=state.value
            )
            if judged is not None:
                self._store.events.add(run_id, EventKind.GATE, version=version, **judged)
        self._training.parent_version = version

    def _is_saved(self, *, publish: bool) -> bool:
        latest = self._store.checkpoints.latest(self._run.run_id)
        if latest is None or latest.step != self._training.progress.step or not latest.path:
            return False
        return not publish or latest.state is not CheckpointState.SAVED

    def _next_number(self) -> int:
        latest = self._store.checkpoints.latest(self._run.run_id)
        return self._run.resolved.first_number if latest is None else latest.number + 1

    def _info(self, number: int, cursor: int, gate: GateResult | None) -> TrainingInfo:
        resolved, progress = self._run.resolved, self._training.progress
        return TrainingInfo(
            number=number,
            step=progress.step,
            recipe=asdict(self._training.recipe),
            cursor=cursor,
            parent_version=self._training.parent_version,
            gate=None if gate is None else asdict(gate),
            target={
                "path": resolved.path,
                "revision": resolved.revision,
                "weight_checksum": resolved.weight_checksum,
            },
            tokens_seen=progress.tokens_seen,
        )

    def _gate(self, tensors: dict[str, torch.Tensor]) -> GateResult | None:
        config = self._run.config.gate
        records = self._read_held_out()
        if not config.enabled or not records:
            return None
        old_version, old = self._baseline(records)
        new = self._evaluate(tensors, records)
        paired = compare(old, new, seed=self._run.config.seed)
        passed, reason = decide(config, new_tau=new.tau, old_tau=old.tau)
        return GateResult(
            passed=passed,
            reason=reason,
            new_tau=new.tau,
            old_tau=old.tau,
            old_version=old_version,
            mean_difference=paired.mean_difference,
            ci_low=paired.ci_low,
            ci_high=paired.ci_high,
            win_rate=paired.win_rate,
            num_records=paired.num_records,
        )

    def _read_held_out(self) -> list[Record]:
        for stored in self._store.records.held_out(self._run.run_id):
            if stored.seq not in self._held_out:
                record = read_record(stored)
                if record is None:
                    self._store.records.mark_unreadable(stored.seq)
                else:
                    self._held_out[stored.seq] = record
        return list(self._held_out.values())

    def _baseline(self, records: list[Record]) -> tuple[str, EvaluationResult]:
        """The drafter that a new one must not fall behind: published, else served before, else initial."""
        for version, path in self._baseline_folders():
            key = (version, len(records))
            if key in self._measured:
                return version, self._measured[key]
            try:
                checkpoint = load_checkpoint(path)
            except CheckpointError:
                continue  # the target's folder need not be visible here
            if checkpoint.config.feature_width != self._training.drafter.config.feature_width:
                continue
            drafter = DFlashDrafter.from_tensors(checkpoint.config, checkpoint.tensors)
            result = self._run_evaluation(drafter, records)
            self._measured = {key: result}
            return version, result
        raise CheckpointError(str(self._folder.checkpoints), "no checkpoint to compare with can be read")

    def _baseline_folders(self) -> list[tuple[str, Path]]:
        rows: list[CheckpointRow] = self._store.checkpoints.published(self._run.run_id)[::-1]
        found = [(row.version, Path(row.path)) for row in rows if row.path]
        resolved = self._run.resolved
        if resolved.served_path is not None:
            found.append((resolved.served_version, Path(resolved.served_path)))
        first = next(row for row in self._store.checkpoints.all(self._run.run_id))
        return [*found, (first.version, Path(first.path))]

    def _evaluate(self, tensors: dict[str, torch.Tensor], records: list[Record]) -> EvaluationResult:
        return self._run_evaluation(
            DFlashDrafter.from_tensors(self._training.drafter.config, tensors), records
        )

    def _run_evaluation(self, drafter: DFlashDrafter, records: list[Record]) -> EvaluationResult:
        device = self._training.frozen.weight_VH.device
        with torch.no_grad():
            return evaluate_drafter(
                drafter.to(device).eval(), self._training.frozen, records, with_slots=False
            )

    def _prune(self) -> None:
        """Delete old folders; never one that is live, on its way, or may be rolled back to, nor the first."""
        rows = [row for row in self._store.checkpoints.all(self._run.run_id) if row.path]
        for row in rows[:-_KEPT_STATES]:
            shutil.rmtree(self._folder.optimizer_state(row.number), ignore_errors=True)
        live = {row.number for row in self._store.checkpoints.published(self._run.run_id)[-2:]}
        waiting = {row.number for row in rows if row.state is CheckpointState.CANDIDATE}
        for row in rows[1 : -self._run.config.keep_checkpoints]:
            if row.number not in live | waiting:
                self._store.checkpoints.forget_path(self._run.run_id, row.number)
                shutil.rmtree(row.path, ignore_errors=True)
