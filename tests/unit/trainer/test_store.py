"""The store: what is unique, what commits together, what a restart takes back."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest
from trainer_fixtures import RUN, add_record, make_config, make_resolved, make_store

from trainer.errors import RunNotFoundError, StoreError
from trainer.runs.state import Desired, RunState, WorkerPhase
from trainer.store.checkpoint_rows import CheckpointState
from trainer.store.database import Database
from trainer.store.event_rows import EventKind
from trainer.store.record_rows import DropReason, NewRecord, RecordKind
from trainer.store.store import Store


def test_run_is_read_back_as_it_was_stored(tmp_path: Path) -> None:
    store, run = make_store(tmp_path, target_api_key="s3cret", optimizer={"lr": 1.0})
    assert run.config == make_config(target_api_key="s3cret", optimizer={"lr": 1.0})
    assert run.resolved == make_resolved()
    assert (run.state, run.desired) == (RunState.CREATED, Desired.RUN)
    with pytest.raises(RunNotFoundError):
        store.runs.get("other")


def test_api_key_stays_out_of_the_config_column_and_the_file_is_private(tmp_path: Path) -> None:
    make_store(tmp_path, target_api_key="s3cret")
    with sqlite3.connect(tmp_path / "runs.sqlite") as connection:
        assert "s3cret" not in connection.execute("SELECT config FROM runs").fetchone()[0]
    connection.close()
    assert (tmp_path / "runs.sqlite").stat().st_mode & 0o077 == 0


def test_second_record_of_the_same_name_is_refused(tmp_path: Path) -> None:
    store, _ = make_store(tmp_path)
    add_record(store, 1)
    row = NewRecord(
        record_id=f"{RUN}/0/1",
        kind=RecordKind.TRAIN,
        position=1,
        path="",
        num_bytes=0,
        num_tokens=0,
        num_supervised=0,
        drafter_version="",
    )
    assert not store.records.admit(RUN, row)
    assert not store.records.drop(RUN, row, DropReason.CORRUPT)
    assert store.records.totals(RUN).num_total == 1


def test_failed_transaction_leaves_nothing(tmp_path: Path) -> None:
    store, _ = make_store(tmp_path)

    def fail_halfway() -> None:
        with store.db.transaction():
            add_record(store, 1)
            store.runs.set_cursor(RUN, 7)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail_halfway()
    assert store.records.totals(RUN).num_total == 0
    assert store.runs.get(RUN).cursor == 0


def test_uses_of_lost_steps_are_taken_back(tmp_path: Path) -> None:
    store, _ = make_store(tmp_path)
    add_record(store, 1)
    add_record(store, 2)
    first, second = store.records.trainable(RUN, 10)
    store.records.use(RUN, 1, [first.seq])
    store.records.use(RUN, 2, [first.seq, second.seq])
    store.records.use(RUN, 3, [first.seq])
    store.records.take_back_uses(RUN, 1)
    assert {r.seq: r.num_uses for r in store.records.trainable(RUN, 10)} == {first.seq: 1, second.seq: 0}
    store.records.use(RUN, 2, [first.seq])  # the step is taken again
    assert [r.seq for r in store.records.trainable(RUN, 2)] == [second.seq]


def test_two_processes_see_each_other(tmp_path: Path) -> None:
    store, _ = make_store(tmp_path)
    worker = Store(tmp_path)
    store.runs.worker_spawned(RUN, 5, is_restart=False)
    worker.runs.worker_pids(RUN, (5, 6))
    worker.runs.worker_says(RUN, WorkerPhase.TRAINING, step=3)
    store.runs.set_desired(RUN, Desired.PAUSE)
    assert worker.runs.control(RUN).desired is Desired.PAUSE
    found = store.runs.worker(RUN)
    assert found is not None
    assert (found.phase, found.step, found.pids, found.attempt) == (WorkerPhase.TRAINING, 3, (5, 6), 1)
    store.runs.worker_spawned(RUN, 7, is_restart=True)
    again = store.runs.worker(RUN)
    assert again is not None
    assert (again.phase, again.attempt, again.num_restarts) == (WorkerPhase.SPAWNED, 2, 1)


def test_newest_candidate_supersedes_older_ones(tmp_path: Path) -> None:
    store, _ = make_store(tmp_path)
    for number in (1, 2, 3):
        store.checkpoints.add(
            RUN,
            version=f"{number}-ab12cd34ef56",
            path="/p",
            step=number,
            state=CheckpointState.CANDIDATE,
            gate=None,
            held_out_tau=None,
        )
    candidate = store.checkpoints.candidate(RUN)
    assert candidate is not None
    assert candidate.number == 3
    states = [row.state for row in store.checkpoints.all(RUN)]
    assert states == [CheckpointState.SUPERSEDED, CheckpointState.SUPERSEDED, CheckpointState.CANDIDATE]
    store.checkpoints.set_state(RUN, 3, CheckpointState.PUBLISHED)
    assert [row.number for row in store.checkpoints.published(RUN)] == [3]
    store.checkpoints.set_state(RUN, 3, CheckpointState.ROLLED_BACK)
    assert store.checkpoints.published(RUN) == []


def test_events_are_read_in_order_behind_a_number(tmp_path: Path) -> None:
    store, _ = make_store(tmp_path)
    for number in range(5):
        store.events.add(RUN, EventKind.EPOCH, epoch=number)
    after = store.events.after(RUN, 2)
    assert [event.data["epoch"] for event in after] == [2, 3, 4]
    assert [event.seq for event in store.events.latest(RUN, limit=2)] == [4, 5]
    assert store.events.count(RUN, EventKind.EPOCH) == 5


def test_file_of_another_schema_is_refused(tmp_path: Path) -> None:
    with sqlite3.connect(tmp_path / "old.sqlite") as connection:
        connection.execute("PRAGMA user_version=99")
    connection.close()
    with pytest.raises(StoreError, match="schema version 99"):
        Database(tmp_path / "old.sqlite")
    (tmp_path / "text.sqlite").write_text("no database at all, but long enough to be looked at" * 50)
    with pytest.raises(StoreError):
        Database(tmp_path / "text.sqlite")
