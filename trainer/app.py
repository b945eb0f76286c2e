"""The service, assembled in one place.

    Settings --create_app--> FastAPI app: routes, error table, one lifespan

Start      open the store (one service per runs folder), bring an unfinished run back to life.
End        checkpoint and end the worker within `shutdown_s`; the run's state stays for the next start.
The event loop runs no training step: that is the worker's process.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from fastapi import FastAPI

from dflash_online import __version__
from trainer.api import health, prompts, runs, train
from trainer.api.errors import install_error_handlers
from trainer.api.service import Service
from trainer.errors import StartError
from trainer.observe.instruments import Instruments
from trainer.observe.prometheus import StoreCollector
from trainer.runs.controller import RunController
from trainer.runs.supervisor import SupervisorConfig
from trainer.settings import Settings
from trainer.store.store import Store

_LOCK_FILE = "service.lock"


def create_app(settings: Settings) -> FastAPI:
    """The service of one runs folder."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        service = _open(settings)
        app.state.service = service
        recovery = asyncio.get_running_loop().create_task(_recover(service))
        try:
            yield
        finally:
            await recovery
            await service.controller.shutdown(within_s=settings.shutdown_s)
            service.store.close()

    app = FastAPI(title="DFlash Online trainer", version=__version__, lifespan=lifespan)
    install_error_handlers(app)
    for module in (train, runs, prompts, health):
        app.include_router(module.router)
    return app


def _open(settings: Settings) -> Service:
    store = Store(settings.runs_dir.resolve())
    instruments = Instruments()
    bounds = SupervisorConfig(
        max_restarts=settings.max_restarts,
        restart_window_s=settings.restart_window_s,
        silence_s=settings.silence_s,
        stop_s=settings.stop_s,
    )
    controller = RunController(store, instruments, bounds)
    collector = StoreCollector(store, controller, instruments)
    instruments.registry.register(collector)
    return Service(store, controller, instruments, collector)


async def _recover(service: Service) -> None:
    await service.controller.recover()
    service.is_ready = True


def lock_runs_dir(runs_dir: Path) -> int:
    """Make the folder and take it for this process; the lock goes with the process, however it ends.

    Returns:
        The descriptor that holds the lock; keep it open.

    Raises:
        StartError: another service has it, or it cannot be written.
    """
    try:
        runs_dir.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(runs_dir / _LOCK_FILE, os.O_RDWR | os.O_CREAT, 0o600)
    except OSError as exc:
        raise StartError(f"runs folder {runs_dir} cannot be used: {exc}") from exc
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as exc:
        os.close(descriptor)
        raise StartError(f"runs folder {runs_dir} is in use by another trainer service") from exc
    return descriptor
