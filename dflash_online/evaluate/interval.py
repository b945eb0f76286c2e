"""95 % bootstrap intervals of what a benchmark or an evaluation reports.

    seconds per prompt | acceptance histogram | histograms per record --> Interval --> report, plots

Prompts are resampled for means and ratios. The server counts acceptance per verify step and not per prompt,
so for tau the steps are resampled: that takes the steps of one prompt as independent, and as they are alike
the interval of tau is rather too narrow. Seeded: the same figures give the same interval. Pure arithmetic.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dflash_online.evaluate.compare import compare_paired

NUM_RESAMPLES = 2000
_QUANTILES = (0.025, 0.975)


@dataclass(frozen=True, slots=True)
class Interval:
    """An estimate and the 95 % bootstrap interval around it."""

    estimate: float
    low: float
    high: float
    num_values: int
    """Prompts, or verify steps, that were resampled."""

    def to_json(self) -> dict[str, float | int]:
        return {
            "estimate": self.estimate,
            "ci_low": self.low,
            "ci_high": self.high,
            "num_values": self.num_values,
        }


def mean_interval(values: Sequence[float], *, seed: int) -> Interval | None:
    """Of the mean; None with fewer than two values, which say nothing about their spread."""
    if len(values) < 2:
        return None
    zeros = [0.0] * len(values)
    result = compare_paired(zeros, values, seed=seed, confidence=0.95, num_resamples=NUM_RESAMPLES)
    return Interval(result.mean_difference, result.ci_low, result.ci_high, len(values))


def ratio_interval(above: Sequence[float], below: Sequence[float], *, seed: int) -> Interval | None:
    """Of mean(above) / mean(below), value i of both from the same prompt; both are drawn together.

    Returns:
        None with fewer than two pairs, or when a resampled mean below is zero.
    """
    assert len(above) == len(below), "pairs"
    if len(above) < 2:
        return None
    above_N, below_N = np.asarray(above, dtype=np.float64), np.asarray(below, dtype=np.float64)
    picks = np.random.default_rng(seed).integers(len(above_N), size=(NUM_RESAMPLES, len(above_N)))
    below_R = below_N[picks].mean(1)
    if below_R.min() <= 0:
        return None
    low, high = np.quantile(above_N[picks].mean(1) / below_R, _QUANTILES)
    return Interval(float(above_N.mean() / below_N.mean()), float(low), float(high), len(above_N))


def pooled_tau_interval(histograms: Sequence[Sequence[int]], *, seed: int) -> Interval | None:
    """Of tau pooled over the rounds of all records; entry a of a record's histogram counts its rounds with a
    accepted drafts. Records are resampled, since rounds of one record are alike.

    Returns:
        None with fewer than two records that have a round.
    """
    counts_NA = np.asarray([row for row in histograms if sum(row)], dtype=np.float64)
    if len(counts_NA) < 2:
        return None
    accepted_N, rounds_N = counts_NA @ np.arange(counts_NA.shape[1]), counts_NA.sum(1)
    picks = np.random.default_rng(seed).integers(len(counts_NA), size=(NUM_RESAMPLES, len(counts_NA)))
    low, high = np.quantile(1 + accepted_N[picks].sum(1) / rounds_N[picks].sum(1), _QUANTILES)
    return Interval(float(1 + accepted_N.sum() / rounds_N.sum()), float(low), float(high), len(counts_NA))


def tau_interval(histogram: Sequence[int], *, seed: int) -> Interval | None:
    """Of the mean tokens committed per verify step; entry a counts steps with a accepted drafts."""
    counts_A = np.asarray(histogram, dtype=np.int64)
    num_steps = int(counts_A.sum())
    if num_steps < 2:
        return None
    # Drawing num_steps steps with replacement is one multinomial draw of the counts.
    generator = np.random.default_rng(seed)
    resampled_RA = generator.multinomial(num_steps, counts_A / num_steps, size=NUM_RESAMPLES)
    accepted_A = np.arange(len(counts_A))
    low, high = np.quantile(1 + resampled_RA @ accepted_A / num_steps, _QUANTILES)
    return Interval(1 + float(counts_A @ accepted_A) / num_steps, float(low), float(high), num_steps)
