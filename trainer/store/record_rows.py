"""Records of a run: which prompt is settled, which file may be trained on, and how often it was.

    feed --admit, drop--> [ records, uses, added_prompts ] <--pick, use-- worker rank 0
                                       |
                                       +--evictable--> buffer deletes the file, the row stays

A row is never deleted: its unique record_id is what refuses a second copy. Lifecycle of a row:
`ready` (file in the buffer) -> `evicted` (file gone), or `dropped` from the start (never a file).
`uses` holds one row per step and record, so that a worker which restarts from a checkpoint can take back
the uses of the steps that were lost with it.
"""

from __future__ import annotations

import enum
import sqlite3
from dataclasses import dataclass
from typing import Any

from trainer.store.database import Database, from_json, now, to_json


class RecordKind(enum.StrEnum):
    """What a record is for."""

    TRAIN = "train"
    HELD_OUT = "held_out"


class DropReason(enum.StrEnum):
    """Why a prompt gave no record. Each is also the label of dflash_trainer_dropped_total."""

    TRUNCATED = "truncated"
    """The stream came to its end before the record did."""
    CHECKSUM = "checksum"
    WIRE_VERSION = "wire_version"
    CORRUPT = "corrupt"
    """Frames or header make no sense, or it is another record than the one asked for."""
    REFUSED = "refused"
    """The target answered 4xx for this sequence."""
    TOO_LARGE = "too_large"
    """Its features might not fit the buffer at all."""
    UNTRAINABLE = "untrainable"
    """No supervised token follows another: no anchor."""
    NOT_FINITE = "not_finite"
    """A feature is NaN or infinite: the target overflowed. One such row would spoil a whole step."""
    PROMPT = "prompt"
    """The chat template cannot render it."""
    UNREADABLE = "unreadable"
    """Its file could not be read back by the worker."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NewRecord:
    """A record that arrived and was written to a file."""

    record_id: str
    kind: RecordKind
    position: int | None
    path: str
    num_bytes: int
    num_tokens: int
    num_supervised: int
    drafter_version: str


@dataclass(frozen=True, slots=True)
class StoredRecord:
    """A record that the worker may read."""

    seq: int
    path: str
    num_uses: int


@dataclass(frozen=True, kw_only=True, slots=True)
class RecordTotals:
    """Counts of a run's records."""

    num_ready: int
    num_unused: int
    """Of those ready: never trained on."""
    num_held_out: int
    num_total: int
    """Trainable records that ever arrived."""
    num_tokens: int
    buffer_bytes: int


