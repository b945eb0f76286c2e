"""One run against the fake target from start to stop, all faults on the way. Tests share it, in order."""

from __future__ import annotations

import json
import os
import resource
import signal
import sqlite3
from pathlib import Path
from typing import Any

import psutil
import pytest
from fake_target import CHECKSUM, FakeTarget
from trainer_process import TrainerProcess, run_config, wait_until_gone

from dflash_online.drafter.checkpoint import load_checkpoint
from dflash_online.wire.codec import decode_record

pytestmark = pytest.mark.slow

# Megabytes of optimizer state: above the log of the store, which must stay writable when the disk is "full".
_DRAFTER = {"num_layers": 2, "intermediate_size": 1024}
_FULL_DISK_BYTES = 1_200_000


@pytest.fixture(scope="module")
def run_id(trainer: TrainerProcess, target: FakeTarget) -> str:
    started = trainer.start_run(run_config(target.url, drafter=_DRAFTER))
    trainer.wait_for_step(5)
    return started


def query(trainer: TrainerProcess, sql: str, *values: object) -> list[Any]:
    """Look into the store beside the running service."""
    with sqlite3.connect(f"file:{trainer.runs_dir}/runs.sqlite?mode=ro", uri=True) as connection:
        rows = connection.execute(sql, values).fetchall()
    connection.close()
    return rows


def captured_ids(target: FakeTarget) -> list[str]:
    return [body["record_id"] for body in target.called("capture")]


def test_steps_are_taken_on_records_that_were_captured(
    trainer: TrainerProcess, target: FakeTarget, run_id: str
) -> None:
    status = trainer.status()
    assert status["run_id"] == run_id
    assert status["state"] == "running"
    assert status["records"]["num_total"] >= 2
    assert 0 < status["metrics"]["loss"] < 10
    assert len(status["metrics"]["slot_accuracy"]) == target.block_size - 1
    assert status["metrics"]["learning_rate"] <= 3e-3


def test_initial_weights_are_published_as_the_first_version(
    trainer: TrainerProcess, target: FakeTarget, run_id: str
) -> None:
    event = trainer.wait_for_event("published")[0]
    assert event["version"].startswith("1-")
    assert event["pause_ms"] == 1.5
    path = Path(target.called("stage")[0]["path"])
    checkpoint = load_checkpoint(path)
    assert str(checkpoint.version) == event["version"]
    assert target.called("commit")[0] == {"version": event["version"]}
    assert checkpoint.training is not None
    assert checkpoint.training.target is not None
    assert checkpoint.training.target["weight_checksum"] == CHECKSUM


def test_a_second_start_is_refused_with_409(trainer: TrainerProcess, target: FakeTarget, run_id: str) -> None:
    answer = trainer.http.post("/train/start", json=run_config(target.url))
    assert answer.status_code == 409
    error = answer.json()["error"]
    assert error["type"] == "RunStateError"
    assert run_id in error["message"]
    assert trainer.status()["run_id"] == run_id


def test_publish_on_demand_passes_the_gate_on_held_out_records(
    trainer: TrainerProcess, target: FakeTarget, run_id: str
) -> None:
    trainer.wait_until(lambda: trainer.status()["records"]["num_held_out"] == 3, "three held-out records")
    trainer.wait_for_step(30)
    assert trainer.post("publish").status_code == 202
    event = trainer.wait_for_event("published", count=2)[-1]
    assert target.versions[-1] == event["version"]
    checkpoint = load_checkpoint(Path(target.called("stage")[-1]["path"]))
    assert checkpoint.training is not None
    gate = checkpoint.training.gate
    assert gate is not None
    assert gate["passed"]
    assert gate["num_records"] == 3
    assert 1 <= gate["old_tau"] <= gate["new_tau"] <= target.block_size
    live = [v for v in trainer.status()["versions"] if v["version"] == event["version"]]
    assert live[0]["held_out_tau"] == gate["new_tau"]


def test_held_out_records_are_never_trained_on(trainer: TrainerProcess, run_id: str) -> None:
    used = query(
        trainer,
        "SELECT DISTINCT kind FROM records JOIN uses ON record_seq = seq WHERE records.run_id = ?",
        run_id,
    )
    assert used == [("train",)]
    folder = trainer.runs_dir / run_id
    prompts = {}
    for name in ("buffer", "held_out"):
        records = [decode_record(path.read_bytes()) for path in (folder / name).glob("*.rec")]
        prompts[name] = {r.header.token_ids[: r.header.prompt_length] for r in records}
    assert len(prompts["held_out"]) == 3
    assert not prompts["held_out"] & prompts["buffer"]


