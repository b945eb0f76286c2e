"""The gate: may a new version be published?

    held-out records --evaluate (worker)--> tau of old and new --> [ decide ] --> GateResult --> training.json

Knows neither drafters nor records: it judges two lists of figures. Raises nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

from trainer.runs.config import GateConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class GateResult:
    """What the gate measured and decided. Chain tau on held-out records, pooled over verify steps."""

    passed: bool
    reason: str
    new_tau: float
    old_tau: float
    old_version: str
    mean_difference: float
    """Of tau per record, new minus old."""
    ci_low: float
    """Lower end of its 95 % bootstrap interval."""
    ci_high: float
    win_rate: float
    """Share of records on which the new version is better; ties count half."""
    num_records: int


def decide(config: GateConfig, *, new_tau: float, old_tau: float) -> tuple[bool, str]:
    """Pass or hold back, with the reason in figures."""
    bound = (1 + config.min_gain) * old_tau
    passed = new_tau >= bound
    relation = ">=" if passed else "<"
    return (
        passed,
        f"held-out tau {new_tau:.3f} {relation} {bound:.3f} = (1 {config.min_gain:+g}) * {old_tau:.3f}",
    )
