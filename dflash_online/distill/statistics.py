"""Counts of one or many steps, slot by slot: what the metrics and the gate are made of.

    distill.objective --> SlotStatistics, added over steps, all-reduced over ranks --> metrics

Sums only, so that adding is exact and the order does not matter. Float64 throughout.

Shape letters: B = slots of a block.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class SlotStatistics:
    """Per slot: slots seen, drafts that equal their label, summed loss in nats (unweighted)."""

    num_total_B: Tensor  # [B] float64
    num_correct_B: Tensor  # [B] float64
    loss_B: Tensor  # [B] float64

    @classmethod
    def zeros(cls, block_size: int) -> SlotStatistics:
        """Nothing seen yet."""
        return cls.from_tensor(torch.zeros(3, block_size, dtype=torch.float64))

    @classmethod
    def count(cls, slot_N: Tensor, is_correct_N: Tensor, loss_N: Tensor, block_size: int) -> SlotStatistics:
        """Sum up N slots by their place in the block."""
        values_3N = torch.stack([torch.ones_like(loss_N), is_correct_N, loss_N]).double()
        sums_3B = torch.zeros(3, block_size, dtype=torch.float64, device=loss_N.device)
        return cls.from_tensor(sums_3B.index_add_(1, slot_N, values_3N))

    @classmethod
    def from_tensor(cls, sums_3B: Tensor) -> SlotStatistics:
        """From `as_tensor`, for instance after an all-reduce."""
        return cls(sums_3B[0], sums_3B[1], sums_3B[2])

    def as_tensor(self) -> Tensor:
        """[3, B] float64: total, correct, loss."""
        return torch.stack([self.num_total_B, self.num_correct_B, self.loss_B])

    def __add__(self, other: SlotStatistics) -> SlotStatistics:
        return SlotStatistics.from_tensor(self.as_tensor() + other.as_tensor())

    def accuracy(self) -> list[float]:
        """Top-1 accuracy of slots 1 .. B-1; 0 where nothing was seen."""
        return (self.num_correct_B / self.num_total_B.clamp(min=1)).tolist()[1:]

    def mean_loss(self) -> list[float]:
        """Mean cross-entropy of slots 1 .. B-1, in nats."""
        return (self.loss_B / self.num_total_B.clamp(min=1)).tolist()[1:]
