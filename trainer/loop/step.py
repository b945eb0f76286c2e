"""One training step: forward and backward over this rank's packs, sums over ranks, clip, update.

    PackedBatch ... --block_objective--> gradients of the sum --all-reduce--> / denominator --> AdamW

The division comes last and by the denominator of all ranks, so that a step on n ranks equals the step of one
rank on the same packs. Knows neither records nor schedules.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dflash_online.distill.objective import block_objective
from dflash_online.distill.pack import PackedBatch
from dflash_online.distill.recipe import Recipe
from dflash_online.distill.statistics import SlotStatistics
from dflash_online.drafter.model import DFlashDrafter
from dflash_online.target.frozen import FrozenHead
from trainer.loop.parallel import Ranks


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """One step, summed over all ranks."""

    loss: float
    grad_norm: float  # before clipping
    stats: SlotStatistics
    is_applied: bool  # False: loss or gradient was not finite, and the weights stayed as they were


def train_step(
    drafter: DFlashDrafter,
    frozen: FrozenHead,
    optimizer: torch.optim.Optimizer,
    batches: Sequence[PackedBatch],
    recipe: Recipe,
    ranks: Ranks,
    *,
    step: int = 0,
    noise: Sequence[torch.Generator] = (),
    learning_rate: float,
    clip: float,
    chunk_slots: int,
) -> StepOutcome:
    """Take one step. Every rank calls it with its own packs; a rank may have none.

    Args:
        batches: on the ranks' device; gradients add up over them.
        step: steps taken before this one, for schedules of the recipe.
        noise: one generator per batch; read only when the recipe adds noise.
        clip: bound of the global gradient norm.
    """
    optimizer.zero_grad(set_to_none=True)
    block_size = drafter.config.block_size
    sums_2 = torch.zeros(2, dtype=torch.float64, device=ranks.device)
    stats_4B = SlotStatistics.zeros(block_size).as_tensor().to(ranks.device)
    for index, batch in enumerate(batches):
        with torch.autocast("cuda", torch.bfloat16, enabled=ranks.device.type == "cuda"):
            result = block_objective(
                drafter,
                frozen,
                batch,
                recipe,
                chunk_slots=chunk_slots,
                step=step,
                generator=noise[index] if index < len(noise) else None,
            )
        result.loss_sum.backward()  # type: ignore[no-untyped-call]
        sums_2 += torch.stack([result.loss_sum.detach().double(), result.denominator.double()])
        stats_4B += result.stats.as_tensor()
    ranks.sum_([sums_2, stats_4B])
    denominator = max(float(sums_2[1]), 1e-8)
    grad_norm = _reduce_and_clip(drafter, ranks, denominator, clip)
    loss = float(sums_2[0]) / denominator
    is_applied = math.isfinite(grad_norm) and math.isfinite(loss)
    if is_applied:
        for group in optimizer.param_groups:
            group["lr"] = learning_rate
        optimizer.step()
    return StepOutcome(loss, grad_norm, SlotStatistics.from_tensor(stats_4B.cpu()), is_applied)


def _reduce_and_clip(drafter: DFlashDrafter, ranks: Ranks, denominator: float, clip: float) -> float:
    gradients: list[Tensor] = []
    for parameter in drafter.parameters():
        if parameter.grad is None:  # this rank had no pack that reached it
            parameter.grad = torch.zeros_like(parameter)
        gradients.append(parameter.grad)
    ranks.sum_(gradients)
    torch._foreach_div_(gradients, denominator)
    norm = torch.nn.utils.get_total_norm(gradients)
    torch.nn.utils.clip_grads_with_norm_(drafter.parameters(), clip, norm)
    return float(norm)
