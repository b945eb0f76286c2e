"""Bootstrap intervals against slow twins and known spreads."""

from __future__ import annotations

import random

import pytest

from dflash_online.evaluate.interval import mean_interval, ratio_interval, tau_interval


def test_the_interval_of_a_mean_has_the_width_of_the_normal_theory() -> None:
    draw = random.Random(1)
    values = [draw.gauss(5, 2) for _ in range(400)]
    interval = mean_interval(values, seed=0)
    assert interval is not None
    assert interval.estimate == pytest.approx(sum(values) / 400)
    assert interval.high - interval.low == pytest.approx(2 * 1.96 * 2 / 20, rel=0.15)


def test_tau_resampled_from_counts_equals_resampling_steps_one_by_one() -> None:
    histogram = (30, 20, 10, 40)
    interval = tau_interval(histogram, seed=0)
    assert interval is not None
    steps = [accepted for accepted, count in enumerate(histogram) for _ in range(count)]
    draw = random.Random(0)
    taus = sorted(1 + sum(draw.choices(steps, k=len(steps))) / len(steps) for _ in range(2000))
    assert interval.estimate == 1 + sum(steps) / len(steps)
    assert (interval.low, interval.high) == pytest.approx((taus[50], taus[1950]), abs=0.03)
    assert interval.num_values == 100


def test_a_ratio_is_of_means_and_its_pairs_are_drawn_together() -> None:
    below = [1.0, 2.0, 3.0, 10.0]
    interval = ratio_interval([3 * value for value in below], below, seed=0)
    assert interval is not None
    assert (interval.estimate, interval.low, interval.high) == pytest.approx((3, 3, 3))
    mixed = ratio_interval([2.0, 2.0, 8.0], [1.0, 2.0, 1.0], seed=0)
    assert mixed is not None
    assert mixed.estimate == 3
    assert mixed.low < 3 < mixed.high


def test_the_seed_decides_the_interval() -> None:
    above, below = [2.0, 2.0, 8.0, 5.0], [1.0, 2.0, 1.0, 3.0]
    assert ratio_interval(above, below, seed=0) == ratio_interval(above, below, seed=0)
    assert tau_interval((5, 3, 9), seed=0) == tau_interval((5, 3, 9), seed=0)


def test_too_few_values_have_no_interval() -> None:
    assert mean_interval([1.0], seed=0) is None
    assert ratio_interval([1.0], [1.0], seed=0) is None
    assert ratio_interval([1.0, 1.0], [0.0, 1.0], seed=0) is None
    assert tau_interval((), seed=0) is None
    assert tau_interval((1,), seed=0) is None
