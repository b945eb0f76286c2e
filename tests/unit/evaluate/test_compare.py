"""The paired bootstrap: exact on simple cases, seeded, and paired indeed."""

from __future__ import annotations

import pytest
import torch

from dflash_online.errors import ShapeError
from dflash_online.evaluate.compare import compare_paired


def test_equal_figures_differ_by_nothing_and_win_half():
    result = compare_paired([1.5, 2.0, 1.0], [1.5, 2.0, 1.0], seed=0)
    assert (result.mean_difference, result.ci_low, result.ci_high) == (0.0, 0.0, 0.0)
    assert result.win_rate == 0.5
    assert result.num_records == 3


def test_a_constant_gain_has_an_interval_of_no_width_however_the_records_vary():
    old = [1.0, 3.0, 2.0, 8.0]
    result = compare_paired(old, [value + 0.25 for value in old], seed=0)
    assert (result.ci_low, result.mean_difference, result.ci_high) == (0.25, 0.25, 0.25)
    assert result.win_rate == 1.0


def test_the_interval_is_that_of_the_normal_approximation_for_many_records():
    generator = torch.Generator().manual_seed(0)
    old = torch.rand(400, generator=generator)
    new = old + 0.1 + torch.randn(400, generator=generator)
    result = compare_paired(old.tolist(), new.tolist(), seed=1)
    half = 1.96 * float((new - old).std()) / 20
    assert result.ci_low == pytest.approx(result.mean_difference - half, abs=0.02)
    assert result.ci_high == pytest.approx(result.mean_difference + half, abs=0.02)


def test_the_seed_decides():
    old, new = [1.0, 2.0, 3.0, 4.0], [2.0, 2.0, 5.0, 3.0]
    assert compare_paired(old, new, seed=3) == compare_paired(old, new, seed=3)
    assert compare_paired(old, new, seed=3).win_rate == pytest.approx(0.625)


@pytest.mark.parametrize(("old", "new"), [([], []), ([1.0], [1.0, 2.0])])
def test_figures_that_are_not_pairs_are_refused(old, new):
    with pytest.raises(ShapeError, match="paired comparison"):
        compare_paired(old, new, seed=0)
