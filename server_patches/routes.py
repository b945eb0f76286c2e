"""The /dflash/* routes on SGLang's own port. Documented in docs/target-api.md.

    client --HTTP--> routes --control call--> scheduler      capture: --> CaptureSession --> record stream

Runs on SGLang's event loop and behind its API keys. Typed errors become JSON with type, field, value, bound;
nothing here blocks: reading a checkpoint and hashing weights happen in the scheduler's background jobs.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response, StreamingResponse
from fastapi.routing import APIRoute
from pydantic import BaseModel, ConfigDict, Field, model_validator

from dflash_online import __version__
from dflash_online.errors import ConfigError, DflashOnlineError
from dflash_online.prompts.item import Message
from dflash_online.prompts.template import render_conversation, render_prompt
from dflash_online.tree.policy import PolicyMode
from dflash_online.wire.record import RecordSource, TargetIdentity
from server_patches.capture.session import (
    CapturePlan,
    CaptureSession,
    CaptureShedError,
    TargetFacts,
    run_short_request,
)
from server_patches.capture.slots import CAPTURE_DIR_ENV, SlotPool
from server_patches.compat import SGLANG_VERSION
from server_patches.control import ERROR_STATUS, CallError, call, describe_error
from server_patches.probe import probe_key

CAPTURE_SLOTS_ENV, CAPTURE_SLOT_BYTES_ENV = "DFLASH_CAPTURE_SLOTS", "DFLASH_CAPTURE_SLOT_BYTES"


class StrictBody(BaseModel):
    model_config = ConfigDict(extra="forbid")


class MessageBody(StrictBody):
    """One turn of a chat."""

    role: str = Field(min_length=1)
    content: str


class CaptureBody(StrictBody):
    """Body of POST /dflash/capture."""

    mode: Literal["generate", "prefill"] = "generate"
    input_ids: list[int] | None = Field(default=None, min_length=1)
    text: str | None = None
    messages: list[MessageBody] | None = Field(default=None, min_length=1)
    sampling_params: dict[str, Any] = Field(default_factory=dict)
    loss_spans: list[tuple[int, int]] | None = None
    record_id: str | None = None
    cursor: int | None = None
    source: RecordSource | None = None
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _one_input(self) -> CaptureBody:
        given = [name for name in ("input_ids", "text", "messages") if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError(f"exactly one of input_ids, text, messages must be given, got {given or 'none'}")
        if self.mode == "generate" and self.loss_spans is not None:
            raise ValueError("loss_spans must be absent in mode generate: the response is supervised")
        if self.mode == "prefill" and self.sampling_params:
            raise ValueError("sampling_params must be absent in mode prefill: nothing is sampled")
        return self


class ProbeBody(StrictBody):
    """Body of POST /dflash/probe."""

    input_ids: list[int] = Field(min_length=1)


class StageBody(StrictBody):
    path: str = Field(min_length=1)


class CommitBody(StrictBody):
    version: str | None = None


class PolicyBody(StrictBody):
    mode: PolicyMode
    num_nodes: int | None = Field(default=None, ge=0)
    max_batch_size: int | None = Field(default=None, ge=1)
    probe_interval: int | None = Field(default=None, ge=2)


class TypedErrorRoute(APIRoute):
    """Turns our typed errors into answers, so that endpoints need no `try`."""

    def get_route_handler(self) -> Any:
        handle = super().get_route_handler()

        async def with_typed_errors(request: Request) -> Response:
            try:
                return await handle(request)
            except RequestValidationError as exc:
                return _error(422, _describe_invalid_body(exc))
            except CallError as exc:
                return _error(exc.status, {"type": exc.kind, "message": exc.message} | exc.fields)
            except CaptureShedError as exc:
                headers = {"Retry-After": f"{exc.retry_after_s:g}"}
                return _error(503, describe_error(exc), headers)
            except DflashOnlineError as exc:
                return _error(ERROR_STATUS.get(type(exc).__name__, 500), describe_error(exc))

        return with_typed_errors


def _describe_invalid_body(error: RequestValidationError) -> dict[str, Any]:
    """Pydantic's first complaint in the shape of our errors; SGLang's own handler would drop the field."""
    first = error.errors()[0]
    field = ".".join(str(part) for part in first["loc"] if part != "body") or "body"
    message = f"{field}: {first['msg']}"
    bound = first["msg"]
    return {
        "type": "ConfigError",
        "message": message,
        "field": field,
        "value": repr(first["input"]),
        "bound": bound,
    }


def _error(status: int, described: dict[str, Any], headers: dict[str, str] | None = None) -> JSONResponse:
    return JSONResponse({"error": described}, status_code=status, headers=headers)


class ServerState:
    """What the HTTP process keeps between calls: the slot pool and the target's facts."""

    def __init__(self) -> None:
        self.pool: SlotPool | None = None
        self.num_captured = 0
        self.num_shed = 0

    def slots(self) -> SlotPool:
        """The pool, made on first use: the folder exists only in a launched server."""
        if self.pool is None:
            if CAPTURE_DIR_ENV not in os.environ:
                raise ConfigError(CAPTURE_DIR_ENV, None, "set, as `python -m server_patches` does")
            self.pool = SlotPool(int(os.environ[CAPTURE_SLOTS_ENV]), int(os.environ[CAPTURE_SLOT_BYTES_ENV]))
        return self.pool