def test_metrics_name_every_series(trainer: TrainerProcess, run_id: str) -> None:
    text = trainer.http.get("/metrics").text
    for series in (
        "dflash_trainer_step ",
        "dflash_trainer_loss ",
        "dflash_trainer_grad_norm ",
        "dflash_trainer_learning_rate ",
        'dflash_trainer_slot_accuracy{slot="1"}',
        "dflash_trainer_label_agreement 1.0",
        "dflash_trainer_records_total ",
        "dflash_trainer_tokens_total ",
        "dflash_trainer_buffer_bytes ",
        'dflash_trainer_dropped_total{reason="checksum"}',
        "dflash_trainer_capture_seconds_bucket",
        "dflash_trainer_step_seconds_count",
        'dflash_trainer_publishes_total{outcome="published"} 2.0',
        'dflash_trainer_live_tau{drafter_version="1-',
        'dflash_trainer_held_out_tau{drafter_version="',
        "dflash_trainer_worker_restarts_total 0.0",
        "dflash_trainer_alarms_total 0.0",
        'dflash_trainer_run_state{state="running"} 1.0',
    ):
        assert series in text, series


def test_dashboard_is_one_page_without_external_parts(trainer: TrainerProcess, run_id: str) -> None:
    page = trainer.http.get("/").text
    assert "train/status" in page
    assert "http://" not in page
    assert "https://" not in page
    assert "src=" not in page


def read_events(
    trainer: TrainerProcess, run_id: str, count: int, after: str | None = None
) -> list[dict[str, Any]]:
    headers = {} if after is None else {"Last-Event-ID": after}
    events = []
    with trainer.http.stream("GET", f"/runs/{run_id}/events", headers=headers) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        for line in response.iter_lines():
            if line.startswith("data: "):
                events.append(json.loads(line.removeprefix("data: ")))
            if len(events) == count:
                break
    return events


def test_event_stream_goes_on_behind_the_last_event_id(trainer: TrainerProcess, run_id: str) -> None:
    first = read_events(trainer, run_id, 4)
    assert first[0]["kind"] == "state"
    assert first[0]["data"]["state"] == "starting"
    rest = read_events(trainer, run_id, 2, after=str(first[1]["seq"]))
    assert rest == first[2:]
    assert trainer.http.get("/runs/nope/events").status_code == 404


def test_pause_stops_steps_and_captures_until_resume(
    trainer: TrainerProcess, target: FakeTarget, run_id: str
) -> None:
    assert trainer.post("pause").json()["state"] == "paused"
    trainer.wait_until(lambda: trainer.status()["worker"]["phase"] == "paused", "the worker pauses")
    trainer.wait_until(lambda: trainer.status()["feed"]["in_flight"] <= 2, "captures end")
    step = trainer.status()["step"]
    answer = trainer.post("pause")
    assert answer.status_code == 409
    assert answer.json()["error"]["state"] == "paused"
    assert trainer.status()["step"] == step
    assert trainer.post("resume").json()["state"] == "running"
    trainer.wait_for_step(step + 3)


def test_added_prompts_are_captured_next(trainer: TrainerProcess, target: FakeTarget, run_id: str) -> None:
    rows = [{"prompt": f"Added prompt number {number}"} for number in range(4)]
    answer = trainer.http.post("/prompts", json={"prompts": rows})
    assert answer.status_code == 202
    body = answer.json()
    assert body["accepted"] + body["held_out"] == 4
    wanted = body["accepted"]
    trainer.wait_until(
        lambda: sum(f"{run_id}/added/" in name for name in captured_ids(target)) == wanted, "captures of them"
    )
    trainer.wait_until(lambda: trainer.status()["feed"]["prompts_waiting"] == 0, "an empty queue")


def test_too_many_or_broken_added_prompts_are_refused(trainer: TrainerProcess, run_id: str) -> None:
    trainer.post("pause")
    rows = [{"prompt": f"Many prompts, number {number}"} for number in range(1024)]
    statuses = [trainer.http.post("/prompts", json={"prompts": rows}).status_code for _ in range(2)]
    assert statuses == [202, 503]
    broken = trainer.http.post("/prompts", json={"prompts": [{"prompt": "good"}, {"nothing": 1}]})
    assert broken.status_code == 422
    assert broken.json()["error"]["line"] == 2
    trainer.post("resume")


def settled_twice(trainer: TrainerProcess, run_id: str) -> list[Any]:
    """Records whose number of uses is not that of the steps that name them, or whose position came twice."""
    wrong_uses = query(
        trainer,
        "SELECT record_id, num_uses FROM records WHERE run_id = ? AND num_uses !="
        " (SELECT COUNT(*) FROM uses WHERE record_seq = seq)",
        run_id,
    )
    twice = query(
        trainer,
        "SELECT position, COUNT(*) FROM records WHERE run_id = ? AND position IS NOT NULL"
        " GROUP BY position HAVING COUNT(*) > 1",
        run_id,
    )
    return wrong_uses + twice


