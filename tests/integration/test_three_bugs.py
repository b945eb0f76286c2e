"""Three known training bugs, planted one by one: each lowers tau, by how much at least, and how it shows.

One small real target, the same records, the same seed; a pair of drafters differs in the planted bug alone.
The world and the figures of docs/three-bugs.md are those of benchmarks/three_bugs.py, here with one seed.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor

import pytest
import torch

from benchmarks import three_bugs
from benchmarks.three_bugs import Arm, World

SEED = 1
Arms = dict[str, tuple[Future[Arm], Future[Arm]]]


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    """The tensors are small: more threads than one only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield three_bugs.make_world()
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def arms(world: World) -> Iterator[Arms]:
    """All drafters, in training on two cores: without and with each bug."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(2, context, torch.set_num_threads, (1,)) as pool:
        yield {
            bug: tuple(pool.submit(three_bugs.train_and_measure, world, recipe, seed=SEED) for recipe in pair)
            for bug, pair in three_bugs.recipe_pairs(world.noise).items()
        }


def results(pair: tuple[Future[Arm], Future[Arm]]) -> tuple[Arm, Arm]:
    return pair[0].result(), pair[1].result()


def test_the_target_has_learned_to_write(world: World) -> None:
    assert world.target_loss < 1.2  # an even guess among the letters costs 4.2 nats


def test_noise_that_reaches_the_labels_changes_them_and_lowers_tau(arms: Arms) -> None:
    clean, noisy = results(arms["noise reaches the labels"])
    # Labels of the deepest hooked layer agree with the target in part; noise turns a third of those that do.
    assert noisy.label_agreement < 0.75 * clean.label_agreement
    assert noisy.tau - 1 < 0.9 * (clean.tau - 1)


def test_fc_without_the_deepest_layer_lowers_tau(arms: Arms) -> None:
    whole, blind = results(arms["fc without the deepest layer"])
    assert (whole.label_agreement, blind.label_agreement) == (1.0, 1.0)
    assert blind.tau - 1 < 0.9 * (whole.tau - 1)


def test_soft_kl_with_gamma_10_lowers_accuracy_at_equal_steps(arms: Arms) -> None:
    hard, soft = results(arms["soft KL with gamma 10"])
    assert soft.label_agreement == hard.label_agreement
    assert soft.accuracy[0] < 0.95 * hard.accuracy[0]
    assert soft.tau < hard.tau
