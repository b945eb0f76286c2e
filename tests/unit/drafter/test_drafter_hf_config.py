"""Published layouts of config.json, older and newer, give one config."""

from __future__ import annotations

import math

import pytest
from published import PUBLISHED

from dflash_online.drafter.config import DrafterConfig, YarnScaling, select_layer_ids
from dflash_online.drafter.hf_config import config_from_json, config_to_json
from dflash_online.drafter.tensors import expected_shapes
from dflash_online.errors import CheckpointError, ConfigError, DflashOnlineError, UnsupportedCheckpointError

QWEN3_4B = PUBLISHED["Qwen3-4B"]


def newer_layout() -> dict:
    fields = {k: v for k, v in QWEN3_4B.items() if k not in ("block_size", "num_target_layers", "rope_theta")}
    fields["dflash_config"] = QWEN3_4B["dflash_config"] | {"block_size": 16, "num_target_layers": 36}
    return fields | {"rope_parameters": {"rope_theta": 1000000, "rope_type": "default"}}


def everything_on_top() -> dict:
    fields = {k: v for k, v in QWEN3_4B.items() if k != "dflash_config"}
    return fields | QWEN3_4B["dflash_config"]


@pytest.mark.parametrize("fields", [QWEN3_4B, newer_layout(), everything_on_top()])
def test_every_published_layout_gives_the_same_config(fields):
    assert config_from_json(fields) == DrafterConfig(
        hidden_size=2560,
        intermediate_size=9728,
        num_layers=5,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        vocab_size=151936,
        num_target_layers=36,
        target_layer_ids=(1, 9, 17, 25, 33),
        mask_token_id=151669,
        block_size=16,
    )


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configs_read_and_what_is_written_reads_back(name):
    config = config_from_json(PUBLISHED[name])
    assert config_from_json(config_to_json(config)) == config
    num_features = len(config.target_layer_ids)
    assert config.target_layer_ids == select_layer_ids(config.num_target_layers, num_features)


@pytest.mark.parametrize(("name", "billions"), [("Qwen3-4B", 0.54), ("Qwen3.6-27B", 1.73)])
def test_published_drafters_have_their_published_number_of_parameters(name, billions):
    shapes = expected_shapes(config_from_json(PUBLISHED[name])).values()
    assert sum(map(math.prod, shapes)) / 1e9 == pytest.approx(billions, abs=0.005)


def test_what_is_written_reads_back():
    config = config_from_json(QWEN3_4B)
    assert config_from_json(config_to_json(config)) == config


def test_sliding_layers_keep_their_window():
    types = ["sliding_attention"] * 4 + ["full_attention"]
    fields = QWEN3_4B | {"layer_types": types, "sliding_window": 2048, "use_sliding_window": True}
    config = config_from_json(fields)
    assert (config.layer_types, config.sliding_window) == (tuple(types), 2048)
    assert config_from_json(config_to_json(config)) == config


YARN = {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096, "truncate": False}


@pytest.mark.parametrize(
    "place",
    [
        {"rope_theta": 150000, "rope_scaling": YARN},
        {"rope_theta": None, "rope_parameters": YARN | {"rope_theta": 150000.0, "beta_fast": 32}},
    ],
)
def test_yarn_is_read_from_older_and_newer_layouts(place):
    config = config_from_json(QWEN3_4B | place)
    assert config.rope_theta == 150000
    assert config.yarn == YarnScaling(factor=32.0, original_max_position_embeddings=4096, truncate=False)
    assert config_from_json(config_to_json(config)) == config


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"factor": 0.5}, "yarn factor must be finite and >= 1, got 0.5"),
        ({"original_max_position_embeddings": 0}, "yarn original_max_position_embeddings must be at least 1"),
        ({"beta_fast": 1}, r"yarn beta_slow, beta_fast must be rising and > 0, got \(1.0, 1.0\)"),
    ],
)
def test_bounds_of_yarn_are_checked(change, message):
    with pytest.raises(ConfigError, match=message):
        config_from_json(QWEN3_4B | {"rope_scaling": YARN | change})


def test_yarn_with_an_attention_factor_of_its_own_is_refused():
    as_implied = {"rope_scaling": YARN | {"attention_factor": 0.1 * math.log(32.0) + 1}}
    assert config_from_json(QWEN3_4B | as_implied).yarn is not None
    with pytest.raises(UnsupportedCheckpointError, match=r"YaRN attention_factor of 1\.0"):
        config_from_json(QWEN3_4B | {"rope_scaling": YARN | {"attention_factor": 1.0}})


def test_missing_layer_ids_are_chosen_by_the_width_of_fc_never_by_the_number_of_draft_layers():
    fields = QWEN3_4B | {"num_hidden_layers": 8, "layer_types": None, "dflash_config": {"mask_token_id": 5}}
    assert config_from_json(fields, num_features=5).target_layer_ids == (1, 9, 17, 25, 33)
    with pytest.raises(CheckpointError, match="target_layer_ids must be a list of integers, got None"):
        config_from_json(fields)


@pytest.mark.parametrize("name", ["hidden_size", "vocab_size", "num_target_layers", "rope_theta"])
def test_a_missing_field_is_named(name):
    fields = {k: v for k, v in QWEN3_4B.items() if k != name}
    with pytest.raises(CheckpointError, match=name):
        config_from_json(fields, path="somewhere")


JUNK = (3, -1, 0.5, "text", True, [], [1], ["a"], {}, {"a": 1}, None)


def read(fields: dict) -> DrafterConfig | DflashOnlineError:
    try:
        return config_from_json(fields)
    except DflashOnlineError as error:
        return error


@pytest.mark.parametrize("name", [*QWEN3_4B, "rope_parameters", "draft_vocab_size", "is_causal"])
def test_junk_in_a_field_is_read_or_refused_with_a_named_error(name):
    layouts = (QWEN3_4B, newer_layout(), everything_on_top())
    outcomes = [read(fields | {name: value}) for fields in layouts for value in JUNK]
    assert {type(outcome) for outcome in outcomes} <= {
        DrafterConfig,
        ConfigError,
        CheckpointError,
        UnsupportedCheckpointError,
    }


@pytest.mark.parametrize("value", ["16", 16.5, True, [16]])
def test_a_field_of_the_wrong_type_is_named_with_its_value(value):
    with pytest.raises(CheckpointError, match="block_size must be an integer"):
        config_from_json(QWEN3_4B | {"block_size": value})


def test_bounds_are_checked_as_for_any_config():
    nested = {"mask_token_id": 151936, "target_layer_ids": [1, 9]}
    with pytest.raises(ConfigError, match=r"mask_token_id must be in 0\.\.151935"):
        config_from_json(QWEN3_4B | {"dflash_config": nested})
