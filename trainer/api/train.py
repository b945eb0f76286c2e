"""POST /train/* and GET /train/status: what drives a run. Documented in docs/trainer-api.md.

cli train, dashboard, scripts --> [ routes ] --> RunController
"""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict, Field

from trainer.api.service import Service, service_of
from trainer.observe.status import run_status
from trainer.runs.config import dump_run_config, parse_run_config
from trainer.store.run_rows import RunRow

router = APIRouter(prefix="/train")


class StopBody(BaseModel):
    """Body of POST /train/stop."""

    model_config = ConfigDict(extra="forbid")
    publish: bool = False
    """Publish the last checkpoint, if it passes the gate."""


class DecayBody(BaseModel):
    """Body of POST /train/decay."""

    model_config = ConfigDict(extra="forbid")
    steps: int = Field(ge=1, le=1_000_000)


@router.post("/start", status_code=201)
async def start(request: Request) -> dict[str, Any]:
    """Begin a run. The body is a run config, docs/run-config.md."""
    config = parse_run_config(await request.body())
    run = await service_of(request).controller.start(config)
    return {"run_id": run.run_id, "state": run.state, "config": dump_run_config(run.config)}


@router.post("/stop", status_code=202)
async def stop(request: Request, body: StopBody | None = None) -> dict[str, Any]:
    """Write the last checkpoint and end."""
    return _brief(await service_of(request).controller.stop(publish=body.publish if body else False))


@router.post("/pause")
async def pause(request: Request) -> dict[str, Any]:
    """Neither capture nor step until resumed."""
    return _brief(await service_of(request).controller.pause())


@router.post("/resume")
async def resume(request: Request) -> dict[str, Any]:
    """Go on after a pause, or after an alarm once the target is the right one again."""
    return _brief(await service_of(request).controller.resume())


@router.post("/publish", status_code=202)
async def publish(request: Request) -> dict[str, Any]:
    """Checkpoint, gate and publish as soon as the running step is done."""
    return _brief(await service_of(request).controller.publish())


@router.post("/decay", status_code=202)
async def decay(request: Request, body: DecayBody) -> dict[str, Any]:
    """Let the learning rate fall to a tenth over the next steps."""
    return _brief(await service_of(request).controller.decay(body.steps))


@router.post("/rollback")
async def rollback(request: Request) -> dict[str, Any]:
    """Make the version before the live one live again."""
    row = await service_of(request).controller.rollback()
    return {"rolled_back": row.version}


@router.get("/status")
async def status(request: Request) -> JSONResponse:
    """The run that is alive, else the last one."""
    service: Service = service_of(request)
    return JSONResponse(run_status(service.store, service.controller))


def _brief(run: RunRow) -> dict[str, Any]:
    return {"run_id": run.run_id, "state": run.state}
