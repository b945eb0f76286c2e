"""From the buffer's files to packed batches: which records a step takes, and their loading ahead of time.

    [ records table ] --pick (rank 0)--> StepPlan --share--> every rank --load, pack (thread)--> PackedBatch

Pick    least used first, chance among equals: a fresh record is taken at once, and when the target is slow
        the step goes on with what is there, up to `max_uses` each. Fewer records than a step wants: wait,
        unless no more will come.
Load    one step ahead, in a thread. A file that cannot be read is named in the result; the step goes on.
A pack's anchors depend on the seed, the step and the pack alone, not on the rank that packs it.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from dflash_online.distill.pack import PackedBatch, pack_records, valid_anchors
from dflash_online.errors import WireError
from dflash_online.wire.codec import decode_record
from dflash_online.wire.record import Record
from trainer.loop.parallel import Ranks
from trainer.runs.config import RunConfig
from trainer.store.record_rows import StoredRecord


@dataclass(frozen=True, slots=True)
class StepPlan:
    """Which records one step takes, in packs."""

    step: int
    packs: tuple[tuple[StoredRecord, ...], ...]

    def seqs(self) -> list[int]:
        """Row numbers of all records."""
        return [record.seq for pack in self.packs for record in pack]

    def to_json(self) -> dict[str, Any]:
        """For the other ranks."""
        return {
            "step": self.step,
            "packs": [[[r.seq, r.path, r.num_uses] for r in pack] for pack in self.packs],
        }

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> StepPlan:
        """The plan that rank 0 shared."""
        packs = tuple(tuple(StoredRecord(*record) for record in pack) for pack in value["packs"])
        return cls(value["step"], packs)


@dataclass(frozen=True, slots=True)
class LoadedStep:
    """One rank's part of a step."""

    batches: list[PackedBatch]
    generators: list[torch.Generator]  # one per batch, advanced by the sampling of its anchors
    num_tokens: int
    unreadable: list[int]  # row numbers


def pick_records(
    available: Sequence[StoredRecord],
    config: RunConfig,
    step: int,
    pick: torch.Generator,
    *,
    is_last_call: bool,
) -> StepPlan | None:
    """Choose the records of a step, or None when there are too few.

    Args:
        available: least used first; records of a step that still runs are left out by the caller.
        is_last_call: no more records will come, so that fewer than `records_per_step` will do.
    """
    wanted = config.records_per_step
    if len(available) < (1 if is_last_call else wanted):
        return None
    order = torch.randperm(len(available), generator=pick).tolist()
    chosen = sorted((available[i] for i in order), key=lambda record: record.num_uses)[:wanted]
    packs = tuple(tuple(chosen[i :: config.num_packs]) for i in range(config.num_packs))
    return StepPlan(step, packs)


class StepLoader:
    """Loads this rank's packs of a plan in a thread. Usage: `submit(plan)`, later `take()`."""

    def __init__(self, config: RunConfig, ranks: Ranks, block_size: int) -> None:
        self._config, self._ranks, self._block_size = config, ranks, block_size
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="step-loader")
        self._plan: StepPlan | None = None
        self._loading: Future[LoadedStep] | None = None

    @property
    def pending(self) -> StepPlan | None:
        """The plan that was submitted and not taken."""
        return self._plan

    def submit(self, plan: StepPlan) -> None:
        """Start to load."""
        assert self._plan is None
        self._plan, self._loading = plan, self._thread.submit(self._load, plan)

    def take(self) -> tuple[StepPlan, LoadedStep, float]:
        """The plan, its data on the rank's device, and the seconds waited for it."""
        assert self._plan is not None
        assert self._loading is not None
        start = time.monotonic()
        loaded = self._loading.result()
        plan, self._plan, self._loading = self._plan, None, None
        batches = [batch.to(self._ranks.device) for batch in loaded.batches]
        loaded = replace(loaded, batches=batches)
        return plan, loaded, time.monotonic() - start

    def close(self) -> None:
        """End the thread."""
        self._thread.shutdown(wait=True, cancel_futures=True)

    def _load(self, plan: StepPlan) -> LoadedStep:
        batches, generators, num_tokens, unreadable = [], [], 0, []
        num_anchors = self._config.anchors_per_step // len(plan.packs)
        for index in range(self._ranks.rank, len(plan.packs), self._ranks.world_size):
            records = []
            for stored in plan.packs[index]:
                record = read_record(stored)
                if record is None:
                    unreadable.append(stored.seq)
                else:
                    records.append(record)
            if not records:
                continue
            generator = pack_generator(self._config.seed, plan.step, index)
            generators.append(generator)
            batches.append(
                pack_records(
                    records,
                    block_size=self._block_size,
                    num_anchors=num_anchors,
                    generator=generator,
                )
            )
            num_tokens += sum(len(record.header.token_ids) for record in records)
        return LoadedStep(batches, generators, num_tokens, unreadable)


def pack_generator(seed: int, step: int, pack: int) -> torch.Generator:
    """The chance of one pack of one step."""
    return torch.Generator().manual_seed((seed * 1_000_003 + step) * 4_099 + pack)


def read_record(stored: StoredRecord) -> Record | None:
    """Read one file; None when it is gone, damaged, or without an anchor."""
    try:
        record = decode_record(Path(stored.path).read_bytes())
    except (OSError, WireError):
        return None
    return record if len(valid_anchors(record.loss_mask_T())) else None
