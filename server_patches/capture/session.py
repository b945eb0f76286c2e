"""One capture, from the request to the record: the HTTP process's side.

    CaptureBody -> free slot -> generate (or prefill), own cache key -> rows complete? -> record frames

Runs on SGLang's event loop. The slot is held until the record has been sent or the client has gone; a client
that vanishes aborts its generation. Fails with CaptureShedError (503), ConfigError (422), CaptureError (500).

Shape letters: T = tokens, F = feature width.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from dflash_online.errors import ConfigError, DflashOnlineError
from dflash_online.wire.codec import encode_record
from dflash_online.wire.record import Record, RecordHeader, RecordSource, TargetIdentity
from server_patches.capture.slots import CaptureKey, SlotPool, open_slot
from server_patches.control import call


class CaptureShedError(DflashOnlineError):
    """No slot is free: capture waits, serving does not. Edge answer: HTTP 503 with Retry-After."""

    def __init__(self, num_slots: int, retry_after_s: float) -> None:
        super().__init__(num_slots, retry_after_s)
        self.num_slots, self.retry_after_s = num_slots, retry_after_s

    def __str__(self) -> str:
        return f"all {self.num_slots} capture slots are in use; retry after {self.retry_after_s:g} s"


class CaptureError(DflashOnlineError):
    """The sequence ended without a full set of rows. Edge answer: HTTP 500."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CapturePlan:
    """A checked capture request."""

    input_ids: tuple[int, ...]
    is_prefill_only: bool
    loss_spans: tuple[tuple[int, int], ...]
    """For prefill only; a generated response supervises itself."""
    sampling_params: dict[str, Any]
    record_id: str
    cursor: int | None
    source: RecordSource


@dataclass(frozen=True, kw_only=True, slots=True)
class TargetFacts:
    """What every record of this server says about its target."""

    identity: TargetIdentity
    layer_ids: tuple[int, ...]
    row_width: int
    context_length: int


class CaptureSession:
    """One capture in one slot. Use: `session = ...; await session.run(); for chunk in session.frames(): ...;
    session.close()`."""

    def __init__(self, plan: CapturePlan, facts: TargetFacts, pool: SlotPool) -> None:
        max_rows = min(pool.slot_bytes // (2 * facts.row_width), facts.context_length)
        longest = len(plan.input_ids) + (0 if plan.is_prefill_only else _max_new_tokens(plan))
        if longest > max_rows:
            bound = f"at most {max_rows} tokens with the response (slot size and context length)"
            raise ConfigError("input_ids", longest, bound)
        slot = pool.acquire()
        if slot is None:
            raise CaptureShedError(pool.num_slots, retry_after_s=0.5)
        self._plan, self._facts, self._pool = plan, facts, pool
        self._key = CaptureKey(slot, uuid.uuid4().hex)
        self._is_closed = self._is_finished = False
        self.record: Record | None = None

    async def run(self, tokenizer_manager: Any, http_request: Any) -> Record:
        """Run the sequence and gather its rows.

        Raises:
            CaptureError: the request was aborted, or rows are missing.
        """
        output_ids, finish_reason = await self._generate(tokenizer_manager, http_request)
        token_ids = self._plan.input_ids + output_ids
        summary = await self._finish(tokenizer_manager, num_rows=len(token_ids) - 1)
        if summary["num_missing"] or summary["row_width"] != self._facts.row_width:
            raise CaptureError(
                f"{summary['num_missing']} of {len(token_ids) - 1} feature rows did not arrive"
            )
        prompt_length = len(self._plan.input_ids)
        spans = self._plan.loss_spans if self._plan.is_prefill_only else ((prompt_length, len(token_ids)),)
        header = RecordHeader(
            record_id=self._plan.record_id,
            source=self._plan.source,
            cursor=self._plan.cursor,
            target=self._facts.identity,
            drafter_version=summary["drafter_versions"][-1],
            layer_ids=self._facts.layer_ids,
            dtype="bfloat16",
            num_rows=len(token_ids) - 1,
            row_width=self._facts.row_width,
            token_ids=token_ids,
            prompt_length=prompt_length
            if not self._plan.is_prefill_only
            else _first_start(spans, prompt_length),
            loss_spans=spans,
            sampling=_plain_values(self._plan.sampling_params),
            finish_reason=finish_reason,
            acceptance=tuple(summary["histogram"]),
        )
        rows_TF = open_slot(self._key.slot, self._facts.row_width)
        self.record = Record(header, rows_TF[: header.num_rows])
        return self.record

    def frames(self) -> Iterator[bytes]:
        """The record's bytes, then the slot is free again."""
        assert self.record is not None
        try:
            for chunk in encode_record(self.record):
                yield bytes(chunk)
        finally:
            self.close()

    async def abandon(self, tokenizer_manager: Any) -> None:
        """End a failed capture: no row of it may reach the slot once it is another's."""
        if not self._is_finished:
            await self._finish(tokenizer_manager, num_rows=0)
        self.close()

    def close(self) -> None:
        """Free the slot. Safe to call again."""
        if not self._is_closed:
            self._is_closed, self.record = True, None
            self._pool.release(self._key.slot)

    async def _finish(self, tokenizer_manager: Any, *, num_rows: int) -> dict[str, Any]:
        self._is_finished = True
        return await call(
            tokenizer_manager, "capture_finish", capture_id=self._key.capture_id, num_rows=num_rows
        )

    async def _generate(self, tokenizer_manager: Any, http_request: Any) -> tuple[tuple[int, ...], str]:
        from sglang.srt.managers.io_struct import GenerateReqInput

        sampling = {"max_new_tokens": 1} if self._plan.is_prefill_only else self._plan.sampling_params
        request = GenerateReqInput(
            input_ids=list(self._plan.input_ids), sampling_params=dict(sampling), extra_key=str(self._key)
        )
        last: dict[str, Any] = {}
        async for out in tokenizer_manager.generate_request(request, http_request):
            last = out
        reason = (last.get("meta_info") or {}).get("finish_reason") or {}
        if reason.get("type") not in ("stop", "length"):
            raise CaptureError(f"the request ended without a response: {reason or 'no output'}")
        if self._plan.is_prefill_only:
            return (), "prefill"
        return tuple(int(t) for t in last["output_ids"]), str(reason["type"])


async def run_short_request(
    tokenizer_manager: Any, http_request: Any, input_ids: list[int], extra_key: str
) -> None:
    """One prefill and one verify step of a text, for the probe."""
    from sglang.srt.managers.io_struct import GenerateReqInput

    # The first token comes from the prefill, the second from a verify step.
    sampling = {"max_new_tokens": 2, "temperature": 0.0, "ignore_eos": True}
    request = GenerateReqInput(input_ids=input_ids, sampling_params=sampling, extra_key=extra_key)
    async for _ in tokenizer_manager.generate_request(request, http_request):
        pass


def _max_new_tokens(plan: CapturePlan) -> int:
    return int(plan.sampling_params.get("max_new_tokens", 128))


def _first_start(spans: tuple[tuple[int, int], ...], num_tokens: int) -> int:
    """Prompt length of a finished conversation: all before the first supervised token."""
    return max(1, spans[0][0]) if spans else num_tokens


def _plain_values(params: dict[str, Any]) -> dict[str, float | int | str | bool]:
    return {k: v for k, v in params.items() if isinstance(v, float | int | str | bool)}
