"""One service as a child process: start, wait until ready, look at its memory, end it for certain.

    demo --Service--> keeper --> python -m server_patches | python -m trainer --log--> file

Output goes to a log file, whose end is shown when something fails. `stop` returns only when no process of
the service is left. Raises ProcessError. Blocking; used from the main thread.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

import httpx
import psutil

from dflash_online.errors import ProcessError
from dflash_online.process.keeper import DEFAULT_GRACE_S, keeper_command

_TAIL_LINES = 25
_STOP_MARGIN_S = 15.0


class Service:
    """A running service. A context manager: leaving it ends the service."""

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        log_path: Path,
        *,
        environment: Mapping[str, str] | None = None,
        grace_s: float = DEFAULT_GRACE_S,
    ) -> None:
        self.name, self.log_path = name, log_path
        self._grace_s = grace_s
        self._ever_seen: dict[int, psutil.Process] = {}
        log_path.parent.mkdir(parents=True, exist_ok=True)
        with log_path.open("wb") as log:
            self._keeper = subprocess.Popen(
                keeper_command(command, grace_s),
                stdin=subprocess.PIPE,  # never written: its end of file tells the keeper that we died
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env={**os.environ, **(environment or {})},
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    @property
    def exit_code(self) -> int | None:
        """None while it runs."""
        return self._keeper.poll()

    def processes(self) -> list[psutil.Process]:
        """The service's processes that are alive, its keeper left out."""
        try:
            found = psutil.Process(self._keeper.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            found = []
        self._ever_seen.update((process.pid, process) for process in found)
        return found

    def rss_bytes(self) -> int:
        """Resident memory of the whole tree; pages shared between its processes count once each."""
        return sum(_rss_bytes(process) for process in self.processes())

    def require_running(self) -> None:
        """Raises ProcessError with the end of the log when the service has ended."""
        code = self.exit_code
        if code is not None:
            raise ProcessError(self.name, f"ended early with exit code {code}; {self.log_tail()}")

    def wait_ready(self, url: str, timeout_s: float, on_wait: Callable[[float], None]) -> float:
        """Wait until GET `url` answers 200. Calls `on_wait(seconds so far)` about twice a second.

        Returns:
            Seconds waited.

        Raises:
            ProcessError: it ended, or was not ready in time; the message shows the end of the log.
        """
        start = time.monotonic()
        while (waited_s := time.monotonic() - start) < timeout_s:
            self.require_running()
            if _answers_200(url):
                return waited_s
            on_wait(waited_s)
            time.sleep(0.5)
        raise ProcessError(self.name, f"not ready after {timeout_s:g} s at {url}; {self.log_tail()}")

    def log_tail(self) -> str:
        """The last lines of the log, introduced by its path."""
        lines = self.log_path.read_text(encoding="utf-8", errors="replace").splitlines()[-_TAIL_LINES:]
        return f"the end of {self.log_path}:\n" + "\n".join(f"    {line}" for line in lines)

    def stop(self) -> None:
        """End the service and everything that it started. Safe to call twice.

        Raises:
            ProcessError: a process survived being killed.
        """
        self.processes()
        if self._keeper.poll() is None:
            self._keeper.send_signal(signal.SIGTERM)
            try:
                self._keeper.wait(timeout=self._grace_s + _STOP_MARGIN_S)
            except subprocess.TimeoutExpired:
                self._keeper.kill()
                self._keeper.wait()
        if self._keeper.stdin is not None:
            self._keeper.stdin.close()
        self._end_strays()

    def left_over(self) -> list[psutil.Process]:
        """Processes of this service, seen at any time, that are still alive."""
        return [process for process in list(self._ever_seen.values()) if _is_alive(process)]

    def _end_strays(self) -> None:
        """Only when the keeper itself was killed can something be left here."""
        left = self.left_over()
        for process in left:
            try:
                process.kill()
            except psutil.NoSuchProcess:
                continue
        _, alive = psutil.wait_procs(left, timeout=5.0)
        if alive:
            raise ProcessError(self.name, f"processes {[process.pid for process in alive]} cannot be ended")


def _is_alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _rss_bytes(process: psutil.Process) -> int:
    try:
        return int(process.memory_info().rss)
    except psutil.NoSuchProcess:
        return 0


def _answers_200(url: str) -> bool:
    try:
        return httpx.get(url, timeout=5.0, trust_env=False).status_code == httpx.codes.OK
    except httpx.HTTPError:
        return False
