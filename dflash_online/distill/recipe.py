"""Recipes: named, frozen answers to "what is the label, what is the loss, what may be added to the input".

Read by `distill.objective` and printed by the command line. Knows neither tensors nor optimizers.
Source: DFlash specification, sections C.4 to C.6.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from dflash_online.errors import ConfigError

LABEL_TOKENS = "tokens"
FC_ALL = "all"
LOSS_HARD_CE = "hard_ce"

# Published pairs of block size and decay length.
_GAMMA_OF_BLOCK_SIZE = {16: 7.0, 10: 5.0, 8: 4.0}


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """How a drafter is trained on a record, optimizer aside."""

    name: str
    label_source: str = LABEL_TOKENS
    """`tokens`: the target's own tokens."""
    fc_layers: str = FC_ALL
    """`all`: every hooked layer goes into `fc`, as in published checkpoints."""
    loss: str = LOSS_HARD_CE
    """`hard_ce`: cross-entropy on the label over the full vocabulary."""
    gamma: float | None = None
    """Decay length of the slot weights, in slots; None takes the published one for the block size."""
    noise: float = 0.0
    """Deviation of Gaussian noise on the input of `fc`; labels never see it. 0 is the published setting."""

    def __post_init__(self) -> None:
        for field, value, known in (
            ("label_source", self.label_source, LABEL_TOKENS),
            ("fc_layers", self.fc_layers, FC_ALL),
            ("loss", self.loss, LOSS_HARD_CE),
        ):
            if value != known:
                raise ConfigError(f"recipe {field}", value, repr(known))
        if self.gamma is not None and not (math.isfinite(self.gamma) and self.gamma > 0):
            raise ConfigError("recipe gamma", self.gamma, "finite and > 0")
        if not 0 <= self.noise < math.inf:
            raise ConfigError("recipe noise", self.noise, "finite and >= 0")

    def gamma_for(self, block_size: int) -> float:
        """The decay length in force; other block sizes lie on the lines through the published ones."""
        if self.gamma is not None:
            return self.gamma
        line = block_size / 2 if block_size <= 10 else 5 + (block_size - 10) / 3
        return _GAMMA_OF_BLOCK_SIZE.get(block_size, line)

    def slot_weights(self, block_size: int) -> Tensor:
        """[B] float32: 0 for the anchor, `exp(-(k-1)/gamma)` for slot k, as a miss voids the rest."""
        slot_B = torch.arange(block_size, dtype=torch.float32)
        return torch.exp((1 - slot_B) / self.gamma_for(block_size)) * (slot_B > 0)


ZLAB = Recipe(name="zlab")
RECIPES: dict[str, Recipe] = {recipe.name: recipe for recipe in (ZLAB,)}
"""Every recipe by name; `zlab` is the default."""