class RecordTable:
    """The tables `records`, `uses` and `added_prompts`."""

    def __init__(self, db: Database) -> None:
        self._db = db

    def admit(self, run_id: str, record: NewRecord) -> bool:
        """Store a record as `ready`. False: one of that id is already there."""
        return self._insert(run_id, record, state="ready", reason="")

    def drop(self, run_id: str, record: NewRecord, reason: DropReason) -> bool:
        """Settle a prompt without a record."""
        return self._insert(run_id, record, state="dropped", reason=reason.value)

    def _insert(self, run_id: str, record: NewRecord, *, state: str, reason: str) -> bool:
        try:
            self._db.execute(
                "INSERT INTO records (run_id, record_id, kind, position, path, num_bytes, num_tokens,"
                " num_supervised, drafter_version, state, reason, time) VALUES (?,?,?,?,?,?,?,?,?,?,?,?)",
                *(
                    run_id,
                    record.record_id,
                    record.kind.value,
                    record.position,
                    record.path,
                    record.num_bytes,
                ),
                *(record.num_tokens, record.num_supervised, record.drafter_version, state, reason, now()),
            )
        except sqlite3.IntegrityError:  # record_id is the only rule that a new row can break
            return False
        return True

    def has(self, record_id: str) -> bool:
        """Whether that prompt is settled."""
        return self._db.one("SELECT 1 FROM records WHERE record_id = ?", record_id) is not None

    def settled_positions(self, run_id: str, cursor: int) -> set[int]:
        """Settled prompt positions at or above the cursor."""
        rows = self._db.all("SELECT position FROM records WHERE run_id = ? AND position >= ?", run_id, cursor)
        return {row["position"] for row in rows}

    def trainable(self, run_id: str, max_uses: int) -> list[StoredRecord]:
        """Records that may be used again, least used first."""
        rows = self._db.all(
            "SELECT seq, path, num_uses FROM records WHERE run_id = ? AND kind = 'train' AND state = 'ready'"
            " AND num_uses < ? ORDER BY num_uses, seq",
            *(run_id, max_uses),
        )
        return [StoredRecord(row["seq"], row["path"], row["num_uses"]) for row in rows]

    def held_out(self, run_id: str) -> list[StoredRecord]:
        """Held-out records, in the order of their capture."""
        rows = self._db.all(
            "SELECT seq, path, num_uses FROM records"
            " WHERE run_id = ? AND kind = 'held_out' AND state = 'ready' ORDER BY seq",
            run_id,
        )
        return [StoredRecord(row["seq"], row["path"], row["num_uses"]) for row in rows]

    def use(self, run_id: str, step: int, seqs: list[int]) -> None:
        """Count one use of each record, by that step."""
        with self._db.transaction():
            for seq in seqs:
                self._db.execute(
                    "INSERT INTO uses (run_id, step, record_seq) VALUES (?, ?, ?)", run_id, step, seq
                )
                self._db.execute("UPDATE records SET num_uses = num_uses + 1 WHERE seq = ?", seq)

    def take_back_uses(self, run_id: str, after_step: int) -> None:
        """Forget the uses of steps whose result was lost."""
        with self._db.transaction():
            self._db.execute(
                "UPDATE records SET num_uses = num_uses - (SELECT COUNT(*) FROM uses WHERE uses.run_id = ?"
                " AND uses.step > ? AND uses.record_seq = records.seq) WHERE run_id = ? AND num_uses > 0",
                *(run_id, after_step, run_id),
            )
            self._db.execute("DELETE FROM uses WHERE run_id = ? AND step > ?", run_id, after_step)

    def evictable(self, run_id: str, max_uses: int) -> list[tuple[StoredRecord, int]]:
        """Fully used records with their bytes, oldest first."""
        rows = self._db.all(
            "SELECT seq, path, num_uses, num_bytes FROM records WHERE run_id = ? AND kind = 'train'"
            " AND state = 'ready' AND num_uses >= ? ORDER BY seq",
            *(run_id, max_uses),
        )
        return [(StoredRecord(r["seq"], r["path"], r["num_uses"]), r["num_bytes"]) for r in rows]

    def evict(self, seq: int) -> None:
        """The record's file is gone, or about to be."""
        self._db.execute("UPDATE records SET state = 'evicted' WHERE seq = ?", seq)

    def mark_unreadable(self, seq: int) -> None:
        """The worker could not read the file: never pick it again."""
        self._db.execute(
            "UPDATE records SET state = 'dropped', reason = ? WHERE seq = ?", DropReason.UNREADABLE.value, seq
        )

    def num_dropped_held_out(self, run_id: str) -> int:
        """Held-out prompts that will never give a record."""
        return self._db.number(
            "SELECT COUNT(*) FROM records WHERE run_id = ? AND kind = 'held_out' AND state = 'dropped'",
            run_id,
        )

    def paths(self, run_id: str) -> set[str]:
        """Files that may be read."""
        rows = self._db.all("SELECT path FROM records WHERE run_id = ? AND state = 'ready'", run_id)
        return {row["path"] for row in rows}

    def totals(self, run_id: str) -> RecordTotals:
        """Counts for status, metrics and the buffer's bound."""
        row = self._db.one(
            "SELECT COUNT(*) FILTER (WHERE kind = 'train' AND state = 'ready') AS num_ready,"
            " COUNT(*) FILTER (WHERE kind = 'train' AND state = 'ready' AND num_uses = 0) AS num_unused,"
            " COUNT(*) FILTER (WHERE kind = 'held_out' AND state = 'ready') AS num_held_out,"
            " COUNT(*) FILTER (WHERE kind = 'train' AND state != 'dropped') AS num_total,"
            " SUM(num_tokens) FILTER (WHERE kind = 'train' AND state != 'dropped') AS num_tokens,"
            " SUM(num_bytes) FILTER (WHERE kind = 'train' AND state = 'ready') AS buffer_bytes"
            " FROM records WHERE run_id = ?",
            run_id,
        )
        assert row is not None  # an aggregate always gives one row
        return RecordTotals(**{name: int(row[name] or 0) for name in row.keys()})

    def dropped(self, run_id: str) -> dict[DropReason, int]:
        """Dropped prompts by reason; every reason is present."""
        rows = self._db.all(
            "SELECT reason, COUNT(*) AS n FROM records"
            " WHERE run_id = ? AND state = 'dropped' GROUP BY reason",
            run_id,
        )
        counts = {row["reason"]: row["n"] for row in rows}
        return {reason: counts.get(reason.value, 0) for reason in DropReason}


class AddedPromptTable:
    """The table `added_prompts`: the bounded queue behind POST /prompts."""

    def __init__(self, db: Database) -> None:
        self._db = db

    def count(self, run_id: str) -> int:
        """Prompts that wait."""
        return self._db.number(
            "SELECT COUNT(*) FROM added_prompts WHERE run_id = ? AND state = 'waiting'", run_id
        )

    def add(self, run_id: str, items: list[dict[str, Any]]) -> None:
        """Queue prompts; the caller checked the bound."""
        with self._db.transaction():
            for item in items:
                self._db.execute(
                    "INSERT INTO added_prompts (run_id, item, state) VALUES (?, ?, 'waiting')",
                    run_id,
                    to_json(item),
                )

    def waiting(self, run_id: str, *, limit: int) -> list[tuple[int, dict[str, Any]]]:
        """The oldest waiting prompts."""
        rows = self._db.all(
            "SELECT seq, item FROM added_prompts WHERE run_id = ? AND state = 'waiting' ORDER BY seq LIMIT ?",
            *(run_id, limit),
        )
        return [(row["seq"], from_json(row["item"])) for row in rows]

    def settle(self, seq: int) -> None:
        """The prompt has a record row now; its text is no longer needed."""
        self._db.execute("UPDATE added_prompts SET state = 'settled', item = '{}' WHERE seq = ?", seq)
