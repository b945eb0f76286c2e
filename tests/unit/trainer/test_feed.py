"""Prompt stream, buffer and target pool: order, restart, room, faults."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import pytest
from tiny_models import tiny_record
from trainer_fixtures import RUN, add_record, make_config, make_store

from dflash_online.errors import PromptError, TargetUnavailableError
from dflash_online.prompts.item import user_prompt
from dflash_online.wire.codec import decode_record
from trainer.feed.buffer import Buffer, record_file_name, remove_leftovers, write_record
from trainer.feed.prompts import LoadedPrompts, PlannedCapture, PromptStream, load_prompts, split_added
from trainer.feed.targets import TargetPool, backoff_s
from trainer.store.event_rows import EventKind
from trainer.store.record_rows import DropReason, NewRecord
from trainer.store.store import Store

TRAIN = tuple(user_prompt(f"train {i}", f"f:{i}") for i in range(3))
HELD_OUT = tuple(user_prompt(f"held {i}", f"f:{10 + i}") for i in range(2))
PROMPTS = LoadedPrompts(train=TRAIN, held_out=HELD_OUT, num_skipped=0, skipped=())


def settle(store: Store, stream: PromptStream, plan: PlannedCapture) -> None:
    row = NewRecord(
        record_id=plan.record_id,
        kind=plan.kind,
        position=plan.position,
        path="",
        num_bytes=0,
        num_tokens=0,
        num_supervised=0,
        drafter_version="",
    )
    with store.db.transaction():
        store.records.drop(RUN, row, DropReason.CORRUPT)
        stream.settle(plan)


def take(stream: PromptStream, count: int) -> list[PlannedCapture]:
    plans = [stream.plan_next() for _ in range(count)]
    return [plan for plan in plans if plan is not None]


def test_held_out_prompts_come_first_and_epochs_follow(tmp_path: Path) -> None:
    store, run = make_store(tmp_path, epochs=2)
    stream = PromptStream(store, run, PROMPTS)
    names = [plan.record_id.removeprefix(RUN + "/") for plan in take(stream, 20)]
    assert names == ["held-out/0", "held-out/1", "0/0", "0/1", "0/2", "1/0", "1/1", "1/2"]
    assert not stream.is_done  # all are in flight


def test_restarted_stream_skips_what_is_settled_and_repeats_what_was_in_flight(tmp_path: Path) -> None:
    store, run = make_store(tmp_path, epochs=1)
    stream = PromptStream(store, run, PROMPTS)
    held_0, _, train_0, train_1, train_2 = take(stream, 5)
    for plan in (held_0, train_0, train_2):
        settle(store, stream, plan)
    assert store.runs.get(RUN).cursor == train_1.position == 1
    again = PromptStream(store, store.runs.get(RUN), PROMPTS)
    plans = take(again, 5)
    assert [plan.record_id.removeprefix(RUN + "/") for plan in plans] == ["held-out/1", "0/1"]
    settle(store, again, plans[1])
    assert store.runs.get(RUN).cursor == 3
    assert again.is_done


def test_added_prompts_come_before_the_source_and_once(tmp_path: Path) -> None:
    store, run = make_store(tmp_path)
    stream = PromptStream(store, run, LoadedPrompts(train=TRAIN, held_out=(), num_skipped=0, skipped=()))
    store.added_prompts.add(RUN, [{"prompt": "one"}, {"prompt": "two"}])
    plans = take(stream, 3)
    assert [plan.record_id for plan in plans] == [f"{RUN}/added/1", f"{RUN}/added/2", f"{RUN}/0/0"]
    settle(store, stream, plans[0])
    assert store.added_prompts.count(RUN) == 1


def test_posted_prompts_of_the_held_out_side_are_left_out() -> None:
    config = make_config(held_out_share=0.5)
    rows = [{"prompt": f"prompt {i}"} for i in range(40)]
    queue, num_held_out = split_added(rows, config)
    assert len(queue) + num_held_out == 40
    assert 5 < num_held_out < 35
    assert split_added(rows, config)[0] == queue
    with pytest.raises(PromptError, match="2"):
        split_added([{"prompt": "fine"}, {"wrong": 1}], config)


def test_broken_lines_are_counted_and_named(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text('{"prompt": "a"}\n{broken\n{"prompt": "b"}\n')
    loaded = load_prompts(make_config(prompts=str(path), held_out_share=0.0))
    assert len(loaded.train) == 2
    assert loaded.num_skipped == 1
    assert "p.jsonl:2" in loaded.skipped[0]


def test_reserve_evicts_used_up_records_oldest_first_and_else_waits(tmp_path: Path) -> None:
    store, _ = make_store(tmp_path)
    paths = [add_record(store, number, num_bytes=40) for number in range(2)]
    buffer = Buffer(store, RUN, bound_bytes=100, max_uses=1)

    async def main() -> None:
        await buffer.reserve(20)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(buffer.reserve(30), 0.3)  # nothing was used yet
        assert buffer.reserved_bytes == 20
        for record in store.records.trainable(RUN, 1):
            store.records.use(RUN, 1, [record.seq])
        await asyncio.wait_for(buffer.reserve(30), 5)

    asyncio.run(main())
    assert [path.exists() for path in paths] == [False, True]  # one was enough
    totals = store.records.totals(RUN)
    assert (totals.num_ready, totals.num_total, totals.buffer_bytes) == (1, 2, 40)


def test_record_file_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    record = tiny_record(6, ((2, 6),), record_id="run-1/0/7")
    path = write_record(record, tmp_path)
    assert path.name == record_file_name("run-1/0/7") == "0-7.rec"
    assert decode_record(path.read_bytes()).header == record.header
    with pytest.raises(OSError, match="No such file"):
        write_record(record, tmp_path / "gone")
    (tmp_path / "1-1.rec").write_bytes(b"no row names it")
    remove_leftovers(tmp_path, {str(path)})
    assert list(tmp_path.iterdir()) == [path]


def test_backoff_doubles_with_jitter_up_to_a_bound() -> None:
    chance = random.Random(0)
    waits = [backoff_s(n, chance) for n in range(1, 20)]
    assert 0.125 <= waits[0] <= 0.25
    assert waits[0] < waits[3] < waits[6]
    assert all(7.5 <= wait <= 15 for wait in waits[8:])


def test_pool_leaves_out_what_does_not_answer_and_tells_once(tmp_path: Path) -> None:
    store, run = make_store(tmp_path, target_urls=["http://a", "http://b"])

    async def main() -> None:
        pool = TargetPool(store, RUN, run.config)
        assert {pool.next_client().url for _ in range(4)} == {"http://a", "http://b"}
        for _ in range(3):
            pool.report_failure(TargetUnavailableError("http://a", "gone"))
        assert {pool.next_client().url for _ in range(4)} == {"http://b"}
        assert store.events.count(RUN, EventKind.TARGET_UNAVAILABLE) == 1
        pool.report_answer("http://a")
        pool.report_answer("http://a")
        assert store.events.count(RUN, EventKind.TARGET_BACK) == 1
        await pool.aclose()

    asyncio.run(main())
