"""Slot weights and bounds of recipes."""

from __future__ import annotations

import math

import pytest
import torch

from dflash_online.distill.recipe import RECIPES, Recipe
from dflash_online.errors import ConfigError


@pytest.mark.parametrize(("block_size", "gamma"), [(16, 7.0), (10, 5.0), (8, 4.0)])
def test_gamma_is_the_published_one_for_the_block_size(block_size, gamma):
    assert RECIPES["zlab"].gamma_for(block_size) == gamma


def test_gamma_of_other_block_sizes_rises_with_the_block_and_an_explicit_one_wins():
    gammas = [RECIPES["zlab"].gamma_for(block_size) for block_size in range(2, 33)]
    assert gammas == sorted(gammas)
    assert gammas[0] == 1.0
    assert Recipe(name="x", gamma=10.0).gamma_for(16) == 10.0


def test_slot_weights_are_zero_for_the_anchor_one_for_slot_one_then_decay():
    weights = RECIPES["zlab"].slot_weights(16)
    assert weights[0] == 0
    assert weights[1] == 1
    torch.testing.assert_close(weights[1:], torch.tensor([math.exp(-(k - 1) / 7) for k in range(1, 16)]))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("gamma", 0.0),
        ("gamma", float("nan")),
        ("noise", -0.1),
        ("noise", float("inf")),
        ("label_source", "verifier"),
        ("loss", "kl"),
        ("fc_layers", "all_but_last"),
    ],
)
def test_a_value_out_of_bounds_is_named(field, value):
    with pytest.raises(ConfigError, match=f"recipe {field}"):
        Recipe(name="x", **{field: value})
