"""Runs one service and leaves nothing of it behind, however either of them ends.

    cli (target serve, trainer serve)  --keep-->                     service and all its descendants
    demo --pipe--> python -m dflash_online.process.keeper --keep-->  service and all its descendants

The keeper forwards SIGINT, SIGTERM and SIGHUP as SIGTERM, gives the service `grace_s` to end in order, then
kills every descendant that is left. It is the subreaper of the tree, so that a grandchild whose parent died
still counts. The same happens when `watch_fd` is closed, i.e. when the starting process died, even by
SIGKILL; and the kernel kills the service when the keeper itself is killed. Single-threaded, polls.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from types import FrameType

import psutil

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_POLL_S = 0.1
_KILL_WAIT_S = 10.0
DEFAULT_GRACE_S = 20.0


def keep(command: Sequence[str], *, grace_s: float = DEFAULT_GRACE_S, watch_fd: int | None = None) -> int:
    """Run the command until it ends or is told to; call from the main thread.

    Args:
        grace_s: seconds between the polite signal and the kill.
        watch_fd: read end of a pipe; when its other end closes, the service is ended.

    Returns:
        The command's exit code, `128 + signal` when a signal ended it.
    """
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    told: list[int] = []

    def tell(number: int, frame: FrameType | None) -> None:
        told.append(number)

    before = {
        number: signal.signal(number, tell) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    }
    # A group of its own: the terminal's Ctrl-C then reaches it once, from here.
    service = subprocess.Popen(
        command, start_new_session=True, stdin=subprocess.DEVNULL, preexec_fn=_die_with_parent
    )
    try:
        while service.poll() is None and not told and not _is_closed(watch_fd, _POLL_S):
            pass
        if service.poll() is None:
            service.terminate()
            _wait(service, grace_s)
    finally:
        _kill_descendants()
        code = service.wait()
        for number, handler in before.items():
            signal.signal(number, handler)
    return 128 - code if code < 0 else code


def _wait(service: subprocess.Popen[bytes], grace_s: float) -> None:
    try:
        service.wait(timeout=grace_s)
    except subprocess.TimeoutExpired:
        service.kill()


def _kill_descendants() -> None:
    """Kill until none is left: a process may have started another one meanwhile."""
    deadline = time.monotonic() + _KILL_WAIT_S
    while time.monotonic() < deadline:
        left = [p for p in psutil.Process().children(recursive=True) if _is_alive(p)]
        if not left:
            return
        for process in left:
            _kill(process)
        psutil.wait_procs(left, timeout=0.2)


def _is_alive(process: psutil.Process) -> bool:
    try:
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def _kill(process: psutil.Process) -> None:
    try:
        process.kill()
    except psutil.NoSuchProcess:
        return


def _is_closed(watch_fd: int | None, timeout_s: float) -> bool:
    """True when the other end of the pipe is gone. Waits up to the timeout."""
    if watch_fd is None:
        time.sleep(timeout_s)
        return False
    readable, _, _ = select.select([watch_fd], [], [], timeout_s)
    return bool(readable) and os.read(watch_fd, 1) == b""


def _prctl(option: int, value: int) -> None:
    """Linux only; elsewhere the guarantees that need it are not given."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def _die_with_parent() -> None:
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def keeper_command(command: Sequence[str], grace_s: float = DEFAULT_GRACE_S) -> list[str]:
    """The command line that keeps `command`, with the watched pipe as standard input."""
    return [sys.executable, "-m", "dflash_online.process.keeper", str(grace_s), *command]


if __name__ == "__main__":
    sys.exit(keep(sys.argv[2:], grace_s=float(sys.argv[1]), watch_fd=0))
