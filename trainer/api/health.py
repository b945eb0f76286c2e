"""GET /healthz, /readyz, /metrics and the dashboard at /.

probes, Prometheus, browsers --> [ routes ]
"""

from __future__ import annotations

from fastapi import APIRouter, Request
from fastapi.responses import HTMLResponse, JSONResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from trainer.api.service import service_of
from trainer.observe.dashboard import PAGE

router = APIRouter()


@router.get("/healthz")
async def healthz() -> dict[str, str]:
    """The process answers."""
    return {"status": "ok"}


@router.get("/readyz")
async def readyz(request: Request) -> JSONResponse:
    """The service takes orders: the store is open, an unfinished run is back."""
    is_ready = service_of(request).is_ready
    return JSONResponse({"status": "ready" if is_ready else "starting"}, status_code=200 if is_ready else 503)


@router.get("/metrics")
async def metrics(request: Request) -> Response:
    """Prometheus text format."""
    service_of(request).collector.observe_steps()
    return Response(generate_latest(service_of(request).instruments.registry), media_type=CONTENT_TYPE_LATEST)


@router.get("/", include_in_schema=False)
async def dashboard() -> HTMLResponse:
    """One page that shows the run."""
    return HTMLResponse(PAGE)
