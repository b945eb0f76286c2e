"""From typed errors to HTTP answers: one table, so that no endpoint needs a `try`.

    endpoint --raises--> [ table ] --> {"error": {"type", "message", "field", "value", "bound"}}

The same JSON shape as the target's (docs/target-api.md). An error outside the table is a fault of ours: 500.
"""

from __future__ import annotations

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from dflash_online.errors import (
    CheckpointError,
    ConfigError,
    DflashOnlineError,
    PromptError,
    TargetBusyError,
    TargetIdentityError,
    TargetRefusedError,
    TargetUnavailableError,
)
from trainer.errors import QueueFullError, RunNotFoundError, RunStateError, StoreError

STATUS_OF: dict[type[DflashOnlineError], int] = {
    ConfigError: 422,
    CheckpointError: 422,
    PromptError: 422,
    RunNotFoundError: 404,
    RunStateError: 409,
    TargetIdentityError: 409,
    TargetRefusedError: 409,
    QueueFullError: 503,
    TargetUnavailableError: 503,
    TargetBusyError: 503,
    StoreError: 507,
}
"""The most derived class counts."""

_RETRY_AFTER_S = 5
_DATA = (
    "field",
    "value",
    "bound",
    "line",
    "state",
    "action",
    "allowed",
    "queue",
    "size",
    "url",
    "expected",
    "found",
)


def install_error_handlers(app: FastAPI) -> None:
    """Put the table into an app."""
    app.add_exception_handler(DflashOnlineError, _typed)
    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_exception_handler(HTTPException, _plain)


async def _typed(_: Request, error: Exception) -> JSONResponse:
    status = next((STATUS_OF[kind] for kind in type(error).__mro__ if kind in STATUS_OF), 500)
    body: dict[str, object] = {"type": type(error).__name__, "message": str(error)}
    for name in _DATA:
        value = getattr(error, name, None)
        if value is not None:
            body[name] = value if isinstance(value, str | int | float | list) else repr(value)
    headers = {"Retry-After": str(_RETRY_AFTER_S)} if status == 503 else None
    return JSONResponse({"error": body}, status_code=status, headers=headers)


async def _invalid(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    place = ".".join(str(part) for part in first["loc"][1:]) or "body"
    bound = str(first["msg"]).removeprefix("Input should be ")
    return await _typed(request, ConfigError(place, first.get("input"), bound))


async def _plain(_: Request, error: Exception) -> JSONResponse:
    """Unknown routes and methods, in the same shape."""
    assert isinstance(error, HTTPException)
    body = {"type": "HttpError", "message": str(error.detail)}
    return JSONResponse({"error": body}, status_code=error.status_code)