@pytest.mark.parametrize("fault", ["num_busy", "num_vanish"])
def test_capture_that_is_shed_or_breaks_is_asked_for_again(
    trainer: TrainerProcess, target: FakeTarget, run_id: str, fault: str
) -> None:
    already = len(target.called("capture"))
    setattr(target.switches, fault, 2)
    trainer.wait_until(lambda: getattr(target.switches, fault) == 0, f"two captures meet {fault}")
    names = captured_ids(target)[already:]
    trainer.wait_until(
        lambda: any(captured_ids(target)[already:].count(name) > 1 for name in names),
        "one is asked for again",
    )
    total = trainer.status()["records"]["num_total"]
    trainer.wait_until(lambda: trainer.status()["records"]["num_total"] > total, "records arrive")
    assert trainer.status()["records"]["dropped"] == {}
    assert settled_twice(trainer, run_id) == []


def test_corrupt_and_refused_records_are_counted_and_the_stream_goes_on(
    trainer: TrainerProcess, target: FakeTarget, run_id: str
) -> None:
    target.switches.num_corrupt = 1
    target.switches.num_refuse = 1
    target.switches.num_not_finite = 2
    trainer.wait_until(lambda: sum(trainer.status()["records"]["dropped"].values()) == 4, "four drops")
    assert trainer.status()["records"]["dropped"] == {"checksum": 1, "refused": 1, "not_finite": 2}
    reasons = {event["reason"]: event["detail"] for event in trainer.events("record_dropped")}
    assert "checksum must be" in reasons["checksum"]
    total = trainer.status()["records"]["num_total"]
    trainer.wait_until(lambda: trainer.status()["records"]["num_total"] > total, "records arrive")
    assert 'dflash_trainer_dropped_total{reason="checksum"} 1.0' in trainer.http.get("/metrics").text


def test_target_that_is_gone_and_back_is_resumed_while_training_goes_on(
    trainer: TrainerProcess, target: FakeTarget, run_id: str
) -> None:
    target.stop()
    trainer.wait_for_event("target_unavailable")
    step = trainer.status()["step"]
    trainer.wait_for_step(step + 5)
    assert trainer.status()["feed"]["unavailable_targets"] == [target.url]
    total = trainer.status()["records"]["num_total"]
    target.start()
    trainer.wait_for_event("target_back")
    trainer.wait_until(lambda: trainer.status()["records"]["num_total"] > total, "records arrive")
    assert trainer.status()["state"] == "running"
    assert settled_twice(trainer, run_id) == []


def test_version_that_drafts_worse_live_is_rolled_back_by_the_guard(
    trainer: TrainerProcess, target: FakeTarget, run_id: str
) -> None:
    good = target.versions[-1]
    count = "SELECT COUNT(*) FROM events WHERE run_id = ? AND kind = 'published'"
    published = query(trainer, count, run_id)[0][0]
    trainer.wait_until(lambda: target.acceptance()["versions"][-1]["histogram"][0] > 200, "live steps of it")
    number = (
        int(trainer.status()["worker"]["step"])
        and query(trainer, "SELECT MAX(number) FROM checkpoints WHERE run_id = ?", run_id)[0][0]
    )
    for following in range(number + 1, number + 30):
        target.switches.tau_of_number[following] = 1.1
    trainer.post("publish")
    trainer.wait_until(lambda: target.versions[-1] != good, "a publish")
    event = trainer.wait_for_event("rolled_back")[0]
    assert event["by"] == "guard"
    assert "live tau 1.100 < 1.350 = (1 - 0.1) * 1.500" in event["reason"]
    assert target.versions[-1] == good
    assert trainer.status()["drafter_version"] == good
    assert query(trainer, count, run_id)[0][0] == published + 1
    target.switches.tau_of_number.clear()


def test_rollback_on_demand_makes_the_version_before_live(
    trainer: TrainerProcess, target: FakeTarget, run_id: str
) -> None:
    live, before = target.versions[-1], target.versions[-2]
    answer = trainer.post("rollback")
    assert answer.status_code == 200
    assert answer.json() == {"rolled_back": live}
    assert target.versions[-1] == before == trainer.status()["drafter_version"]


def test_target_started_anew_gets_the_live_version_back(
    trainer: TrainerProcess, target: FakeTarget, run_id: str
) -> None:
    live = trainer.status()["drafter_version"]
    target.versions[:] = ["none"]
    assert trainer.wait_for_event("restored")[0]["version"] == live
    assert target.versions == ["none", live]


