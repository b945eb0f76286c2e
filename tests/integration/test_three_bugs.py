"""Three known training bugs, planted one by one: each lowers tau, by how much at least, and how it shows.

One small real target, the same records, the same seed; a pair of drafters differs in the planted bug alone.
The world and the figures of docs/three-bugs.md are those of benchmarks/three_bugs.py, here with one seed.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from benchmarks import three_bugs
from benchmarks.three_bugs import Arm, World

SEED = 1


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """The tensors are small: more threads than one only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def world(one_thread: None) -> World:
    return three_bugs.make_world()


def pair(world: World, bug: str) -> tuple[Arm, Arm]:
    without, planted = three_bugs.recipe_pairs(world.noise)[bug]
    arms = [three_bugs.train_and_measure(world, recipe, seed=SEED) for recipe in (without, planted)]
    return arms[0], arms[1]


def test_the_target_has_learned_to_write(world: World) -> None:
    assert world.target_loss < 1.2  # an even guess among the letters costs 4.2 nats


def test_noise_that_reaches_the_labels_changes_them_and_lowers_tau(world: World) -> None:
    clean, noisy = pair(world, "noise reaches the labels")
    # Labels of the deepest hooked layer agree with the target in part; noise turns a third of those that do.
    assert noisy.label_agreement < 0.75 * clean.label_agreement
    assert noisy.tau - 1 < 0.9 * (clean.tau - 1)


def test_fc_without_the_deepest_layer_lowers_tau(world: World) -> None:
    whole, blind = pair(world, "fc without the deepest layer")
    assert (whole.label_agreement, blind.label_agreement) == (1.0, 1.0)
    assert blind.tau - 1 < 0.9 * (whole.tau - 1)


def test_soft_kl_with_gamma_10_lowers_accuracy_at_equal_steps(world: World) -> None:
    hard, soft = pair(world, "soft KL with gamma 10")
    assert soft.label_agreement == hard.label_agreement
    assert soft.accuracy[0] < 0.95 * hard.accuracy[0]
    assert soft.tau < hard.tau
