"""The training part against a real HTTP server in the trainer's place."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from dflash_online.demo.screen import LoopView
from dflash_online.demo.services import Running
from dflash_online.demo.training import train_for
from dflash_online.errors import ProcessError, TargetUnavailableError
from dflash_online.process.service import Service


class FakeTrainer:
    """Runs until it is told to stop; then its state is `after_stop`."""

    def __init__(self) -> None:
        self.state, self.after_stop = "running", "stopped"
        self.posts: list[tuple[str, Any]] = []
        self.num_looks = 0

    def answer(self, path: str, body: Any) -> dict[str, Any]:
        if path == "/train/status":
            self.num_looks += 1
            records = {"num_total": 1, "num_held_out": 0, "num_unused": 0, "num_tokens": 10 * self.num_looks}
            return {
                "state": self.state,
                "reason": "disk on fire",
                "step": 1,
                "metrics": None,
                "records": records,
                "buffer": {"bytes": 0},
                "versions": [],
            }
        self.posts.append((path, body))
        if path == "/train/stop":
            self.state = self.after_stop
        return {"state": self.state}


@pytest.fixture
def fake() -> FakeTrainer:
    return FakeTrainer()


@pytest.fixture
def services(fake: FakeTrainer, tmp_path: Path) -> Iterator[tuple[Running, Running]]:
    class Handler(BaseHTTPRequestHandler):
        def answer(self) -> None:
            size = int(self.headers.get("content-length", 0))
            payload = json.dumps(
                fake.answer(self.path, json.loads(self.rfile.read(size) or b"null"))
            ).encode()
            self.send_response(200)
            self.send_header("content-length", str(len(payload)))
            self.end_headers()
            self.wfile.write(payload)

        do_GET = do_POST = answer

        def log_message(self, format: str, *arguments: Any) -> None:
            return

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    sleeper = [sys.executable, "-c", "import time; time.sleep(600)"]
    with (
        Service("trainer", sleeper, tmp_path / "trainer.log", grace_s=0.5) as trainer,
        Service("target", sleeper, tmp_path / "target.log", grace_s=0.5) as target,
    ):
        yield Running(trainer, server.server_port), Running(target, 1)
    server.shutdown()
    server.server_close()
    thread.join(timeout=5)


def info() -> dict[str, Any]:
    return {"drafter": {"version": "1-000000000000", "num_swaps": 0, "max_pause_ms": 0.0}}


def train(services: tuple[Running, Running], ask_info: Any = info, train_s: float = 1.5) -> list[LoopView]:
    views: list[LoopView] = []
    trainer, target = services
    train_for(
        *(trainer, target, {"recipe": "zlab"}),
        train_s=train_s,
        stop_timeout_s=10.0,
        ask_info=ask_info,
        show=views.append,
    )
    return views


def test_the_run_is_started_watched_and_stopped_with_a_publish(fake: FakeTrainer, services: Any) -> None:
    views = train(services)
    assert fake.posts == [("/train/start", {"recipe": "zlab"}), ("/train/stop", {"publish": True})]
    assert len(views) >= 2
    assert views[-1].tok_per_s > 0


def test_a_run_that_fails_ends_the_demo_with_its_reason(fake: FakeTrainer, services: Any) -> None:
    fake.state = "failed"
    with pytest.raises(ProcessError, match="trainer: the run is failed: disk on fire"):
        train(services)


def test_a_failure_while_stopping_is_noticed(fake: FakeTrainer, services: Any) -> None:
    fake.after_stop = "failed"
    with pytest.raises(ProcessError, match="the run is failed"):
        train(services, train_s=0.1)


def test_a_run_that_completes_early_needs_no_stop(fake: FakeTrainer, services: Any) -> None:
    fake.state = "completed"
    train(services, train_s=60.0)
    assert [path for path, _ in fake.posts] == ["/train/start"]


def test_a_target_that_is_slow_to_answer_is_borne(services: Any) -> None:
    def unavailable() -> dict[str, Any]:
        raise TargetUnavailableError("http://t", "busy")

    assert train(services, unavailable, train_s=0.1) == []


def test_a_service_that_died_ends_the_demo(services: Any) -> None:
    services[1].service.stop()
    with pytest.raises(ProcessError, match="target: ended early with exit code"):
        train(services)
