"""Entry point of the trainer service: `python -m trainer`.

    flags, environment --> Settings --> socket, lock --> uvicorn --> app

The only place that reads the environment. A start that cannot work ends with exit code 2 and one line that
says why; SIGTERM and SIGINT end the service in order (see trainer.app).
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
from types import FrameType

import uvicorn

from dflash_online.errors import DflashOnlineError
from dflash_online.process.port import require_free_port
from trainer.app import create_app, lock_runs_dir
from trainer.errors import StartError
from trainer.settings import Settings, read_settings

_EXIT_CANNOT_START = 2
# Open event streams would hold the service up; they resume by Last-Event-ID.
_OPEN_REQUESTS_S = 1


def main() -> int:
    """Serve until told to end; returns the exit code."""
    try:
        settings = read_settings(sys.argv[1:], os.environ)
        logging.basicConfig(
            level=settings.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s %(message)s"
        )
        logging.getLogger("httpx").setLevel(logging.WARNING)
        listener = _listen(settings)
        lock = lock_runs_dir(settings.runs_dir)
    except DflashOnlineError as exc:
        sys.stderr.write(f"trainer: {exc}\n")
        return _EXIT_CANNOT_START
    config = uvicorn.Config(
        create_app(settings),
        log_level=settings.log_level,
        timeout_graceful_shutdown=_OPEN_REQUESTS_S,
        log_config=None,
    )
    logging.getLogger("uvicorn.access").setLevel(logging.WARNING)
    host, port = listener.getsockname()[:2]
    logging.getLogger("trainer").info("listening on http://%s:%d, runs in %s", host, port, settings.runs_dir)
    server = uvicorn.Server(config)
    for number in (signal.SIGINT, signal.SIGTERM):
        # uvicorn ends in order and then raises the signal again: that must not turn it into a failure.
        signal.signal(number, _do_nothing)
    try:
        server.run(sockets=[listener])
    finally:
        os.close(lock)
    return 0 if server.started else _EXIT_CANNOT_START


def _do_nothing(number: int, frame: FrameType | None) -> None:
    """The signal was handled by uvicorn already."""


def _listen(settings: Settings) -> socket.socket:
    """Bound here, not by uvicorn, so that a taken port is one clear line."""
    if settings.port:
        require_free_port("trainer", settings.host, settings.port)
    try:
        family = socket.getaddrinfo(settings.host, settings.port, type=socket.SOCK_STREAM)[0][0]
        listener = socket.socket(family, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((settings.host, settings.port))
        listener.listen(128)
    except OSError as exc:
        raise StartError(f"cannot listen on {settings.host}:{settings.port}: {exc}") from exc
    return listener


if __name__ == "__main__":
    sys.exit(main())
