"""Checkpoints of a run, and how far each got on its way into the target.

worker --add--> [ checkpoints ] <--published, rolled back-- rollout

saved                                     kept for a restart of the worker only
candidate -> published -> rolled_back     passed the gate; committed on every target; taken back
         \\-> superseded                   a newer candidate came before it was committed
         \\-> rejected                     the target refused it
held_back                                 did not pass the gate
"""

from __future__ import annotations

import enum
import sqlite3
from dataclasses import dataclass
from typing import Any

from trainer.store.database import Database, from_json, now, to_json


class CheckpointState(enum.StrEnum):
    """See the picture above."""

    SAVED = "saved"
    CANDIDATE = "candidate"
    PUBLISHED = "published"
    SUPERSEDED = "superseded"
    REJECTED = "rejected"
    HELD_BACK = "held_back"
    ROLLED_BACK = "rolled_back"


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointRow:
    """One checkpoint as stored."""

    number: int
    version: str
    path: str
    """Empty once the folder was deleted to save room."""
    step: int
    state: CheckpointState
    gate: dict[str, Any] | None
    swap: dict[str, Any] | None
    """Pause and checksum per target, as the commits answered."""
    held_out_tau: float | None
    created_at: float
    published_at: float | None
    rolled_back_at: float | None


class CheckpointTable:
    """The table `checkpoints`."""

    def __init__(self, db: Database) -> None:
        self._db = db

    def add(
        self,
        run_id: str,
        *,
        version: str,
        path: str,
        step: int,
        state: CheckpointState,
        gate: dict[str, Any] | None,
        held_out_tau: float | None,
    ) -> None:
        """Store a complete checkpoint."""
        self._db.execute(
            "INSERT INTO checkpoints"
            " (run_id, number, version, path, step, state, gate, held_out_tau, created_at)"
            " VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
            *(run_id, int(version.split("-")[0]), version, path, step, state.value),
            *(None if gate is None else to_json(gate), held_out_tau, now()),
        )

    def all(self, run_id: str) -> list[CheckpointRow]:
        """All checkpoints, oldest first."""
        rows = self._db.all("SELECT * FROM checkpoints WHERE run_id = ? ORDER BY number", run_id)
        return [_row(row) for row in rows]

    def latest(self, run_id: str) -> CheckpointRow | None:
        """The newest checkpoint."""
        rows = self.all(run_id)
        return rows[-1] if rows else None

    def candidate(self, run_id: str) -> CheckpointRow | None:
        """The newest checkpoint that waits to be published; older ones are superseded."""
        waiting = [row for row in self.all(run_id) if row.state is CheckpointState.CANDIDATE]
        for row in waiting[:-1]:
            self.set_state(run_id, row.number, CheckpointState.SUPERSEDED)
        return waiting[-1] if waiting else None

    def published(self, run_id: str) -> list[CheckpointRow]:
        """Versions that went live and were not rolled back, in order of their commit; the last is live."""
        rows = [row for row in self.all(run_id) if row.state is CheckpointState.PUBLISHED]
        return sorted(rows, key=lambda row: (row.published_at or 0.0, row.number))

    def set_state(self, run_id: str, number: int, state: CheckpointState) -> None:
        """Move one checkpoint along its way."""
        moment = {
            CheckpointState.PUBLISHED: "published_at",
            CheckpointState.ROLLED_BACK: "rolled_back_at",
        }.get(state)
        also = f", {moment} = ?" if moment else ""
        self._db.execute(
            f"UPDATE checkpoints SET state = ?{also} WHERE run_id = ? AND number = ?",
            *((state.value, now()) if moment else (state.value,)),
            *(run_id, number),
        )

    def set_swap(self, run_id: str, number: int, swap: dict[str, Any]) -> None:
        """Keep what the targets answered to the commit."""
        self._db.execute(
            "UPDATE checkpoints SET swap = ? WHERE run_id = ? AND number = ?", to_json(swap), run_id, number
        )

    def forget_path(self, run_id: str, number: int) -> None:
        """The folder is deleted; the row stays for the history of versions."""
        self._db.execute("UPDATE checkpoints SET path = '' WHERE run_id = ? AND number = ?", run_id, number)


def _row(row: sqlite3.Row) -> CheckpointRow:
    return CheckpointRow(
        number=row["number"],
        version=row["version"],
        path=row["path"],
        step=row["step"],
        state=CheckpointState(row["state"]),
        gate=from_json(row["gate"]),
        swap=from_json(row["swap"]),
        held_out_tau=row["held_out_tau"],
        created_at=row["created_at"],
        published_at=row["published_at"],
        rolled_back_at=row["rolled_back_at"],
    )
