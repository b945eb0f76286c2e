"""Recipes: named, frozen answers to "what is the label, what is the loss, what may be added to the input".

Read by `distill.objective` and printed by the command line. Knows neither batches nor optimizers.
Source: DFlash specification, sections C.4 to C.7. `v3` and `v4` are a real project's flawed past, kept to be
run against `v5` on the same records; docs/three-bugs.md tells what their flaws cost.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from dflash_online.distill.noise import FeatureNoise
from dflash_online.drafter.config import FC_ALL, FC_ALL_BUT_LAST
from dflash_online.errors import ConfigError

LABEL_TOKENS, LABEL_VERIFIER = "tokens", "verifier"
DECAY, STREAK, DPACE = "decay", "streak", "dpace"
PER_WEIGHT, PER_SLOT = "weights", "slots"

# Published pairs of block size and decay length.
_GAMMA_OF_BLOCK_SIZE = {16: 7.0, 10: 5.0, 8: 4.0}


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """How a drafter is trained on a record, optimizer aside."""

    name: str
    label_source: str = LABEL_TOKENS
    """`tokens`: the target's own tokens. `verifier`: what the target's final norm and head make of the
    deepest hooked layer."""
    fc_layers: str = FC_ALL
    """`all`: every hooked layer goes into `fc`, as in published checkpoints. `all_but_last`: all but the
    deepest; such a drafter cannot be served."""
    kl_share: float = 0.0
    """Share of soft KL (verifier against drafter) in the loss; the rest is cross-entropy on the label."""
    kl_temperature: float = 1.0
    """T of both distributions of the KL, whose value is multiplied by T * T."""
    weighting: str = DECAY
    """`decay`: `exp(-(k-1)/gamma)` for slot k. `streak`: the same, halved behind the block's first miss.
    `dpace`: by the drafter's own probability of getting there."""
    gamma: float | None = None
    """Decay length in slots; None takes the published one for the block size. Unused by `dpace`."""
    dpace_alpha: float = 0.5
    """Floor of the factor of one slot in `dpace`."""
    denominator: str = PER_WEIGHT
    """What the summed loss is divided by: the sum of `weights`, or the number of `slots`."""
    noise: FeatureNoise | None = None
    """On the input of `fc`. None is the published setting."""
    block_size: int | None = None
    """B of a fresh drafter where neither the run nor the served drafter names one; None: 16."""
    noise_reaches_labels: bool = False
    """A planted bug, for comparison: labels are computed from the noisy features."""

    def __post_init__(self) -> None:
        choices: tuple[tuple[str, str, tuple[str, ...]], ...] = (
            ("label_source", self.label_source, (LABEL_TOKENS, LABEL_VERIFIER)),
            ("fc_layers", self.fc_layers, (FC_ALL, FC_ALL_BUT_LAST)),
            ("weighting", self.weighting, (DECAY, STREAK, DPACE)),
            ("denominator", self.denominator, (PER_WEIGHT, PER_SLOT)),
        )
        for field, choice, known in choices:
            if choice not in known:
                raise ConfigError(f"recipe {field}", choice, f"one of {', '.join(known)}")
        bounds: tuple[tuple[str, float | None, str, bool], ...] = (
            ("kl_share", self.kl_share, "in [0, 1]", 0 <= self.kl_share <= 1),
            ("kl_temperature", self.kl_temperature, "finite and > 0", 0 < self.kl_temperature < math.inf),
            ("gamma", self.gamma, "finite and > 0", self.gamma is None or 0 < self.gamma < math.inf),
            ("dpace_alpha", self.dpace_alpha, "in (0, 1]", 0 < self.dpace_alpha <= 1),
            ("block_size", self.block_size, ">= 2", self.block_size is None or self.block_size >= 2),
        )
        for field, value, bound, holds in bounds:
            if not holds:
                raise ConfigError(f"recipe {field}", value, bound)

    @property
    def needs_verifier(self) -> bool:
        """Whether the target's distribution is rebuilt from the features."""
        return self.label_source == LABEL_VERIFIER or self.kl_share > 0

    def gamma_for(self, block_size: int) -> float:
        """The decay length in force; other block sizes lie on the lines through the published ones."""
        if self.gamma is not None:
            return self.gamma
        line = block_size / 2 if block_size <= 10 else 5 + (block_size - 10) / 3
        return _GAMMA_OF_BLOCK_SIZE.get(block_size, line)


def _flawed(name: str) -> Recipe:
    return Recipe(
        name=name,
        label_source=LABEL_VERIFIER,
        fc_layers=FC_ALL_BUT_LAST,
        kl_share=0.7,
        kl_temperature=2.0,
        weighting=STREAK,
        gamma=10.0,
        noise=FeatureNoise((0.0, 0.1, 0.01)),
        noise_reaches_labels=True,
        block_size=16,
    )


_ALL = (
    Recipe(name="zlab"),
    Recipe(name="v5", label_source=LABEL_VERIFIER, gamma=7.0, block_size=16),
    # One column of the project's history: what set v4 apart from v3 is not on record.
    _flawed("v3"),
    _flawed("v4"),
    Recipe(
        name="speculators",
        label_source=LABEL_VERIFIER,
        weighting=DPACE,
        gamma=4.0,
        denominator=PER_SLOT,
        noise=FeatureNoise((0.05,)),
        block_size=8,
    ),
)
RECIPES: dict[str, Recipe] = {recipe.name: recipe for recipe in _ALL}
"""Every recipe by name; `zlab` is the default."""
ZLAB = RECIPES["zlab"]
