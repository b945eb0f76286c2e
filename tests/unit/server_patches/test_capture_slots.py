"""Slots and tap: rows land at their positions, in the right slot, and nowhere else."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch

from server_patches.capture.slots import CAPTURE_DIR_ENV, CaptureKey, SlotPool, open_slot, slot_path
from server_patches.capture.tap import CaptureTap

WIDTH = 6


@pytest.fixture
def pool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SlotPool:
    monkeypatch.setenv(CAPTURE_DIR_ENV, str(tmp_path))
    return SlotPool(num_slots=2, slot_bytes=10 * WIDTH * 2)


@dataclass
class FakeRequest:
    """The one field of SGLang's request that the tap reads."""

    extra_key: str | None


@dataclass
class FakeBatch:
    """The fields of SGLang's batch that the tap reads."""

    reqs: list[FakeRequest]
    extend_lens: list[int] = field(default_factory=list)
    prefix_lens: list[int] = field(default_factory=list)
    seq_lens: torch.Tensor = field(default_factory=lambda: torch.zeros(0))


def rows(count: int, start: float) -> torch.Tensor:
    return (start + torch.arange(count, dtype=torch.float32))[:, None].expand(-1, WIDTH)


def test_a_key_survives_its_text_form_and_ordinary_keys_are_none() -> None:
    key = CaptureKey(3, "ab:cd")
    assert CaptureKey.parse(str(key)) == key
    assert CaptureKey.parse("tenant-7") is None
    assert CaptureKey.parse(None) is None


def test_an_empty_pool_sheds_and_a_released_slot_comes_back_blank(pool: SlotPool) -> None:
    first, second = pool.acquire(), pool.acquire()
    assert (first, second, pool.acquire()) == (0, 1, None)
    open_slot(0, WIDTH)[:] = 5.0
    pool.release(0)
    assert pool.acquire() == 0
    assert float(open_slot(0, WIDTH).float().sum()) == 0.0
    assert slot_path(0).stat().st_size == 10 * WIDTH * 2


def test_chunks_and_verify_steps_fill_the_rows_of_their_own_request(pool: SlotPool) -> None:
    tap = CaptureTap(is_writer=True)
    mine, plain = FakeRequest(str(CaptureKey(1, "c"))), FakeRequest(None)
    tap.begin_step(FakeBatch([plain, mine], extend_lens=[2, 3], prefix_lens=[0, 0]), "1-a")
    tap.take(torch.cat([rows(2, 900.0), rows(3, 0.0)]), None)
    tap.begin_step(FakeBatch([mine], extend_lens=[1], prefix_lens=[3]), "1-a")
    tap.take(rows(1, 3.0), None)
    # A verify step of width 3: two rows of ours are committed, the third is a rejected draft.
    tap.begin_step(FakeBatch([plain, mine], seq_lens=torch.tensor([7, 4])), "2-b")
    tap.take(torch.cat([rows(3, 900.0), rows(3, 4.0)]), torch.tensor([3, 2]))
    tap.count_accepted(mine.extra_key, 1)
    assert open_slot(1, WIDTH)[:7, 0].tolist() == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 0.0]
    summary = tap.finish("c", num_rows=6)
    assert summary["num_missing"] == 0
    assert summary["drafter_versions"] == ["1-a", "2-b"]
    assert summary["histogram"] == [0, 1]


def test_rows_that_never_came_are_counted_as_missing(pool: SlotPool) -> None:
    tap = CaptureTap(is_writer=True)
    mine = FakeRequest(str(CaptureKey(0, "c")))
    tap.begin_step(FakeBatch([mine], extend_lens=[2], prefix_lens=[3]), "1-a")
    tap.take(rows(2, 0.0), None)
    assert tap.finish("c", num_rows=5)["num_missing"] == 3
    assert tap.finish("unknown", num_rows=5)["num_missing"] == 5


def test_a_finished_capture_writes_no_more(pool: SlotPool) -> None:
    """An overlapped step may still bring rows; the slot may be another capture's by then."""
    tap = CaptureTap(is_writer=True)
    mine = FakeRequest(str(CaptureKey(0, "c")))
    tap.finish("c", num_rows=0)
    tap.begin_step(FakeBatch([mine], extend_lens=[2], prefix_lens=[0]), "1-a")
    tap.take(rows(2, 7.0), None)
    assert float(open_slot(0, WIDTH).float().abs().sum()) == 0.0


def test_rows_beyond_the_slot_are_counted_and_not_written(pool: SlotPool) -> None:
    tap = CaptureTap(is_writer=True)
    mine = FakeRequest(str(CaptureKey(0, "c")))
    tap.begin_step(FakeBatch([mine], extend_lens=[4], prefix_lens=[8]), "1-a")
    tap.take(rows(4, 1.0), None)
    assert tap.finish("c", num_rows=10)["num_overflow"] == 2


def test_other_ranks_write_nothing(pool: SlotPool) -> None:
    tap = CaptureTap(is_writer=False)
    tap.begin_step(FakeBatch([FakeRequest(str(CaptureKey(0, "c")))], extend_lens=[2], prefix_lens=[0]), "1-a")
    tap.take(rows(2, 7.0), None)
    assert float(open_slot(0, WIDTH).float().abs().sum()) == 0.0
