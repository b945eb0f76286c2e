"""The run config: strict reading, defaults, bounds, a key that is never shown; and the service's settings."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dflash_online.errors import ConfigError
from trainer.runs.config import RunConfig, dump_run_config, parse_run_config
from trainer.settings import read_settings


def parse(**fields: Any) -> RunConfig:
    return parse_run_config(json.dumps({"target_urls": ["http://t"]} | fields))


def test_printed_config_can_be_read_again() -> None:
    config = parse(
        optimizer={"lr": 1}, drafter={"layer_ids": [1, 2]}, chat_template_kwargs={"enable_thinking": False}
    )
    assert parse_run_config(json.dumps(dump_run_config(config))) == config


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"nothing": 1}, "nothing"),
        ({"gate": {"nothing": 1}}, "gate.nothing"),
        ({"max_uses": True}, "max_uses"),
        ({"publish_initial": 1}, "publish_initial"),
        ({"buffer_bytes": 1.5}, "buffer_bytes"),
        ({"target_urls": ["ftp://x"]}, "target_urls"),
        ({"optimizer": {"lr": 0}}, "optimizer.lr"),
        ({"optimizer": {"beta2": 1}}, "optimizer.beta2"),
        ({"sampling": {"top_p": 0}}, "sampling.top_p"),
        ({"sampling": {"top_k": 0}}, "sampling.top_k"),
        ({"drafter": {"block_size": 1}}, "drafter.block_size"),
        ({"guard": {"margin": 1}}, "guard.margin"),
        ({"gate": {"min_gain": -1}}, "gate.min_gain"),
        ({"publish_every_s": 0}, "publish_every_s"),
        ({"anchors_per_step": 1, "num_ranks": 2}, "anchors_per_step"),
        ({"device": "tpu"}, "device"),
    ],
)
def test_bad_field_is_named(fields: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(**fields)
    assert caught.value.field == field


def test_learning_rate_follows_the_start() -> None:
    assert parse().learning_rate == 6e-4
    assert parse(warm_start="/x").learning_rate == 6e-5
    assert parse(warm_start="/x", optimizer={"lr": 1e-3}).learning_rate == 1e-3


def test_api_key_is_never_printed() -> None:
    config = parse(target_api_key="s3cret")
    assert config.api_key == "s3cret"
    assert "s3cret" not in json.dumps(dump_run_config(config)) + repr(config)


def test_greedy_sampling_sends_no_nucleus() -> None:
    assert parse().sampling.as_params() == {"temperature": 0.0, "max_new_tokens": 96}
    sampled = parse(sampling={"temperature": 0.6, "top_p": 0.9}).sampling.as_params()
    assert sampled["top_p"] == 0.9


def test_flags_win_over_variables_and_variables_over_defaults() -> None:
    settings = read_settings(
        ["--port", "1"], {"DFLASH_TRAINER_PORT": "2", "DFLASH_TRAINER_STOP_S": "5", "HOME": "x"}
    )
    assert (settings.port, settings.stop_s, settings.host) == (1, 5.0, "127.0.0.1")
    assert read_settings(["--runs", "/r"], {}).runs_dir == Path("/r")


@pytest.mark.parametrize(
    ("environment", "field"),
    [
        ({"DFLASH_TRAINER_PROT": "1"}, "DFLASH_TRAINER_PROT"),
        ({"DFLASH_TRAINER_PORT": "x"}, "port"),
        ({"DFLASH_TRAINER_PORT": "70000"}, "port"),
        ({"DFLASH_TRAINER_LOG_LEVEL": "loud"}, "log_level"),
    ],
)
def test_bad_setting_is_named(environment: dict[str, str], field: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_settings([], environment)
    assert caught.value.field == field
