"""The SQLite file in the runs folder: memory of the service and meeting place with its worker.

    service (one connection, event loop) <-- runs.sqlite (WAL) --> worker rank 0 (one connection)

Each process opens the file for itself. Statements are short (well below a millisecond), so the service
runs them on the event loop; a writer waits at most `BUSY_S` for the other. WAL with synchronous=NORMAL:
a killed process loses nothing, a crash of the whole machine at most the last transactions.
Fails with StoreError (disk full, file unusable). One connection is used by one thread.
"""

from __future__ import annotations

import json
import sqlite3
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from trainer.errors import StoreError

BUSY_S = 20.0
SCHEMA_VERSION = 1
_WAL_PAGES = 200  # 0.8 MB: the log stays small, so that a full disk meets a checkpoint first

_SCHEMA = """
CREATE TABLE IF NOT EXISTS runs (
    run_id TEXT PRIMARY KEY, config TEXT NOT NULL, api_key TEXT, resolved TEXT NOT NULL,
    state TEXT NOT NULL, reason TEXT NOT NULL DEFAULT '', desired TEXT NOT NULL DEFAULT 'run',
    publish_requested INTEGER NOT NULL DEFAULT 0, decay_requested INTEGER NOT NULL DEFAULT 0,
    cursor INTEGER NOT NULL DEFAULT 0, is_feed_done INTEGER NOT NULL DEFAULT 0,
    created_at REAL NOT NULL, updated_at REAL NOT NULL, finished_at REAL);
CREATE TABLE IF NOT EXISTS workers (
    run_id TEXT PRIMARY KEY, attempt INTEGER NOT NULL, phase TEXT NOT NULL, pids TEXT NOT NULL,
    step INTEGER NOT NULL DEFAULT 0, heartbeat REAL NOT NULL, detail TEXT NOT NULL DEFAULT '',
    num_restarts INTEGER NOT NULL DEFAULT 0);
CREATE TABLE IF NOT EXISTS events (
    seq INTEGER PRIMARY KEY AUTOINCREMENT, run_id TEXT NOT NULL, time REAL NOT NULL,
    kind TEXT NOT NULL, data TEXT NOT NULL);
CREATE INDEX IF NOT EXISTS events_by_run ON events (run_id, seq);
CREATE TABLE IF NOT EXISTS steps (
    run_id TEXT NOT NULL, step INTEGER NOT NULL, time REAL NOT NULL, metrics TEXT NOT NULL,
    PRIMARY KEY (run_id, step)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS records (
    seq INTEGER PRIMARY KEY AUTOINCREMENT, run_id TEXT NOT NULL, record_id TEXT NOT NULL UNIQUE,
    kind TEXT NOT NULL, position INTEGER, path TEXT NOT NULL DEFAULT '', num_bytes INTEGER NOT NULL DEFAULT 0,
    num_tokens INTEGER NOT NULL DEFAULT 0, num_supervised INTEGER NOT NULL DEFAULT 0,
    num_uses INTEGER NOT NULL DEFAULT 0, state TEXT NOT NULL, reason TEXT NOT NULL DEFAULT '',
    drafter_version TEXT NOT NULL DEFAULT '', time REAL NOT NULL);
CREATE INDEX IF NOT EXISTS records_by_use ON records (run_id, kind, state, num_uses);
CREATE INDEX IF NOT EXISTS records_by_position ON records (run_id, position);
CREATE TABLE IF NOT EXISTS uses (
    run_id TEXT NOT NULL, step INTEGER NOT NULL, record_seq INTEGER NOT NULL,
    PRIMARY KEY (run_id, step, record_seq)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS added_prompts (
    seq INTEGER PRIMARY KEY AUTOINCREMENT, run_id TEXT NOT NULL, item TEXT NOT NULL, state TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS checkpoints (
    run_id TEXT NOT NULL, number INTEGER NOT NULL, version TEXT NOT NULL, path TEXT NOT NULL,
    step INTEGER NOT NULL, state TEXT NOT NULL, gate TEXT, swap TEXT, held_out_tau REAL,
    created_at REAL NOT NULL, published_at REAL, rolled_back_at REAL,
    PRIMARY KEY (run_id, number));
"""


class Database:
    """One process's connection. Usage: `with db.transaction(): db.execute(...)`."""

    def __init__(self, path: Path) -> None:
        """Open, and create the tables when the file is new.

        Raises:
            StoreError: the file cannot be opened, or was written by another version of the trainer.
        """
        self.path = path
        try:
            # Autocommit: transactions are opened by `transaction` alone.
            self._connection = sqlite3.connect(path, timeout=BUSY_S, isolation_level=None)
            self._connection.row_factory = sqlite3.Row
            self._connection.execute("PRAGMA journal_mode=WAL")
            self._connection.execute("PRAGMA synchronous=NORMAL")
            self._connection.execute(f"PRAGMA wal_autocheckpoint={_WAL_PAGES}")
            self._create()
        except sqlite3.Error as exc:
            raise StoreError(str(path), str(exc)) from exc
        path.chmod(0o600)  # it may hold a target's API key

    def _create(self) -> None:
        found = self._connection.execute("PRAGMA user_version").fetchone()[0]
        if found not in (0, SCHEMA_VERSION):
            raise StoreError(
                str(self.path), f"has schema version {found}, this trainer writes {SCHEMA_VERSION}"
            )
        if found == 0:
            self._connection.executescript(_SCHEMA)
            self._connection.execute(f"PRAGMA user_version={SCHEMA_VERSION}")

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """All statements inside commit together, or none. Nested use joins the outer transaction."""
        if self._connection.in_transaction:
            yield
            return
        self.execute("BEGIN IMMEDIATE")
        try:
            yield
        except BaseException:
            # A full disk makes SQLite roll back by itself; then there is nothing left to undo.
            if self._connection.in_transaction:
                self._connection.execute("ROLLBACK")
            raise
        self.execute("COMMIT")

    def execute(self, sql: str, *values: object) -> sqlite3.Cursor:
        """Run one statement.

        Raises:
            StoreError: disk full, file gone, or locked for longer than `BUSY_S`.
            sqlite3.IntegrityError: a uniqueness rule of the schema; the table's class handles it.
        """
        try:
            return self._connection.execute(sql, values)
        except sqlite3.OperationalError as exc:
            raise StoreError(str(self.path), str(exc)) from exc

    def one(self, sql: str, *values: object) -> sqlite3.Row | None:
        """The first row, if any."""
        row: sqlite3.Row | None = self.execute(sql, *values).fetchone()
        return row

    def all(self, sql: str, *values: object) -> list[sqlite3.Row]:
        """All rows."""
        return self.execute(sql, *values).fetchall()

    def number(self, sql: str, *values: object) -> int:
        """The single integer of a count or sum; 0 for NULL."""
        row = self.one(sql, *values)
        return int(row[0] or 0) if row else 0


def now() -> float:
    """Wall-clock time, seconds since 1970: shared by service and worker."""
    return time.time()


def to_json(value: object) -> str:
    """Compact JSON for a column."""
    return json.dumps(value, separators=(",", ":"))


def from_json(text: str | None) -> Any:
    """The value of a JSON column; None for NULL."""
    return None if text is None else json.loads(text)
