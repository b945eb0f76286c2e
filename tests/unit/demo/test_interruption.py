"""Signals at any moment: nothing is left behind."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from dflash_online.demo.interruption import Interrupted, Interruption

# A small demo: two services that start children of their own, then work that waits in an event loop.
_SMALL_DEMO = """
import asyncio, sys
from contextlib import ExitStack
from pathlib import Path
from dflash_online.demo.interruption import Interrupted, Interruption
from dflash_online.process.service import Service

folder = Path(sys.argv[1])
child = '''
import subprocess, sys, time, os
below = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
open(sys.argv[1], "w").write(f"{os.getpid()} {below.pid}")
time.sleep(600)
'''

async def work():
    (folder / "working").touch()
    await asyncio.sleep(600)

def end(service, interruption):
    with interruption.hold():
        service.stop()

try:
    with Interruption() as interruption, ExitStack() as stack:
        for name in ("one", "two"):
            with interruption.hold():
                command = [sys.executable, "-c", child, str(folder / name)]
                service = Service(name, command, folder / (name + ".log"), grace_s=0.5)
                stack.callback(end, service, interruption)
        (folder / "started").touch()
        asyncio.run(work())
except Interrupted as interrupted:
    sys.exit(interrupted.exit_code)
"""


def test_a_signal_is_raised_at_once_outside_a_hold() -> None:
    with Interruption(), pytest.raises(Interrupted) as caught:
        signal.raise_signal(signal.SIGTERM)
    assert caught.value.exit_code == 143


def test_a_signal_waits_until_the_hold_is_left() -> None:
    steps = []

    def work(interruption: Interruption) -> None:
        with interruption.hold():
            with interruption.hold():
                signal.raise_signal(signal.SIGINT)
                steps.append("inner")
            steps.append("outer")
        steps.append("never")

    with Interruption() as interruption, pytest.raises(Interrupted):
        work(interruption)
    assert steps == ["inner", "outer"]


def test_handlers_are_put_back() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with Interruption():
        assert signal.getsignal(signal.SIGTERM) != before
    assert signal.getsignal(signal.SIGTERM) == before


@pytest.mark.parametrize(
    ("number", "moment"),
    [
        (signal.SIGINT, "started"),
        (signal.SIGKILL, "started"),
        (signal.SIGINT, "working"),
        (signal.SIGTERM, "working"),
        (signal.SIGHUP, "working"),
        (signal.SIGKILL, "working"),
    ],
)
def test_no_process_outlives_a_demo_that_was_ended(tmp_path: Path, number: int, moment: str) -> None:
    demo = subprocess.Popen([sys.executable, "-c", _SMALL_DEMO, str(tmp_path)])
    names = ["one", "two"] if moment == "working" else []
    wait_for([tmp_path / name for name in (moment, *names)])
    below = psutil.Process(demo.pid).children(recursive=True)
    assert len(below) >= 2
    demo.send_signal(number)
    assert demo.wait(timeout=30) == (-number if number == signal.SIGKILL else 128 + number)
    _, alive = psutil.wait_procs(below, timeout=10)
    assert [process for process in alive if process.status() != psutil.STATUS_ZOMBIE] == []


def wait_for(paths: list[Path]) -> None:
    deadline = time.monotonic() + 30
    while not all(path.exists() for path in paths):
        assert time.monotonic() < deadline
        time.sleep(0.01)
