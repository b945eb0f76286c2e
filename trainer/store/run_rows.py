"""Rows of runs and of their workers.

    controller --state, desired, requests--> [ runs ] <--reads before each step-- worker
    supervisor, worker --phase, pids, heartbeat--> [ workers ] --> status, supervisor

State is written by the controller alone; phase and heartbeat by the worker (and `spawned` by the supervisor).
"""

from __future__ import annotations

import sqlite3
from dataclasses import asdict, dataclass, replace
from typing import Any

from pydantic import SecretStr

from trainer.errors import RunNotFoundError
from trainer.runs.config import RunConfig, dump_run_config, parse_run_config
from trainer.runs.state import Desired, RunState, WorkerPhase
from trainer.store.database import Database, from_json, now, to_json


@dataclass(frozen=True, kw_only=True, slots=True)
class ResolvedTarget:
    """What the target said when the run began: the identity that every later answer must show again."""

    path: str
    """Path or name in the target's own words."""
    revision: str
    weight_checksum: str
    layer_ids: tuple[int, ...]
    hidden_size: int
    folder: str
    """The target's folder on this machine."""
    block_size: int
    mask_token_id: int | None
    first_number: int
    """Number of the run's first checkpoint; above every version that the target serves."""
    num_held_out: int
    """Held-out records to be captured."""
    served_version: str
    """Drafter that the target served then; `none` without one."""
    served_path: str | None
    """Its folder in the target's words, against which the gate compares until the run has published."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunRow:
    """One run as stored."""

    run_id: str
    config: RunConfig
    resolved: ResolvedTarget
    state: RunState
    reason: str
    desired: Desired
    is_publish_requested: bool
    decay_requested: int
    """Steps of the decay phase asked for; 0: none."""
    cursor: int
    """Prompt position below which everything is settled."""
    is_feed_done: bool
    created_at: float
    updated_at: float
    finished_at: float | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Control:
    """What the worker reads before each step."""

    desired: Desired
    is_publish_requested: bool
    decay_requested: int
    cursor: int
    is_feed_done: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerRow:
    """What the worker last said."""

    attempt: int
    phase: WorkerPhase
    pids: tuple[int, ...]
    """torchrun first, then the ranks."""
    step: int
    heartbeat: float
    detail: str
    """The error of a failed worker."""
    num_restarts: int


class RunTable:
    """The tables `runs` and `workers`."""

    def __init__(self, db: Database) -> None:
        self._db = db

    def add(self, run_id: str, config: RunConfig, resolved: ResolvedTarget) -> None:
        """Store a new run in state `created`."""
        self._db.execute(
            "INSERT INTO runs (run_id, config, api_key, resolved, state, created_at, updated_at)"
            " VALUES (?, ?, ?, ?, ?, ?, ?)",
            *(run_id, to_json(dump_run_config(config)), config.api_key, to_json(asdict(resolved))),
            *(RunState.CREATED.value, now(), now()),
        )

    def get(self, run_id: str) -> RunRow:
        """One run.

        Raises:
            RunNotFoundError: no run of that id.
        """
        row = self._db.one("SELECT * FROM runs WHERE run_id = ?", run_id)
        if row is None:
            raise RunNotFoundError(run_id)
        return _run_row(row)

    def control(self, run_id: str) -> Control:
        """The worker's orders; cheaper than the whole row."""
        row = self._db.one(
            "SELECT desired, publish_requested, decay_requested, cursor, is_feed_done"
            " FROM runs WHERE run_id = ?",
            run_id,
        )
        if row is None:
            raise RunNotFoundError(run_id)
        return Control(
            desired=Desired(row["desired"]),
            is_publish_requested=bool(row["publish_requested"]),
            decay_requested=row["decay_requested"],
            cursor=row["cursor"],
            is_feed_done=bool(row["is_feed_done"]),
        )

    def all(self) -> list[RunRow]:
        """All runs, newest first."""
        return [
            _run_row(row) for row in self._db.all("SELECT * FROM runs ORDER BY created_at DESC, rowid DESC")
        ]

    def set_state(self, run_id: str, state: RunState, reason: str, *, finished_at: float | None) -> None:
        """Record a transition; the controller checked it."""
        self._db.execute(
            "UPDATE runs SET state = ?, reason = ?, updated_at = ?, finished_at = ? WHERE run_id = ?",
            *(state.value, reason, now(), finished_at, run_id),
        )

    def set_desired(self, run_id: str, desired: Desired) -> None:
        """What the worker should do from its next step on."""
        self._db.execute("UPDATE runs SET desired = ? WHERE run_id = ?", desired.value, run_id)

    def request_publish(self, run_id: str, requested: bool) -> None:
        """Ask for a publish, or mark the request as taken."""
        self._db.execute("UPDATE runs SET publish_requested = ? WHERE run_id = ?", int(requested), run_id)

    def request_decay(self, run_id: str, num_steps: int) -> None:
        """Ask for a decay phase of that many steps, or mark it as taken (0)."""
        self._db.execute("UPDATE runs SET decay_requested = ? WHERE run_id = ?", num_steps, run_id)

    def set_cursor(self, run_id: str, cursor: int) -> None:
        """Move the position below which every prompt is settled."""
        self._db.execute("UPDATE runs SET cursor = ? WHERE run_id = ?", cursor, run_id)

    def set_feed_done(self, run_id: str, is_done: bool) -> None:
        """Tell the worker whether more records may come."""
        self._db.execute("UPDATE runs SET is_feed_done = ? WHERE run_id = ?", int(is_done), run_id)

    def worker(self, run_id: str) -> WorkerRow | None:
        """The worker's last word, or None before the first start."""
        row = self._db.one("SELECT * FROM workers WHERE run_id = ?", run_id)
        if row is None:
            return None
        return WorkerRow(
            attempt=row["attempt"],
            phase=WorkerPhase(row["phase"]),
            pids=tuple(from_json(row["pids"])),
            step=row["step"],
            heartbeat=row["heartbeat"],
            detail=row["detail"],
            num_restarts=row["num_restarts"],
        )

    def worker_spawned(self, run_id: str, pid: int, *, is_restart: bool) -> None:
        """The supervisor started torchrun as `pid`."""
        self._db.execute(
            "INSERT INTO workers (run_id, attempt, phase, pids, heartbeat, num_restarts)"
            " VALUES (?, 1, ?, ?, ?, 0)"
            " ON CONFLICT (run_id) DO UPDATE SET attempt = attempt + 1, phase = excluded.phase, detail = '',"
            " pids = excluded.pids, heartbeat = excluded.heartbeat, num_restarts = num_restarts + ?",
            *(run_id, WorkerPhase.SPAWNED.value, to_json([pid]), now(), int(is_restart)),
        )

    def worker_pids(self, run_id: str, pids: tuple[int, ...]) -> None:
        """Rank 0 names all processes."""
        self._db.execute("UPDATE workers SET pids = ? WHERE run_id = ?", to_json(list(pids)), run_id)

    def worker_says(self, run_id: str, phase: WorkerPhase, *, step: int, detail: str = "") -> None:
        """Rank 0 reports; also its heartbeat."""
        self._db.execute(
            "UPDATE workers SET phase = ?, step = ?, heartbeat = ?, detail = ? WHERE run_id = ?",
            *(phase.value, step, now(), detail, run_id),
        )


def _run_row(row: sqlite3.Row) -> RunRow:
    resolved: dict[str, Any] = from_json(row["resolved"])
    resolved["layer_ids"] = tuple(resolved["layer_ids"])
    config = parse_run_config(row["config"])
    if row["api_key"] is not None:
        config = replace(config, target_api_key=SecretStr(row["api_key"]))
    return RunRow(
        run_id=row["run_id"],
        config=config,
        resolved=ResolvedTarget(**resolved),
        state=RunState(row["state"]),
        reason=row["reason"],
        desired=Desired(row["desired"]),
        is_publish_requested=bool(row["publish_requested"]),
        decay_requested=row["decay_requested"],
        cursor=row["cursor"],
        is_feed_done=bool(row["is_feed_done"]),
        created_at=row["created_at"],
        updated_at=row["updated_at"],
        finished_at=row["finished_at"],
    )
