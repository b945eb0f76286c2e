"""Noise on the input of `fc`, and on nothing else.

    features of a batch --FcInput.copy_of--> FcInput --FeatureNoise.added_to--> FcInput --> drafter

Labels may be computed from the same features, and noise that reaches them corrupts them. Hence noise takes
and returns an `FcInput`, which is always a copy, and the functions that make labels take tensors: passing one
for the other is a type error. Source: DFlash specification, section C.7, item 1.

Shape letters: S = packed context rows, F = feature width.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from dflash_online.errors import ConfigError


@dataclass(frozen=True, slots=True)
class FcInput:
    """What the drafter reads instead of the batch's own features."""

    features_SF: Tensor

    @classmethod
    def copy_of(cls, features_SF: Tensor) -> FcInput:
        """The batch's features, which stay as they are."""
        return cls(features_SF.clone())


@dataclass(frozen=True, slots=True)
class FeatureNoise:
    """Gaussian noise whose deviation moves between levels, on half cosines of equal length.

    One level is constant noise. After `num_steps` the last level stays.
    """

    levels: tuple[float, ...]
    """Deviations, in units of the features."""
    num_steps: int = 20_000
    """Optimizer steps from the first level to the last."""

    def __post_init__(self) -> None:
        if not self.levels or not all(0 <= level < math.inf for level in self.levels):
            raise ConfigError("noise levels", self.levels, "at least one, each finite and >= 0")
        if self.num_steps < 1:
            raise ConfigError("noise num_steps", self.num_steps, ">= 1")

    def deviation(self, step: int) -> float:
        """Of the noise in this optimizer step, counted from 0."""
        last = len(self.levels) - 1
        place = min(1.0, step / self.num_steps) * last
        index = min(int(place), last - 1) if last else 0
        start, end = self.levels[index], self.levels[min(index + 1, last)]
        return start + (end - start) * (1 - math.cos(math.pi * (place - index))) / 2

    def added_to(self, fc_input: FcInput, *, step: int, generator: torch.Generator) -> FcInput:
        """A noisy copy.

        Args:
            generator: draws on its own device; the same state gives the same noise everywhere.
        """
        features_SF = fc_input.features_SF
        noise_SF = torch.randn(features_SF.shape, generator=generator, device=generator.device)
        noise_SF = noise_SF.mul_(self.deviation(step)).to(features_SF.device, features_SF.dtype)
        return FcInput(features_SF + noise_SF)
