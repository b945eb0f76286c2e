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
    """Per slot: slots seen, drafts that equal their label, summed cross-entropy in nats (unweighted), and
    labels that equal the target's token (all of them unless labels come from the verifier)."""

    num_total_B: Tensor  # [B] float64
    num_correct_B: Tensor  # [B] float64
    loss_B: Tensor  # [B] float64
    num_agreed_B: Tensor  # [B] float64

    @classmethod
    def zeros(cls, block_size: int) -> SlotStatistics:
        """Nothing seen yet."""
        return cls.from_tensor(torch.zeros(4, block_size, dtype=torch.float64))

    @classmethod
    def count(
        cls,
        slot_N: Tensor,
        is_correct_N: Tensor,
        loss_N: Tensor,
        block_size: int,
        *,
        agrees_N: Tensor | None = None,
    ) -> SlotStatistics:
        """Sum up N slots by their place in the block.

        Args:
            agrees_N: whether the label is the target's token; None: it is, everywhere.
        """
        ones_N = torch.ones_like(loss_N)
        values_4N = torch.stack(
            [ones_N, is_correct_N, loss_N, ones_N if agrees_N is None else agrees_N]
        ).double()
        sums_4B = torch.zeros(4, block_size, dtype=torch.float64, device=loss_N.device)
        return cls.from_tensor(sums_4B.index_add_(1, slot_N, values_4N))

    @classmethod
    def from_tensor(cls, sums_4B: Tensor) -> SlotStatistics:
        """From `as_tensor`, for instance after an all-reduce."""
        return cls(*sums_4B)

    def as_tensor(self) -> Tensor:
        """[4, B] float64: total, correct, loss, agreed."""
        return torch.stack([self.num_total_B, self.num_correct_B, self.loss_B, self.num_agreed_B])

    def __add__(self, other: SlotStatistics) -> SlotStatistics:
        return SlotStatistics.from_tensor(self.as_tensor() + other.as_tensor())

    def accuracy(self) -> list[float]:
        """Top-1 accuracy of slots 1 .. B-1; 0 where nothing was seen."""
        return (self.num_correct_B / self.num_total_B.clamp(min=1)).tolist()[1:]

    def mean_loss(self) -> list[float]:
        """Mean cross-entropy of slots 1 .. B-1, in nats."""
        return (self.loss_B / self.num_total_B.clamp(min=1)).tolist()[1:]

    def label_agreement(self) -> float:
        """Share of labels that equal the target's token, over all slots; 1 where nothing was seen."""
        total = float(self.num_total_B.sum())
        return float(self.num_agreed_B.sum()) / total if total else 1.0
