"""Is the new drafter better on the same records? Paired bootstrap over records.

    EvaluationResult of old and of new --compare--> PairedComparison --> gate of the trainer, reports

Pure arithmetic: knows neither drafters nor records. Raises ShapeError when the two do not belong together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from dflash_online.errors import ShapeError


@dataclass(frozen=True, slots=True)
class PairedComparison:
    """Difference of tau per record, new minus old. The interval is for the mean over records."""

    mean_difference: float
    ci_low: float
    ci_high: float
    win_rate: float
    """Share of records on which the new drafter has the larger tau; a tie counts half."""
    num_records: int


def compare_paired(
    old: Sequence[float],
    new: Sequence[float],
    *,
    seed: int,
    confidence: float = 0.95,
    num_resamples: int = 2000,
) -> PairedComparison:
    """Bootstrap the mean difference of paired figures; record i of one is record i of the other.

    Raises:
        ShapeError: unequal numbers of figures, or none.
    """
    if len(old) != len(new) or not old:
        raise ShapeError(f"paired comparison of {len(old)} with {len(new)} records")
    difference_N = torch.tensor(new, dtype=torch.float64) - torch.tensor(old, dtype=torch.float64)
    generator = torch.Generator().manual_seed(seed)
    picks = torch.randint(len(difference_N), (num_resamples, len(difference_N)), generator=generator)
    tail = (1 - confidence) / 2
    bounds = torch.tensor([tail, 1 - tail], dtype=torch.float64)
    low, high = difference_N[picks].mean(1).quantile(bounds).tolist()
    wins = (difference_N > 0).double() + 0.5 * (difference_N == 0).double()
    return PairedComparison(
        float(difference_N.mean()), low, high, float(wins.mean()), num_records=len(difference_N)
    )
