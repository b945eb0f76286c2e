"""Recipes: the figures of the shipped ones, slot weights by hand, noise, and bounds."""

from __future__ import annotations

import math

import pytest
import torch

from dflash_online.distill.noise import FcInput, FeatureNoise
from dflash_online.distill.recipe import RECIPES, Recipe
from dflash_online.distill.slot_weights import slot_weights
from dflash_online.errors import ConfigError


@pytest.mark.parametrize(("block_size", "gamma"), [(16, 7.0), (10, 5.0), (8, 4.0)])
def test_gamma_is_the_published_one_for_the_block_size(block_size, gamma):
    assert RECIPES["zlab"].gamma_for(block_size) == gamma


def test_gamma_of_other_block_sizes_rises_with_the_block_and_an_explicit_one_wins():
    gammas = [RECIPES["zlab"].gamma_for(block_size) for block_size in range(2, 33)]
    assert gammas == sorted(gammas)
    assert gammas[0] == 1.0
    assert Recipe(name="x", gamma=10.0).gamma_for(16) == 10.0


def test_shipped_recipes_are_those_of_the_table():
    assert list(RECIPES) == ["zlab", "v5", "v3", "v4", "speculators"]
    rows = {
        name: (r.label_source, r.fc_layers, r.kl_share, r.weighting, r.gamma, r.noise is None, r.block_size)
        for name, r in RECIPES.items()
    }
    assert rows["zlab"] == ("tokens", "all", 0.0, "decay", None, True, None)
    assert rows["v5"] == ("verifier", "all", 0.0, "decay", 7.0, True, 16)
    assert rows["v3"] == rows["v4"] == ("verifier", "all_but_last", 0.7, "streak", 10.0, False, 16)
    assert rows["speculators"] == ("verifier", "all", 0.0, "dpace", 4.0, False, 8)
    assert [name for name, r in RECIPES.items() if r.noise_reaches_labels] == ["v3", "v4"]


VALID = torch.tensor([[False, True, True, True, True], [False, True, True, False, False]])
CORRECT = torch.tensor([[False, True, False, True, True], [False, False, False, False, False]])


def weights(recipe, probability=None):
    return slot_weights(recipe, VALID, CORRECT, torch.zeros(2, 5) if probability is None else probability)


def test_decaying_weights_are_zero_for_the_anchor_one_for_slot_one_and_zero_where_not_valid():
    decay = [math.exp(-k / 5) for k in range(4)]
    expected = torch.tensor([[0, *decay], [0, *decay[:2], 0, 0]])
    torch.testing.assert_close(weights(Recipe(name="x", gamma=5.0)), expected)


def test_a_streak_counts_in_full_up_to_its_first_miss_and_half_behind_it():
    found = weights(Recipe(name="x", gamma=5.0, weighting="streak"))
    plain = weights(Recipe(name="x", gamma=5.0))
    share = torch.tensor([[1, 1, 1, 0.5, 0.5], [1, 1, 0.5, 1, 1]])
    torch.testing.assert_close(found, plain * share)


def test_dpace_weights_are_those_of_the_formula_worked_out_by_hand():
    probability = torch.tensor([[9, 0.8, 0.2, 0.6, 0.4], [9, 0.5, 1.0, 9, 9]])
    found = weights(Recipe(name="x", weighting="dpace", dpace_alpha=0.5), probability)
    # s = 0.9, 0.6, 0.8, 0.7 and reach = 0.9, 0.54, 0.432, 0.3024; second block s = 0.75, 1.0.
    reach = [0.9, 0.54, 0.432, 0.3024]
    expected = torch.tensor([[0, sum(reach), sum(reach[1:]), sum(reach[2:]), reach[3]], [0, 1.5, 0.75, 0, 0]])
    torch.testing.assert_close(found, expected)


def test_noise_follows_its_levels_on_half_cosines_and_stays_at_the_last():
    noise = FeatureNoise((0.0, 0.1, 0.01), num_steps=100)
    found = [noise.deviation(step) for step in (0, 25, 50, 75, 100, 10**6)]
    assert found == pytest.approx([0.0, 0.05, 0.1, 0.055, 0.01, 0.01])
    assert {FeatureNoise((0.05,)).deviation(step) for step in (0, 7, 10**6)} == {0.05}


def test_noise_is_added_to_a_copy_with_the_deviation_asked_for():
    features = torch.zeros(400, 50)
    generator = torch.Generator().manual_seed(0)
    noisy = FeatureNoise((0.05,)).added_to(FcInput.copy_of(features), step=0, generator=generator)
    assert not features.any()
    assert noisy.features_SF.std().item() == pytest.approx(0.05, rel=0.02)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("gamma", 0.0),
        ("gamma", float("nan")),
        ("label_source", "teacher"),
        ("fc_layers", "most"),
        ("weighting", "flat"),
        ("denominator", "batch"),
        ("kl_share", 1.1),
        ("kl_temperature", 0.0),
        ("dpace_alpha", 0.0),
        ("block_size", 1),
    ],
)
def test_a_value_out_of_bounds_is_named(field, value):
    with pytest.raises(ConfigError, match=f"recipe {field}"):
        Recipe(name="x", **{field: value})


@pytest.mark.parametrize("levels", [(), (-0.1,), (0.1, float("inf"))])
def test_noise_out_of_bounds_is_named(levels):
    with pytest.raises(ConfigError, match="noise levels"):
        FeatureNoise(levels)
    with pytest.raises(ConfigError, match="noise num_steps"):
        FeatureNoise((0.1,), num_steps=0)
