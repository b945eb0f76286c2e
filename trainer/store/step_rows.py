"""Metrics of training steps: one row per step.

worker rank 0 --add--> [ steps ] --latest, since--> status, metrics, dashboard
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from trainer.store.database import Database, from_json, now, to_json


@dataclass(frozen=True, kw_only=True, slots=True)
class StepMetrics:
    """One optimizer step, summed over all ranks."""

    step: int
    loss: float
    """Nats per unit of weight."""
    grad_norm: float
    """Before clipping."""
    learning_rate: float
    slot_accuracy: tuple[float, ...]
    """Top-1 accuracy of slots 1..B-1, teacher-forced."""
    label_agreement: float = 1.0
    """Share of labels that equal the target's tokens; below 1 only where labels come from the verifier."""
    num_records: int
    num_tokens: int
    data_wait_s: float
    """For records to arrive and to be loaded."""
    step_s: float
    """From the order to the update, loading included, arrival not."""
    tokens_seen: int
    """Over the whole run."""


class StepTable:
    """The table `steps`."""

    def __init__(self, db: Database) -> None:
        self._db = db

    def add(self, run_id: str, metrics: StepMetrics) -> None:
        """Store one step; a step that is taken again after a restart replaces the lost one."""
        self._db.execute(
            "INSERT OR REPLACE INTO steps (run_id, step, time, metrics) VALUES (?, ?, ?, ?)",
            *(run_id, metrics.step, now(), to_json(asdict(metrics))),
        )

    def latest(self, run_id: str) -> StepMetrics | None:
        """The last step taken."""
        row = self._db.one("SELECT metrics FROM steps WHERE run_id = ? ORDER BY step DESC LIMIT 1", run_id)
        return None if row is None else _metrics(row["metrics"])

    def since(self, run_id: str, step: int, *, limit: int = 1000) -> list[StepMetrics]:
        """Steps above `step`, oldest first."""
        rows = self._db.all(
            "SELECT metrics FROM steps WHERE run_id = ? AND step > ? ORDER BY step LIMIT ?",
            run_id,
            step,
            limit,
        )
        return [_metrics(row["metrics"]) for row in rows]

    def take_back(self, run_id: str, after_step: int) -> None:
        """Forget steps whose result was lost."""
        self._db.execute("DELETE FROM steps WHERE run_id = ? AND step > ?", run_id, after_step)


def _metrics(text: str) -> StepMetrics:
    fields: dict[str, Any] = from_json(text)
    fields["slot_accuracy"] = tuple(fields["slot_accuracy"])
    return StepMetrics(**fields)
