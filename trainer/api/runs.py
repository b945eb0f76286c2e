"""GET /runs, /runs/{id}, /runs/{id}/events: the history of runs.

    store --> [ routes ] --> JSON and server-sent events

An event stream begins behind `Last-Event-ID` (header, or `after` in the query) and ends with the run. It
reads the store, so a slow reader costs the run nothing.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import asdict
from typing import Annotated, Any

from fastapi import APIRouter, Header, Query, Request
from sse_starlette import EventSourceResponse, ServerSentEvent

from dflash_online.errors import ConfigError
from trainer.api.service import Service, service_of
from trainer.observe.status import run_details, run_summary
from trainer.runs.state import TERMINAL

_POLL_S = 0.25

router = APIRouter(prefix="/runs")


@router.get("")
async def list_runs(request: Request) -> dict[str, Any]:
    """All runs, newest first."""
    service = service_of(request)
    return {"runs": [run_summary(run) for run in service.store.runs.all()]}


@router.get("/{run_id}")
async def get_run(request: Request, run_id: str) -> dict[str, Any]:
    """One run with its config, target and versions."""
    service = service_of(request)
    return run_details(service.store, service.store.runs.get(run_id))


@router.get("/{run_id}/events")
async def stream_events(
    request: Request,
    run_id: str,
    last_event_id: Annotated[str | None, Header()] = None,
    after: Annotated[int, Query(ge=0)] = 0,
) -> EventSourceResponse:
    """Events as they happen, after those already seen."""
    service = service_of(request)
    service.store.runs.get(run_id)  # 404 before the stream begins
    if last_event_id is not None:
        if not last_event_id.isascii() or not last_event_id.isdigit():
            raise ConfigError("Last-Event-ID", last_event_id, "a number of an earlier event")
        after = int(last_event_id)
    return EventSourceResponse(_events(service, run_id, after))


async def _events(service: Service, run_id: str, after: int) -> AsyncIterator[ServerSentEvent]:
    while True:
        # State first: an event that is written between the two reads is seen in the next round.
        is_over = service.store.runs.get(run_id).state in TERMINAL
        events = service.store.events.after(run_id, after)
        for event in events:
            after = event.seq
            yield ServerSentEvent(data=json.dumps(asdict(event)), event=event.kind, id=str(event.seq))
        if is_over and not events:
            return
        if not events:
            await asyncio.sleep(_POLL_S)
