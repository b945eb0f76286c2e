"""The private channel between SGLang's HTTP process and its scheduler.

    routes --call(method, body)--> tokenizer manager --ZMQ--> scheduler.control_handler --> reply

Handlers run in the scheduler's loop between two steps, on every TP rank, also while paused; the reply is
rank 0's of each data-parallel group, of which the first is returned. A handler must be short: longer work
is a background job that `call` polls. Typed errors cross the channel as (type, message, fields).
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from typing import Any

import msgspec
from sglang.srt.managers.io_struct import BaseReq

from dflash_online.errors import (
    CheckpointError,
    ConfigError,
    DflashOnlineError,
    PluginError,
    TensorMismatchError,
)

POLL_S = 0.02


class DflashControlReqInput(BaseReq, kw_only=True):  # type: ignore[call-arg]
    """A call of one scheduler method by name."""

    method: str
    body: dict[str, Any] = msgspec.field(default_factory=dict)


class DflashControlReqOutput(BaseReq, kw_only=True):  # type: ignore[call-arg]
    """Its answer: `response`, or `error` with `type`, `message` and perhaps `field`, `value`, `bound`."""

    response: dict[str, Any] | None = None
    error: dict[str, Any] | None = None


class StateConflictError(DflashOnlineError):
    """The server's state does not allow the call. Edge answer: HTTP 409."""


class CallError(DflashOnlineError):
    """A typed error of the scheduler, as it arrived in the HTTP process."""

    def __init__(self, kind: str, message: str, fields: dict[str, str]) -> None:
        super().__init__(kind, message, fields)
        self.kind, self.message, self.fields = kind, message, fields

    def __str__(self) -> str:
        return self.message

    @property
    def status(self) -> int:
        """HTTP status for this error."""
        return ERROR_STATUS.get(self.kind, 500)


ERROR_STATUS = {
    "StateConflictError": 409,
    "ConfigError": 422,
    "CheckpointError": 422,
    "IncompleteCheckpointError": 422,
    "UnsupportedCheckpointError": 422,
    "TensorMismatchError": 422,
    "PluginError": 500,
}


def describe_error(error: DflashOnlineError) -> dict[str, Any]:
    """The error as JSON: type, message, and field, value, bound where it has them."""
    described: dict[str, Any] = {"type": type(error).__name__, "message": str(error)}
    if isinstance(error, ConfigError):
        described |= {"field": error.field, "value": repr(error.value), "bound": error.bound}
    elif isinstance(error, TensorMismatchError):
        described |= {"missing": error.missing, "unexpected": error.unexpected, "wrong": error.wrong}
    elif isinstance(error, CheckpointError):
        described |= {"field": "path", "value": error.path, "bound": error.reason}
    return described


class BackgroundJob:
    """One long piece of work beside the scheduler's loop. Started once, polled until done."""

    def __init__(self, work: Callable[[], dict[str, Any]], name: str) -> None:
        self._work = work
        self.name = name
        self.result: dict[str, Any] | None = None
        self.error: DflashOnlineError | None = None
        self.thread = threading.Thread(target=self._run, name=f"dflash-{name}", daemon=True)
        self.thread.start()

    def _run(self) -> None:
        try:
            self.result = self._work()
        except DflashOnlineError as exc:
            self.error = exc
        except (OSError, RuntimeError, ValueError) as exc:
            # A thread's outermost frame: what torch or the disk raised becomes the reply.
            self.error = PluginError(f"{self.name} failed: {exc}")

    @property
    def is_done(self) -> bool:
        return not self.thread.is_alive()


class ControlHandler:
    """Scheduler side: dispatches calls to methods; runs at most one background job at a time."""

    def __init__(self) -> None:
        self._methods: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {"job": self._poll}
        self._jobs: dict[str, BackgroundJob] = {}

    def register(self, name: str, method: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
        self._methods[name] = method

    def start_job(self, name: str, work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Begin work in the background; the reply tells the caller to poll.

        Raises:
            StateConflictError: a job of that name is running.
        """
        running = self._jobs.get(name)
        if running is not None and not running.is_done:
            raise StateConflictError(f"{name} is already running")
        self._jobs[name] = BackgroundJob(work, name)
        return {"job": name}

    def _poll(self, body: dict[str, Any]) -> dict[str, Any]:
        job = self._jobs.get(str(body.get("name")))
        if job is None:
            raise StateConflictError(f"there is no job {body.get('name')!r}")
        if not job.is_done:
            return {"job": job.name}
        if job.error is not None:
            raise job.error
        return job.result or {}

    def handle(self, request: DflashControlReqInput) -> DflashControlReqOutput:
        """Answer one call. Never raises: an exception that escapes here would end the server."""
        method = self._methods.get(request.method)
        try:
            if method is None:
                raise PluginError(f"unknown control method {request.method!r}")
            return DflashControlReqOutput(response=method(request.body))
        except DflashOnlineError as exc:
            return DflashControlReqOutput(error=describe_error(exc))
        except Exception as exc:  # noqa: BLE001 - outermost frame inside the scheduler's loop
            return DflashControlReqOutput(error={"type": type(exc).__name__, "message": str(exc)})


def register_front_end() -> None:
    """Give SGLang's tokenizer manager the communicator. Must run before one is built."""
    from sglang.srt.managers import io_struct, tokenizer_control_mixin

    io_struct.hook_custom_types(DflashControlReqInput, DflashControlReqOutput)
    tokenizer_control_mixin._COMMUNICATOR_SPECS.append(("dflash_control", DflashControlReqOutput))


async def call(tokenizer_manager: Any, method: str, **body: Any) -> dict[str, Any]:
    """Call a scheduler method and wait for its answer, through a background job if it takes one.

    Raises:
        CallError: the scheduler's typed error.
    """
    response = await _call_once(tokenizer_manager, method, body)
    while set(response) == {"job"}:
        await asyncio.sleep(POLL_S)
        response = await _call_once(tokenizer_manager, "job", {"name": response["job"]})
    return response


async def _call_once(tokenizer_manager: Any, method: str, body: dict[str, Any]) -> dict[str, Any]:
    tokenizer_manager.auto_create_handle_loop()
    replies = await tokenizer_manager.dflash_control_communicator(
        DflashControlReqInput(method=method, body=body)
    )
    reply: DflashControlReqOutput = replies[0]
    if reply.error is not None:
        fields = {k: v for k, v in reply.error.items() if k not in ("type", "message")}
        raise CallError(str(reply.error["type"]), str(reply.error["message"]), fields)
    return reply.response or {}


def now_ms() -> float:
    """Monotonic milliseconds, for durations."""
    return time.perf_counter() * 1000.0
