"""The trainer service as a real process, driven over HTTP: what the integration tests hold in their hands."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import psutil

from dflash_online.process.port import free_port

ROOT = Path(__file__).parents[2]
PATIENCE_S = 90.0


class TrainerProcess:
    """One service on one runs folder. Ended for certain by `close`."""

    def __init__(self, runs_dir: Path, *flags: str, wait: bool = True) -> None:
        self.runs_dir, self.port = runs_dir, free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.log_path = runs_dir.with_suffix(".log")
        command = [
            sys.executable,
            "-m",
            "trainer",
            "--port",
            str(self.port),
            "--runs-dir",
            str(runs_dir),
            *flags,
        ]
        with self.log_path.open("ab") as log:
            self.process = subprocess.Popen(
                command,
                stdout=log,
                stderr=log,
                start_new_session=True,
                cwd=ROOT,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )
        self.http = httpx.Client(base_url=self.url, timeout=60.0, trust_env=False)
        if wait:
            self.wait_until(self._is_ready, "the service is ready")

    def _is_ready(self) -> bool:
        assert self.process.poll() is None, self.log_path.read_text()[-3000:]
        try:
            return self.http.get("/readyz").status_code == 200
        except httpx.TransportError:
            return False

    def start_run(self, config: dict[str, Any]) -> str:
        """POST /train/start; returns the run id."""
        answer = self.http.post("/train/start", json=config)
        assert answer.status_code == 201, answer.text
        return str(answer.json()["run_id"])

    def post(self, action: str, body: dict[str, Any] | None = None) -> httpx.Response:
        """POST /train/{action}."""
        return self.http.post(f"/train/{action}", json=body) if body else self.http.post(f"/train/{action}")

    def status(self) -> dict[str, Any]:
        """GET /train/status."""
        answer = self.http.get("/train/status")
        assert answer.status_code == 200, answer.text
        status: dict[str, Any] = answer.json()
        return status

    def wait_until(self, holds: Callable[[], bool], what: str, *, patience_s: float = PATIENCE_S) -> None:
        """Poll; fails with what was waited for, the status and the logs."""
        deadline = time.monotonic() + patience_s
        while not holds():
            if time.monotonic() > deadline:
                logs = [self.log_path, *self.runs_dir.glob("*/worker.log")]
                tails = "\n".join(f"--- {path}\n{path.read_text()[-2000:]}" for path in logs if path.exists())
                status = self.status() if self.process.poll() is None else "service ended"
                raise AssertionError(f"not within {patience_s} s: {what}\n{status}\n{tails}")
            time.sleep(0.1)

    def wait_for_state(self, *states: str) -> dict[str, Any]:
        """Until the run is in one of the states."""
        self.wait_until(lambda: self.status()["state"] in states, f"state {states}")
        return self.status()

    def wait_for_step(self, step: int) -> dict[str, Any]:
        """Until that many steps were taken."""
        self.wait_until(lambda: self.status()["step"] >= step, f"step {step}")
        return self.status()

    def events(self, kind: str) -> list[dict[str, Any]]:
        """Data of the latest events of a kind, oldest first."""
        return [event["data"] for event in self.status()["events"] if event["kind"] == kind]

    def wait_for_event(self, kind: str, *, count: int = 1) -> list[dict[str, Any]]:
        """Until there are that many events of a kind."""
        self.wait_until(lambda: len(self.events(kind)) >= count, f"{count} events {kind}")
        return self.events(kind)

    def tree(self) -> list[psutil.Process]:
        """The service and everything below it."""
        service = psutil.Process(self.process.pid)
        return [service, *service.children(recursive=True)]

    def end(self, number: int = signal.SIGTERM) -> int:
        """Signal the service and wait; returns its exit code."""
        self.process.send_signal(number)
        return self.process.wait(timeout=60)

    def close(self) -> None:
        """Leave nothing behind, whatever the test did."""
        tree = self.tree() if self.process.poll() is None else []
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(timeout=20)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        self.http.close()
        _, alive = psutil.wait_procs(tree, timeout=10)
        for process in alive:
            process.kill()
        assert not alive, f"left behind: {alive}"


def run_config(target_url: str, **changes: Any) -> dict[str, Any]:
    """A run that is small in everything: steps of about 10 ms."""
    config: dict[str, Any] = {
        "target_urls": [target_url],
        "sampling": {"max_new_tokens": 8},
        "held_out_records": 3,
        "capture_concurrency": 2,
        "drafter": {"num_layers": 1},
        "optimizer": {"lr": 3e-3, "warmup_steps": 5},
        "records_per_step": 2,
        "anchors_per_step": 16,
        "max_uses": 1_000_000,
        "publish_every_s": None,
        "publish_initial": True,
        "gate": {"min_gain": -0.5},
        "guard": {"poll_s": 0.2, "min_steps": 300},
        "checkpoint_every_s": 1.0,
        "worker_threads": 1,
        "device": "cpu",
    }
    return config | changes


def wait_until_gone(processes: list[psutil.Process], *, patience_s: float = 10.0) -> None:
    """Fails when one of the processes is still alive after that time."""
    _, alive = psutil.wait_procs(processes, timeout=patience_s)
    assert not alive, f"still alive: {[(p.pid, p.cmdline()) for p in alive]}"