router = APIRouter(prefix="/dflash", route_class=TypedErrorRoute)
state = ServerState()


def _tokenizer_manager() -> Any:
    from sglang.srt.entrypoints import http_server

    if http_server._global_state is None:
        raise CaptureShedError(0, retry_after_s=1.0)
    return http_server._global_state.tokenizer_manager


def _server_args() -> Any:
    return _tokenizer_manager().server_args


def _identity(info: dict[str, Any]) -> TargetIdentity:
    args = _server_args()
    return TargetIdentity(
        path=str(args.model_path), revision=str(args.revision or ""), weight_checksum=info["weight_checksum"]
    )


@router.get("/info")
async def get_info() -> dict[str, Any]:
    info = await call(_tokenizer_manager(), "info")
    identity, pool = _identity(info), state.slots()
    return {
        "plugin_version": __version__,
        "sglang_version": SGLANG_VERSION,
        "device": info["device"],
        "processes": {"http": os.getpid(), "scheduler": info["pid"]},
        "target": {
            "path": identity.path,
            "revision": identity.revision,
            "weight_checksum": identity.weight_checksum,
        },
        "model": info["model"],
        "layer_ids": info["layer_ids"],
        "feature_width": info["feature_width"],
        "drafter": info["drafter"],
        "policy": info["policy"],
        "auto": info["auto"],
        "max_nodes": info["max_nodes"],
        "verify": info["verify"],
        "capture": {
            "slots": pool.num_slots,
            "slots_free": pool.num_free,
            "slot_bytes": pool.slot_bytes,
            "num_captured": state.num_captured,
            "num_shed": state.num_shed,
        },
    }


@router.post("/capture")
async def post_capture(body: CaptureBody, request: Request) -> Response:
    manager = _tokenizer_manager()
    info = await call(manager, "info")
    facts = TargetFacts(
        identity=_identity(info),
        layer_ids=tuple(info["layer_ids"]),
        row_width=info["feature_width"],
        context_length=info["model"]["context_length"],
    )
    plan = _plan(body, manager.tokenizer, info["model"]["vocab_size"])
    try:
        session = CaptureSession(plan, facts, state.slots())
    except CaptureShedError:
        state.num_shed += 1
        raise
    try:
        await session.run(manager, request)
    except ValueError as exc:
        await session.abandon(manager)
        # SGLang's own validation of the request, and a client that went away, surface as ValueError.
        raise ConfigError(
            "sampling_params", dict(plan.sampling_params), f"acceptable to SGLang: {exc}"
        ) from exc
    except BaseException:
        await session.abandon(manager)
        raise
    state.num_captured += 1
    return StreamingResponse(session.frames(), media_type="application/x-msgpack")


