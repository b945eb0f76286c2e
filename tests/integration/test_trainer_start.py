"""What POST /train/start and the service's own start refuse, and what they say then."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from fake_target import LAYER_IDS, FakeTarget
from trainer_process import ROOT, TrainerProcess, run_config

from dflash_online.distill.recipe import RECIPES
from dflash_online.drafter.checkpoint import load_checkpoint
from dflash_online.process.port import free_port


def refusal(trainer: TrainerProcess, config: dict[str, Any], status: int = 422) -> dict[str, Any]:
    """The error that a start is answered with; no run exists after it."""
    answer = trainer.http.post("/train/start", json=config)
    assert answer.status_code == status, answer.text
    assert trainer.http.get("/runs").json() == {"runs": []}
    error: dict[str, Any] = answer.json()["error"]
    return error


def test_unknown_field_is_refused_by_name(trainer: TrainerProcess, target: FakeTarget) -> None:
    error = refusal(trainer, run_config(target.url, optimizer={"learning_rate": 1e-3}))
    assert error["type"] == "ConfigError"
    assert error["field"] == "optimizer.learning_rate"
    assert error["value"] == 1e-3
    assert "known field" in error["bound"]


@pytest.mark.parametrize(
    ("changes", "field", "bound"),
    [
        ({"max_uses": 0}, "max_uses", "at least 1"),
        ({"held_out_share": 1.5}, "held_out_share", "in [0, 1)"),
        ({"records_per_step": "8"}, "records_per_step", "a valid integer"),
        ({"target_urls": []}, "target_urls", "at least one URL"),
        ({"recipe": "v99"}, "recipe", "zlab"),
        ({"recipe": "v3"}, "publish_initial", "which no server can run"),
        ({"num_ranks": 2, "packs_per_step": 3}, "packs_per_step", "a multiple of num_ranks 2"),
        ({"drafter": {"layer_ids": [1, 2]}}, "drafter.layer_ids", str(list(LAYER_IDS))),
        ({"drafter": {"block_size": 16}}, "drafter.block_size", "4, as the drafter that the target serves"),
        ({"drafter": {"mask_token_id": 999}}, "mask_token_id", "in 0..263"),
        ({"target_path": "/nowhere"}, "target_path", "a folder on this machine"),
    ],
)
def test_value_out_of_bounds_is_refused_with_field_value_and_bound(
    trainer: TrainerProcess, target: FakeTarget, changes: dict[str, Any], field: str, bound: str
) -> None:
    error = refusal(trainer, run_config(target.url, **changes))
    assert error["field"] == field
    assert bound in error["bound"]
    assert "value" in error


def test_missing_prompts_and_warm_start_are_refused(trainer: TrainerProcess, target: FakeTarget) -> None:
    error = refusal(trainer, run_config(target.url, prompts="/nowhere.jsonl"))
    assert error["type"] == "PromptError"
    assert "/nowhere.jsonl" in error["message"]
    error = refusal(trainer, run_config(target.url, warm_start="/nowhere"))
    assert error["type"] == "IncompleteCheckpointError"


def test_body_that_is_no_object_is_refused(trainer: TrainerProcess) -> None:
    for body in (b"", b"nope", b"[1]"):
        answer = trainer.http.post("/train/start", content=body)
        assert answer.status_code == 422
        assert answer.json()["error"]["type"] == "ConfigError"


def test_target_that_does_not_answer_is_503_and_the_service_lives(trainer: TrainerProcess) -> None:
    error = refusal(trainer, run_config(f"http://127.0.0.1:{free_port()}"), status=503)
    assert error["type"] == "TargetUnavailableError"
    assert trainer.status() == {"state": "idle", "run_id": None}
    assert trainer.http.get("/healthz").json() == {"status": "ok"}


def test_two_targets_with_different_weights_are_refused(
    trainer: TrainerProcess, target: FakeTarget, target_folder: Path
) -> None:
    other = FakeTarget(target_folder)
    other.switches.checksum = "0ther"
    other.start()
    try:
        config = run_config(target.url, target_urls=[target.url, other.url])
        error = refusal(trainer, config, status=409)
    finally:
        other.stop()
    assert error["type"] == "TargetIdentityError"
    assert (error["field"], error["found"]) == ("weight_checksum", "0ther")


def test_actions_without_a_run_are_409(trainer: TrainerProcess) -> None:
    for action in ("stop", "pause", "resume", "publish", "rollback"):
        answer = trainer.post(action)
        assert answer.status_code == 409, action
        assert answer.json()["error"]["type"] == "RunStateError"
    assert trainer.http.post("/prompts", json={"prompts": [{"prompt": "x"}]}).status_code == 409
    assert trainer.http.get("/nowhere").json()["error"]["type"] == "HttpError"
    assert trainer.http.get("/runs/none").status_code == 404


def start_in_vain(*flags: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "trainer", *flags],
        cwd=ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_port_in_use_ends_the_start_with_one_clear_line(trainer: TrainerProcess, tmp_path: Path) -> None:
    ended = start_in_vain("--port", str(trainer.port), "--runs-dir", str(tmp_path))
    assert ended.returncode == 2
    assert str(trainer.port) in ended.stderr
    assert len(ended.stderr.strip().splitlines()) == 1


def test_runs_folder_in_use_ends_the_start(trainer: TrainerProcess) -> None:
    ended = start_in_vain("--port", str(free_port()), "--runs-dir", str(trainer.runs_dir))
    assert ended.returncode == 2
    assert "in use by another trainer service" in ended.stderr


def test_unknown_variable_ends_the_start(tmp_path: Path) -> None:
    ended = start_in_vain("--runs-dir", str(tmp_path), DFLASH_TRAINER_PROT="1")
    assert ended.returncode == 2
    assert "DFLASH_TRAINER_PROT" in ended.stderr


@pytest.mark.parametrize("recipe", ["speculators", "v3"])
def test_a_run_trains_by_its_recipe_and_records_it(
    trainer: TrainerProcess, target: FakeTarget, recipe: str
) -> None:
    config = run_config(target.url, recipe=recipe, publish_initial=False, max_steps=3)
    run_id = trainer.start_run(config)
    trainer.wait_for_state("completed")
    folders = sorted((trainer.runs_dir / run_id / "checkpoints").iterdir())
    checkpoint = load_checkpoint(folders[-1])
    assert checkpoint.training is not None
    assert checkpoint.training.recipe == json.loads(json.dumps(asdict(RECIPES[recipe])))
    assert checkpoint.config.fc_layers == RECIPES[recipe].fc_layers
    assert target.called("stage") == []
