"""Events: what happened to a run, in order, for people and for GET /runs/{id}/events.

    controller, feed, rollout, worker --add--> [ events ] --after(seq)--> SSE, dashboard

Append-only; `seq` rises over all runs and is the Last-Event-ID of the stream.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Any

from trainer.store.database import Database, from_json, now, to_json


class EventKind(enum.StrEnum):
    """What happened."""

    STATE = "state"
    PROMPTS_SKIPPED = "prompts_skipped"
    PROMPTS_ADDED = "prompts_added"
    TARGET_UNAVAILABLE = "target_unavailable"
    TARGET_BACK = "target_back"
    RECORD_DROPPED = "record_dropped"
    BUFFER_WRITE_FAILED = "buffer_write_failed"
    EPOCH = "epoch"
    WORKER_STARTED = "worker_started"
    WORKER_LOST = "worker_lost"
    CHECKPOINT = "checkpoint"
    CHECKPOINT_FAILED = "checkpoint_failed"
    STEP_SKIPPED = "step_skipped"
    DECAY = "decay"
    GATE = "gate"
    PUBLISHED = "published"
    PUBLISH_FAILED = "publish_failed"
    ROLLED_BACK = "rolled_back"
    RESTORED = "restored"
    """A target that was started anew has the live version again."""
    ALARM = "alarm"


@dataclass(frozen=True, kw_only=True, slots=True)
class Event:
    """One event as stored."""

    seq: int
    time: float
    kind: str
    data: dict[str, Any]


class EventTable:
    """The table `events`."""

    def __init__(self, db: Database) -> None:
        self._db = db

    def add(self, run_id: str, kind: EventKind, **data: object) -> None:
        """Append one event."""
        self._db.execute(
            "INSERT INTO events (run_id, time, kind, data) VALUES (?, ?, ?, ?)",
            *(run_id, now(), kind.value, to_json(data)),
        )

    def after(self, run_id: str, seq: int, *, limit: int = 200) -> list[Event]:
        """Events later than `seq`, oldest first."""
        rows = self._db.all(
            "SELECT * FROM events WHERE run_id = ? AND seq > ? ORDER BY seq LIMIT ?", run_id, seq, limit
        )
        return [Event(seq=r["seq"], time=r["time"], kind=r["kind"], data=from_json(r["data"])) for r in rows]

    def latest(self, run_id: str, *, limit: int = 50) -> list[Event]:
        """The last events, oldest first."""
        rows = self._db.all("SELECT * FROM events WHERE run_id = ? ORDER BY seq DESC LIMIT ?", run_id, limit)
        return [
            Event(seq=r["seq"], time=r["time"], kind=r["kind"], data=from_json(r["data"])) for r in rows[::-1]
        ]

    def count(self, run_id: str, kind: EventKind) -> int:
        """Events of one kind."""
        return self._db.number(
            "SELECT COUNT(*) FROM events WHERE run_id = ? AND kind = ?", run_id, kind.value
        )