def _plan(body: CaptureBody, tokenizer: Any, vocab_size: int) -> CapturePlan:
    is_prefill = body.mode == "prefill"
    spans: list[tuple[int, int]] = list(body.loss_spans or [])
    messages = [Message(turn.role, turn.content) for turn in body.messages or ()]
    if messages and is_prefill:
        ids, spans = render_conversation(tokenizer, messages, **body.chat_template_kwargs)
    elif messages:
        ids = render_prompt(tokenizer, messages, **body.chat_template_kwargs)
    elif body.text is not None:
        ids = tokenizer.encode(body.text)
    else:
        ids = list(body.input_ids or [])
    _require_in_vocabulary(ids, vocab_size)
    if is_prefill and len(ids) < 2:
        raise ConfigError("input_ids", len(ids), "at least 2 tokens long in mode prefill")
    last_end = 0
    for start, end in spans:
        if not last_end <= start < end <= len(ids):
            raise ConfigError("loss_spans", (start, end), f"rising spans within 0..{len(ids)}")
        last_end = end
    return CapturePlan(
        input_ids=tuple(ids),
        is_prefill_only=is_prefill,
        loss_spans=tuple(spans),
        sampling_params=body.sampling_params,
        record_id=body.record_id or uuid.uuid4().hex,
        cursor=body.cursor,
        source=body.source or (RecordSource.CONVERSATION if is_prefill else RecordSource.PROMPT),
    )


def _require_in_vocabulary(token_ids: Sequence[int], vocab_size: int) -> None:
    beyond = [token for token in token_ids if not 0 <= token < vocab_size]
    if beyond:
        raise ConfigError("input_ids", beyond[0], f"in 0..{vocab_size - 1} (target vocabulary)")


@router.get("/drafter")
async def get_drafter() -> dict[str, Any]:
    drafter: dict[str, Any] = (await call(_tokenizer_manager(), "info"))["drafter"]
    return drafter


@router.post("/drafter/stage")
async def post_stage(body: StageBody) -> dict[str, Any]:
    return await call(_tokenizer_manager(), "stage", path=body.path)


@router.post("/drafter/commit")
async def post_commit(body: CommitBody) -> dict[str, Any]:
    return await _swap("commit", version=body.version)


@router.post("/drafter/rollback")
async def post_rollback(body: Annotated[StrictBody | None, Field()] = None) -> dict[str, Any]:
    return await _swap("rollback")


async def _swap(method: str, **body: Any) -> dict[str, Any]:
    """Swap, then read both models back; the read-back runs beside serving."""
    manager = _tokenizer_manager()
    swapped = await call(manager, method, **body)
    return swapped | await call(manager, "checksums")


@router.post("/probe")
async def post_probe(body: ProbeBody, request: Request) -> Response:
    """Context keys and block output of the live drafter for one text."""
    manager = _tokenizer_manager()
    info = await call(manager, "info")
    _require_in_vocabulary(body.input_ids, info["model"]["vocab_size"])
    probe_id = uuid.uuid4().hex
    await run_short_request(manager, request, body.input_ids, probe_key(probe_id))
    answer = await call(manager, "probe_finish", probe_id=probe_id)
    headers = {"X-Drafter-Version": answer["drafter_version"]}
    return Response(answer["tensors"], media_type="application/x-safetensors", headers=headers)


@router.put("/policy")
async def put_policy(body: PolicyBody) -> dict[str, Any]:
    return await call(_tokenizer_manager(), "policy", **body.model_dump(mode="json"))


@router.get("/acceptance")
async def get_acceptance() -> dict[str, Any]:
    return await call(_tokenizer_manager(), "acceptance")


def add_routes() -> None:
    """Mount the routes on SGLang's app; control routes need the admin key when one is set."""
    from sglang.srt.entrypoints import http_server
    from sglang.srt.utils.auth import AuthLevel, auth_level

    control = {post_stage, post_commit, post_rollback, put_policy}
    for endpoint in control:
        auth_level(AuthLevel.ADMIN_OPTIONAL)(endpoint)
    http_server.app.include_router(router)
