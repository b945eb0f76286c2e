"""Bounds of the drafter's config and the choice of hooked layers."""

from __future__ import annotations

import dataclasses

import pytest
from tiny_models import tiny_config

from dflash_online.drafter.config import select_layer_ids
from dflash_online.errors import ConfigError


@pytest.mark.parametrize(
    ("num_layers", "num_features", "ids"),
    [
        (24, 5, (1, 6, 11, 16, 21)),
        (28, 5, (1, 7, 13, 19, 25)),
        (32, 5, (1, 8, 15, 22, 29)),
        (36, 5, (1, 9, 17, 25, 33)),
        (40, 5, (1, 10, 19, 28, 37)),
        (48, 5, (1, 12, 23, 34, 45)),
        (64, 5, (1, 16, 31, 46, 61)),
        (64, 10, (1, 8, 14, 21, 28, 34, 41, 48, 54, 61)),
        (30, 5, (1, 8, 14, 20, 27)),
        (9, 1, (4,)),
    ],
)
def test_hooked_layers_are_those_of_the_published_table(num_layers, num_features, ids):
    assert select_layer_ids(num_layers, num_features) == ids


@pytest.mark.parametrize(("num_layers", "num_features"), [(6, 5), (3, 2), (30, 0), (30, -1)])
def test_a_target_too_shallow_for_that_many_features_is_refused(num_layers, num_features):
    with pytest.raises(ConfigError, match="num_features"):
        select_layer_ids(num_layers, num_features)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"block_size": 1}, r"block_size must be >= 2 \(anchor, one draft\), got 1"),
        ({"mask_token_id": 37}, r"mask_token_id must be in 0\.\.36 \(target vocabulary\), got 37"),
        ({"mask_token_id": -1}, "mask_token_id"),
        ({"target_layer_ids": ()}, "target_layer_ids must be distinct"),
        ({"target_layer_ids": (1, 1)}, "target_layer_ids must be distinct"),
        ({"target_layer_ids": (1, 8)}, r"target_layer_ids must be in 0\.\.7 \(the target has 9 layers\)"),
        ({"num_kv_heads": 3}, "num_kv_heads must be a divisor of num_heads 4, got 3"),
        ({"head_dim": 7}, "head_dim must be even"),
        ({"num_layers": 0}, "num_layers must be at least 1"),
        ({"rms_norm_eps": 0.0}, "rms_norm_eps must be finite and > 0"),
        ({"rms_norm_eps": float("inf")}, "rms_norm_eps must be finite and > 0"),
        ({"rope_theta": float("inf")}, "rope_theta must be finite"),
        ({"layer_types": ("full_attention", "odd")}, "layer_types"),
        ({"layer_types": ("full_attention",)}, "layer_types"),
        (
            {"layer_types": ("sliding_attention",) * 2},
            "sliding_window must be >= 1 with sliding layers, got None",
        ),
    ],
)
def test_a_value_out_of_bounds_names_field_bound_and_value(change, message):
    change = {"layer_types": ()} | change
    with pytest.raises(ConfigError, match=message):
        tiny_config(**change)


def test_derived_values():
    config = tiny_config(target_layer_ids=(0, 3, 7), block_size=16)
    assert (config.feature_width, config.num_drafts) == (3 * 24, 15)
    assert config.layer_types == ("full_attention", "full_attention")


def test_config_is_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        tiny_config().block_size = 3
