"""Real processes, really killed: nothing is left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from dflash_online.errors import ProcessError
from dflash_online.process.keeper import keeper_command
from dflash_online.process.port import free_port
from dflash_online.process.service import Service

# Starts a grandchild in a session of its own, writes both pids, and ignores polite signals when told to.
_TREE = """
import os, signal, subprocess, sys, time
if sys.argv[2] == "stubborn":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"], start_new_session=True)
with open(sys.argv[1] + ".part", "w") as file:
    file.write(f"{os.getpid()} {child.pid}")
os.rename(sys.argv[1] + ".part", sys.argv[1])
if sys.argv[2] == "early":
    print("the reason stands here")
    sys.exit(3)
time.sleep(300)
"""

_SERVER = """
import http.server, sys
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), http.server.SimpleHTTPRequestHandler).serve_forever()
"""


def start_tree(tmp_path: Path, manner: str, grace_s: float = 0.3) -> tuple[Service, list[int]]:
    pids_path = tmp_path / "pids"
    command = [sys.executable, "-c", _TREE, str(pids_path), manner]
    service = Service("dummy", command, tmp_path / "log", grace_s=grace_s)
    wait_until(pids_path.exists)
    return service, [int(pid) for pid in pids_path.read_text().split()]


def wait_until(holds: Callable[[], bool], timeout_s: float = 15.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < deadline, "the condition did not come true in time"
        time.sleep(0.02)


def is_gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


@pytest.mark.parametrize("manner", ["polite", "stubborn"])
def test_stop_ends_the_whole_tree(tmp_path: Path, manner: str) -> None:
    service, pids = start_tree(tmp_path, manner)
    assert {process.pid for process in service.processes()} >= set(pids)
    assert service.rss_bytes() > 1 << 20
    service.stop()
    assert all(map(is_gone, pids))
    service.stop()


def test_an_exception_in_the_block_ends_the_tree(tmp_path: Path) -> None:
    service, pids = start_tree(tmp_path, "polite")
    with pytest.raises(KeyboardInterrupt), service:
        raise KeyboardInterrupt
    assert all(map(is_gone, pids))


def test_a_service_that_ends_early_takes_its_children_along_and_shows_its_log(tmp_path: Path) -> None:
    service, pids = start_tree(tmp_path, "early")
    with service:
        wait_until(lambda: service.exit_code is not None)
        assert service.exit_code == 3
        assert all(map(is_gone, pids))
        with pytest.raises(
            ProcessError, match=r"(?s)dummy: ended early with exit code 3.*the reason stands here"
        ):
            service.wait_ready("http://127.0.0.1:9/", 5.0, lambda waited_s: None)


def test_killing_the_keeper_outright_still_leaves_nothing(tmp_path: Path) -> None:
    service, pids = start_tree(tmp_path, "polite")
    service.processes()
    os.kill(service._keeper.pid, signal.SIGKILL)
    service.stop()
    assert all(map(is_gone, pids))


def test_killing_the_starter_outright_leaves_nothing(tmp_path: Path) -> None:
    pids_path = tmp_path / "pids"
    tree = keeper_command([sys.executable, "-c", _TREE, str(pids_path), "stubborn"], grace_s=0.3)
    starter = (
        "import subprocess, sys, time; subprocess.Popen(sys.argv[1:], stdin=subprocess.PIPE); time.sleep(300)"
    )
    with subprocess.Popen([sys.executable, "-c", starter, *tree]) as process:
        wait_until(pids_path.exists)
        process.kill()
    pids = [int(pid) for pid in pids_path.read_text().split()]
    wait_until(lambda: all(map(is_gone, pids)))


def test_the_keeper_passes_the_exit_code_on() -> None:
    for code, program in ((7, "raise SystemExit(7)"), (137, "import os; os.kill(os.getpid(), 9)")):
        command = keeper_command([sys.executable, "-c", program])
        with subprocess.Popen(command, stdin=subprocess.PIPE) as process:
            assert process.wait(timeout=20) == code


def test_ready_is_when_the_url_answers(tmp_path: Path) -> None:
    port = free_port()
    with Service("server", [sys.executable, "-c", _SERVER, str(port)], tmp_path / "log") as service:
        waits: list[float] = []
        assert service.wait_ready(f"http://127.0.0.1:{port}/", 20.0, waits.append) < 20.0


def test_a_service_that_never_answers_is_an_error_with_its_log(tmp_path: Path) -> None:
    service, _ = start_tree(tmp_path, "polite")
    with service, pytest.raises(ProcessError, match=r"dummy: not ready after 0\.6 s at http://127"):
        service.wait_ready(f"http://127.0.0.1:{free_port()}/", 0.6, lambda waited_s: None)
