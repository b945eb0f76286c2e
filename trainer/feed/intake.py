"""Intake of records: the only way from the target server into the trainer.

    PromptStream --> [ Feed: capture_concurrency lanes ] --POST /dflash/capture--> target
                          |
                          +--> <run>/buffer/*.rec and a row, in one transaction with the cursor --> worker

Full        a lane waits for room in the buffer before it asks, so serving does no work in vain.
Fails       target gone: the same prompt again, with backoff, for as long as it takes. Shed: after
            Retry-After. Unreadable record: dropped, counted by reason, next prompt. Other weights: alarm.
            Disk full: the record in hand is kept and tried again until there is room.
Cancelled   what is in flight is not settled and is asked for again after a restart.
Runs on the event loop; rendering and files in threads. Touches no GPU.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable
from pathlib import Path

from dflash_online.errors import (
    ChecksumError,
    PromptError,
    TargetBusyError,
    TargetIdentityError,
    TargetRefusedError,
    TargetUnavailableError,
    TruncatedRecordError,
    WireError,
    WireVersionError,
)
from dflash_online.prompts.template import ChatTokenizer
from dflash_online.target.client import CaptureRequest
from dflash_online.wire.record import Record
from trainer.errors import StoreError
from trainer.feed.buffer import Buffer, write_record
from trainer.feed.prompts import PlannedCapture, PromptStream, make_request
from trainer.feed.targets import TargetPool, backoff_s
from trainer.observe.instruments import Instruments
from trainer.rollout.identity import check_header
from trainer.store.event_rows import EventKind
from trainer.store.record_rows import DropReason, NewRecord, RecordKind
from trainer.store.run_rows import RunRow
from trainer.store.store import Store

logger = logging.getLogger(__name__)

_IDLE_S = 0.2
_HEADER_BYTES = 16 << 10  # upper bound of a header's share beside token ids


class Feed:
    """Keeps captures in flight while the run wants records."""

    def __init__(
        self,
        store: Store,
        run: RunRow,
        stream: PromptStream,
        targets: TargetPool,
        tokenizer: ChatTokenizer,
        instruments: Instruments,
        on_alarm: Callable[[TargetIdentityError], None],
    ) -> None:
        self._store, self._run, self._stream, self._targets = store, run, stream, targets
        self._tokenizer, self._instruments, self._on_alarm = tokenizer, instruments, on_alarm
        config = run.config
        self.buffer = Buffer(store, run.run_id, bound_bytes=config.buffer_bytes, max_uses=config.max_uses)
        self._open = asyncio.Event()
        self._rendering = asyncio.Lock()  # fast tokenizers must not be used by two threads at a time
        self._chance = random.Random()
        self.num_in_flight = 0
        self._epoch = stream.epoch
        self._is_done: bool | None = None

    def pause(self) -> None:
        """Ask for nothing more; what is in flight still arrives."""
        self._open.clear()

    def resume(self) -> None:
        """Go on."""
        self._open.set()

    async def run(self) -> None:
        """Capture until cancelled."""
        async with asyncio.TaskGroup() as lanes:
            for _ in range(self._run.config.capture_concurrency):
                lanes.create_task(self._serve_lane())

    async def _serve_lane(self) -> None:
        while True:
            await self._open.wait()
            plan = self._stream.plan_next()
            self._tell_progress(is_done=plan is None and self._stream.is_done)
            if plan is None:
                await asyncio.sleep(_IDLE_S)
                continue
            self.num_in_flight += 1
            try:
                await self._capture_for_certain(plan)
            finally:
                self.num_in_flight -= 1

    async def _capture_for_certain(self, plan: PlannedCapture) -> None:
        """Again after an alarm that was cleared, and after the store's disk was full."""
        num_failures = 0
        while True:
            await self._open.wait()
            try:
                await self._capture(plan)
            except TargetIdentityError as error:
                self._on_alarm(error)  # closes the feed
            except StoreError as error:
                num_failures += 1
                logger.error("%s is not settled yet: %s", plan.record_id, error)
                await asyncio.sleep(backoff_s(num_failures, self._chance))
            else:
                return

    def _tell_progress(self, *, is_done: bool) -> None:
        if is_done != self._is_done:
            self._is_done = is_done
            self._store.runs.set_feed_done(self._run.run_id, is_done)
        if self._stream.epoch != self._epoch:
            self._epoch = self._stream.epoch
            self._store.events.add(self._run.run_id, EventKind.EPOCH, epoch=self._epoch)

    async def _capture(self, plan: PlannedCapture) -> None:
        try:
            async with self._rendering:
                request = await asyncio.to_thread(make_request, plan, self._tokenizer, self._run.config)
        except PromptError as error:
            self._drop(plan, DropReason.PROMPT, str(error))
            return
        num_bytes = self._largest_bytes(request)
        if num_bytes > self.buffer.bound_bytes:
            self._drop(
                plan,
                DropReason.TOO_LARGE,
                f"up to {num_bytes} bytes, buffer_bytes is {self.buffer.bound_bytes}",
            )
            return
        if plan.kind is RecordKind.HELD_OUT:
            num_bytes = 0
        await self.buffer.reserve(num_bytes)
        try:
            await self._fetch(plan, request)
        finally:
            self.buffer.release(num_bytes)

    def _largest_bytes(self, request: CaptureRequest) -> int:
        resolved = self._run.resolved
        num_new = self._run.config.sampling.max_new_tokens if request.mode == "generate" else 0
        num_tokens = len(request.input_ids or ()) + num_new
        row_bytes = 2 * len(resolved.layer_ids) * resolved.hidden_size
        return num_tokens * (row_bytes + 4) + _HEADER_BYTES

    async def _fetch(self, plan: PlannedCapture, request: CaptureRequest) -> None:
        """Ask until there is a record or a reason why there never will be one."""
        num_failures = 0
        while True:
            await self._open.wait()
            client = self._targets.next_client()
            start = time.monotonic()
            try:
                record = await client.capture(request)
            except TargetUnavailableError as error:
                num_failures += 1
                self._targets.report_failure(error)
                self._instruments.retries.labels(reason="unavailable").inc()
                await asyncio.sleep(backoff_s(num_failures, self._chance))
            except TargetBusyError as error:
                self._targets.report_answer(client.url)
                self._instruments.retries.labels(reason="busy").inc()
                await asyncio.sleep(error.retry_after_s * (1 + 0.2 * self._chance.random()))
            except TargetRefusedError as error:
                self._targets.report_answer(client.url)
                self._drop(plan, DropReason.REFUSED, str(error))
                return
            except WireError as error:
                self._targets.report_answer(client.url)
                self._drop(plan, _reason_of(error), str(error))
                return
            else:
                self._targets.report_answer(client.url)
                self._instruments.capture_seconds.observe(time.monotonic() - start)
                await self._take(plan, record)
                return

    async def _take(self, plan: PlannedCapture, record: Record) -> None:
        check_header(self._run.resolved, record.header)
        if record.header.record_id != plan.record_id:
            self._drop(plan, DropReason.CORRUPT, f"asked for {plan.record_id}, got {record.header.record_id}")
            return
        mask_T = record.loss_mask_T()
        # An anchor and the token behind it are both supervised; the anchor needs a feature row in front.
        if not bool((mask_T[:-1] & mask_T[1:]).any()):
            self._drop(plan, DropReason.UNTRAINABLE, "no two supervised tokens in a row")
            return
        if not await asyncio.to_thread(_is_finite, record):
            self._drop(plan, DropReason.NOT_FINITE, "features hold NaN or infinity")
            return
        folder = self._store.folder(self._run.run_id)
        is_held_out = plan.kind is RecordKind.HELD_OUT
        path = await self._write(record, folder.held_out if is_held_out else folder.buffer)
        row = NewRecord(
            record_id=plan.record_id,
            kind=plan.kind,
            position=plan.position,
            path=str(path),
            num_bytes=path.stat().st_size,
            num_tokens=len(record.header.token_ids),
            num_supervised=int(mask_T.sum()),
            drafter_version=record.header.drafter_version,
        )
        with self._store.db.transaction():
            self._store.records.admit(self._run.run_id, row)
            self._stream.settle(plan)

    async def _write(self, record: Record, folder: Path) -> Path:
        num_failures = 0
        while True:
            try:
                return await asyncio.to_thread(write_record, record, folder)
            except OSError as error:
                num_failures += 1
                if num_failures == 1:
                    self._store.events.add(self._run.run_id, EventKind.BUFFER_WRITE_FAILED, reason=str(error))
                await asyncio.sleep(backoff_s(num_failures, self._chance))

    def _drop(self, plan: PlannedCapture, reason: DropReason, detail: str) -> None:
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
        with self._store.db.transaction():
            self._store.records.drop(self._run.run_id, row, reason)
            self._stream.settle(plan)
            self._store.events.add(
                self._run.run_id,
                EventKind.RECORD_DROPPED,
                record_id=plan.record_id,
                origin=plan.item.origin,
                reason=reason.value,
                detail=detail,
            )


def _is_finite(record: Record) -> bool:
    return bool(record.features_TF.isfinite().all())


def _reason_of(error: WireError) -> DropReason:
    if isinstance(error, TruncatedRecordError):
        return DropReason.TRUNCATED
    if isinstance(error, ChecksumError):
        return DropReason.CHECKSUM
    if isinstance(error, WireVersionError):
        return DropReason.WIRE_VERSION
    return DropReason.CORRUPT
