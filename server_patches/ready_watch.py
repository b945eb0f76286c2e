"""Waits beside the launcher until the server is up, and ends it when the plugin is not active everywhere.

    server's processes --announce folder, /health--> ready, or a failure in words and SIGTERM to the launcher

Raises PluginError.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path

import httpx
import psutil
from rich.console import Console

from dflash_online.errors import PluginError


class ReadyWatch:
    """A thread that waits for the server, checks that the plugin is everywhere, and else ends it."""

    def __init__(self, url: str, announce: Path, shared_memory: Path, *, timeout_s: float) -> None:
        self._url, self._announce, self._shared_memory = url, announce, shared_memory
        self._timeout_s = timeout_s
        self.failure: str | None = None
        self.upstream_files: set[Path] = set()
        """Shared memory that SGLang itself makes and, when it is ended by a signal, leaves behind."""

    def start(self) -> None:
        """Watch beside the keeper, which needs the main thread."""
        threading.Thread(target=self._run, name="ready-watch", daemon=True).start()

    def _run(self) -> None:
        try:
            self._wait_until_ready()
            self.require_active_everywhere()
            self.upstream_files = _mapped_files(self._shared_memory, prefix="sglang_")
        except PluginError as exc:
            self.failure = str(exc)
            os.kill(os.getpid(), signal.SIGTERM)
        else:
            Console(stderr=True, highlight=False).print(
                f"target ready: {self._url} (DFlash interface under /dflash)"
            )

    def _errors(self) -> list[str]:
        return [f"process {p.stem}: {p.read_text()}" for p in sorted(self._announce.glob("*.error"))]

    def _wait_until_ready(self) -> None:
        deadline = time.monotonic() + self._timeout_s
        while time.monotonic() < deadline:
            if errors := self._errors():
                raise PluginError("the plugin failed to activate: " + "; ".join(errors))
            try:
                answer = httpx.get(f"{self._url}/health", timeout=5.0)
            except httpx.TransportError:
                answer = None
            if answer is not None and answer.status_code == 200:
                return
            time.sleep(0.5)
        raise PluginError(f"the server was not ready within {self._timeout_s:g} s")

    def require_active_everywhere(self) -> None:
        """Raises PluginError that names every SGLang process without an active plugin."""
        active = {int(path.stem) for path in self._announce.glob("*.active")}
        silent = [
            f"{process.pid} ({name})"
            for process in psutil.Process().children(recursive=True)
            if (name := _sglang_role(process)) and process.pid not in active
        ]
        if silent:
            raise PluginError(f"the plugin is not active in these processes: {', '.join(silent)}")
        if not active:
            raise PluginError("the plugin is not active in any process")


def _mapped_files(folder: Path, prefix: str) -> set[Path]:
    """Files of the folder that a process of ours has mapped now."""
    found: set[Path] = set()
    for process in psutil.Process().children(recursive=True):
        try:
            mapped = [Path(entry.path) for entry in process.memory_maps()]
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
        found |= {path for path in mapped if path.parent == folder and path.name.startswith(prefix)}
    return found


def _sglang_role(process: psutil.Process) -> str | None:
    """Name of an SGLang process; None for helpers such as multiprocessing's resource tracker."""
    try:
        command = " ".join(process.cmdline())
    except psutil.NoSuchProcess:
        return None
    if command.startswith("sglang::"):
        return command.split()[0]
    return "sglang::http_server" if "sglang.launch_server" in command else None
