"""The two services of the demo, each on a free port of the loopback.

    folders --start_target, start_trainer--> Service

The same modules that a user starts; only the ports, and what is small here, are the demo's choice.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

from dflash_online.process.port import free_port, is_port_free
from dflash_online.process.service import Service

_HOST = "127.0.0.1"
# The target's launcher itself gives SGLang time to end; the outer one must outlast it.
_TARGET_GRACE_S, _TRAINER_GRACE_S = 60.0, 60.0
_CAPTURE_SLOTS, _CAPTURE_TOKENS = 32, 1024
# Target and trainer compute at the same time on two cores: one each. With two each, both crawl.
_TARGET_THREADS = 1
_MAX_TOTAL_TOKENS = 12288


@dataclass(frozen=True, slots=True)
class Running:
    """A started service and where it listens."""

    service: Service
    port: int

    @property
    def url(self) -> str:
        return f"http://{_HOST}:{self.port}"

    def is_port_free(self) -> bool:
        """True when nothing listens there any more."""
        return is_port_free(_HOST, self.port)


def start_target(model: Path, drafter: Path, log: Path) -> Running:
    """SGLang with the plugin, in float32: only there can greedy outputs be asked to be identical."""
    port = free_port(_HOST)
    command = [sys.executable, "-m", "server_patches", "--model", str(model), "--drafter", str(drafter)]
    command += ["--host", _HOST, "--port", str(port), "--dtype", "float32"]
    command += ["--cpu-threads", str(_TARGET_THREADS)]
    command += ["--capture-slots", str(_CAPTURE_SLOTS), "--capture-tokens", str(_CAPTURE_TOKENS)]
    # Room for every capture in flight; SGLang's default would take a gigabyte more.
    command += ["--", "--max-total-tokens", str(_MAX_TOTAL_TOKENS)]
    return Running(Service("target", command, log, grace_s=_TARGET_GRACE_S), port)


def start_trainer(runs_dir: Path, log: Path) -> Running:
    """The trainer service."""
    port = free_port(_HOST)
    command = [
        sys.executable,
        "-m",
        "trainer",
        "--host",
        _HOST,
        "--port",
        str(port),
        "--runs-dir",
        str(runs_dir),
    ]
    return Running(Service("trainer", command, log, grace_s=_TRAINER_GRACE_S), port)
