"""How runs and services end: by a bound of the config, by signals, by kill -9; and what is left then."""

from __future__ import annotations

import json
import os
import signal
import sqlite3
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from fake_target import FakeTarget
from trainer_process import TrainerProcess, run_config, wait_until_gone

pytestmark = pytest.mark.slow


@pytest.fixture
def services() -> Iterator[list[TrainerProcess]]:
    """Services that a test started; all are ended after it."""
    started: list[TrainerProcess] = []
    yield started
    for service in started:
        service.close()


def write_prompts(path: Path) -> Path:
    """Eight good lines, a conversation among them, and two broken ones."""
    rows: list[object] = [{"prompt": f"Prompt number {number}"} for number in range(7)]
    turns = [
        {"role": "user", "content": "Say hello"},
        {"role": "assistant", "content": "Hello, friend of mine"},
    ]
    lines = [json.dumps(row) for row in [*rows, {"messages": turns}]]
    path.write_text("\n".join([*lines[:3], "{broken", *lines[3:], '{"nothing": 1}']) + "\n")
    return path


def test_run_on_two_ranks_completes_and_the_gate_holds_its_last_version_back(
    services: list[TrainerProcess], target: FakeTarget, tmp_path: Path
) -> None:
    service = TrainerProcess(tmp_path / "runs")
    services.append(service)
    service.start_run(
        run_config(
            target.url,
            prompts=str(write_prompts(tmp_path / "prompts.jsonl")),
            epochs=1,
            max_uses=5,
            num_ranks=2,
            held_out_share=0.3,
            publish_every_s=1e6,
            gate={"min_gain": 100.0},
        )
    )
    skipped = service.wait_for_event("prompts_skipped")[0]
    assert skipped["count"] == 2
    assert "prompts.jsonl:4" in skipped["lines"][0]
    assert "prompts.jsonl:10" in skipped["lines"][1]
    status = service.wait_for_state("completed", "failed")
    assert status["state"] == "completed", status["reason"]
    assert service.events("worker_started")[0]["num_ranks"] == 2
    num_records = status["records"]["num_total"]
    assert num_records + status["records"]["num_held_out"] == 8
    assert status["step"] * 2 >= num_records * 5  # every record was used up, two or fewer per step
    gate = service.events("gate")[-1]
    assert not gate["passed"]
    assert "<" in gate["reason"]
    states = [(version["version"][0], version["state"]) for version in status["versions"]]
    assert states[0] == ("n", "served_before")
    assert states[1] == ("1", "published")
    assert states[-1][1] == "held_back"
    assert target.versions[-1].startswith("1-")
    assert any(body["mode"] == "prefill" for body in target.called("capture"))


def last_saved_step(runs: Path) -> int:
    with sqlite3.connect(runs / "runs.sqlite") as connection:
        step = connection.execute("SELECT MAX(step) FROM checkpoints").fetchone()[0]
    connection.close()
    return int(step or 0)


def test_killed_and_ended_services_leave_no_worker_and_go_on_when_started_again(
    services: list[TrainerProcess], target: FakeTarget, tmp_path: Path
) -> None:
    runs = tmp_path / "runs"
    first = TrainerProcess(runs)
    services.append(first)
    run_id = first.start_run(run_config(target.url))
    first.wait_until(lambda: last_saved_step(runs) > 0, "a checkpoint of trained weights")
    tree = first.tree()
    assert len(tree) >= 4  # service, keeper, torchrun, rank
    os.kill(first.process.pid, signal.SIGKILL)
    wait_until_gone(tree)
    saved = last_saved_step(runs)

    second = TrainerProcess(runs)
    services.append(second)
    status = second.status()
    assert (status["run_id"], status["state"]) == (run_id, "running")
    assert second.wait_for_event("worker_started", count=2)[-1]["step"] == saved
    reached = second.wait_for_step(saved + 5)["step"]
    tree = second.tree()
    assert second.end(signal.SIGTERM) == 0
    wait_until_gone(tree)
    assert last_saved_step(runs) >= reached  # written on SIGTERM

    third = TrainerProcess(runs)
    services.append(third)
    assert third.status()["state"] == "running"
    with sqlite3.connect(runs / "runs.sqlite") as connection:
        twice = connection.execute(
            "SELECT position FROM records WHERE position IS NOT NULL GROUP BY position HAVING COUNT(*) > 1"
        ).fetchall()
        wrong = connection.execute(
            "SELECT seq FROM records WHERE num_uses != (SELECT COUNT(*) FROM uses WHERE record_seq = seq)"
        ).fetchall()
    connection.close()
    assert twice == wrong == []


def test_worker_that_cannot_be_kept_alive_fails_the_run_with_the_reason(
    services: list[TrainerProcess], target: FakeTarget, tmp_path: Path
) -> None:
    service = TrainerProcess(tmp_path / "runs", "--max-restarts", "0")
    services.append(service)
    service.start_run(run_config(target.url))
    service.wait_until(lambda: len(service.tree()) >= 3, "torchrun is up")
    for process in service.tree()[2:]:
        process.kill()
    status = service.wait_for_state("failed")
    assert "after 0 restarts" in status["reason"]
    assert service.http.get("/healthz").status_code == 200
    assert psutil.Process(service.process.pid).children(recursive=True) == []
    assert service.http.get("/runs").json()["runs"][0]["state"] == "failed"