def test_full_disk_costs_a_checkpoint_and_nothing_else(
    trainer: TrainerProcess, target: FakeTarget, run_id: str
) -> None:
    rank = trainer.status()["worker"]["pids"][-1]
    before = resource.prlimit(rank, resource.RLIMIT_FSIZE, (_FULL_DISK_BYTES, resource.RLIM_INFINITY))
    try:
        event = trainer.wait_for_event("checkpoint_failed")[0]
        step = trainer.status()["step"]
        trainer.wait_for_step(step + 5)
    finally:
        resource.prlimit(rank, resource.RLIMIT_FSIZE, before)
    assert "File too large" in event["reason"]
    assert run_id in event["path"]
    assert trainer.status()["state"] == "running"
    assert "dflash_trainer_checkpoint_failures_total 1.0" in trainer.http.get("/metrics").text
    folder = trainer.runs_dir / run_id
    assert not list(folder.glob("*/.*")), "a half-written folder was left"
    step = trainer.status()["step"]
    latest = "SELECT MAX(step) FROM checkpoints WHERE run_id = ?"
    trainer.wait_until(
        lambda: query(trainer, latest, run_id)[0][0] >= step, "a checkpoint after the disk is free"
    )


def test_killed_worker_resumes_by_itself_from_the_last_checkpoint(
    trainer: TrainerProcess, target: FakeTarget, run_id: str
) -> None:
    rank = trainer.status()["worker"]["pids"][-1]
    tree = [process for process in trainer.tree() if process.pid != trainer.process.pid]
    os.kill(rank, signal.SIGKILL)
    wait_until_gone(tree)
    saved = query(trainer, "SELECT MAX(step) FROM checkpoints WHERE run_id = ?", run_id)[0][0]
    lost = trainer.wait_for_event("worker_lost")[0]
    assert lost["num_restarts"] == 0
    assert trainer.wait_for_event("worker_started")[-1]["step"] == saved > 0
    trainer.wait_for_step(saved + 5)
    assert trainer.status()["worker"]["num_restarts"] == 1
    assert trainer.status()["state"] == "running"
    assert settled_twice(trainer, run_id) == []


def test_target_with_other_weights_is_an_alarm_until_it_is_the_right_one_again(
    trainer: TrainerProcess, target: FakeTarget, run_id: str
) -> None:
    commits = len(target.called("commit"))
    target.switches.checksum = "bad0"
    status = trainer.wait_for_state("alarmed")
    assert "weight_checksum" in status["reason"]
    event = trainer.events("alarm")[0]
    assert (event["field"], event["expected"], event["found"]) == ("weight_checksum", CHECKSUM, "bad0")
    trainer.wait_until(lambda: trainer.status()["worker"]["phase"] == "paused", "the worker pauses")
    refused = trainer.post("resume")
    assert refused.status_code == 409
    assert refused.json()["error"]["found"] == "bad0"
    assert trainer.post("publish").status_code == 409
    assert len(target.called("commit")) == commits
    assert "dflash_trainer_alarms_total 1.0" in trainer.http.get("/metrics").text
    target.switches.checksum = CHECKSUM
    assert trainer.post("resume").json()["state"] == "running"
    trainer.wait_for_step(status["step"] + 3)


def test_stop_writes_the_last_checkpoint_and_leaves_no_worker(
    trainer: TrainerProcess, target: FakeTarget, run_id: str
) -> None:
    commits = len(target.called("commit"))
    tree = [process for process in trainer.tree() if process.pid != trainer.process.pid]
    answer = trainer.post("stop")
    assert answer.status_code == 202
    assert answer.json()["state"] == "stopping"
    status = trainer.wait_for_state("stopped")
    wait_until_gone(tree)
    assert psutil.Process(trainer.process.pid).children(recursive=True) == []
    step = query(trainer, "SELECT MAX(step) FROM checkpoints WHERE run_id = ?", run_id)[0][0]
    assert step == status["step"]
    assert len(target.called("commit")) == commits
    assert trainer.http.get("/healthz").status_code == 200
    assert trainer.post("pause").status_code == 409


def test_finished_run_keeps_its_history(trainer: TrainerProcess, run_id: str) -> None:
    runs = trainer.http.get("/runs").json()["runs"]
    assert [(run["run_id"], run["state"]) for run in runs] == [(run_id, "stopped")]
    details = trainer.http.get(f"/runs/{run_id}").json()
    assert details["config"]["optimizer"]["lr"] == 3e-3
    assert details["target"]["weight_checksum"] == CHECKSUM
    assert {row["state"] for row in details["checkpoints"]} >= {"published", "saved", "rolled_back"}
    last = read_events(trainer, run_id, 10_000)[-1]  # the stream ends by itself
    assert last["data"]["state"] == "stopped"
