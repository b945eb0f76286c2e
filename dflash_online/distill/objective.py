"""The training objective of one packed batch.

    PackedBatch --drafter--> hidden of every block --valid slots only--> frozen head --> loss, statistics

The caller divides: `loss_sum` and `weight_sum` are summed over all ranks first, so that the loss does not
depend on how records are spread. Runs where drafter, head and batch are. Knows no optimizer.
Source: DFlash specification, section C.

Shape letters: A = anchors, B = slots of a block, N = valid slots, H = hidden size, S = context rows, F = K*H.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dflash_online.distill.cross_entropy import DEFAULT_CHUNK_SLOTS, chunked_cross_entropy
from dflash_online.distill.pack import PackedBatch
from dflash_online.distill.recipe import Recipe
from dflash_online.distill.statistics import SlotStatistics
from dflash_online.drafter.model import DFlashDrafter
from dflash_online.errors import ConfigError, ShapeError
from dflash_online.target.frozen import FrozenHead


@dataclass(frozen=True, slots=True)
class ObjectiveResult:
    """Sums of one batch. `loss_sum / weight_sum` is the loss in nats."""

    loss_sum: Tensor  # [] float32, with gradient
    weight_sum: Tensor  # [] float32
    stats: SlotStatistics


def block_objective(
    drafter: DFlashDrafter,
    frozen: FrozenHead,
    batch: PackedBatch,
    recipe: Recipe,
    *,
    chunk_slots: int = DEFAULT_CHUNK_SLOTS,
    generator: torch.Generator | None = None,
) -> ObjectiveResult:
    """Weighted cross-entropy of the batch's blocks.

    Args:
        chunk_slots: rows of logits in memory at a time.
        generator: of the noise; required when the recipe adds any.

    Raises:
        ShapeError: batch and drafter disagree in block size.
        ConfigError: a recipe with noise, and no generator.
    """
    hidden_ABH = block_hidden(drafter, frozen, batch, noise=recipe.noise, generator=generator)
    weight_AB = recipe.slot_weights(batch.block_size).to(hidden_ABH.device).expand(batch.label_AB.shape)
    # Slots that teach nothing are dropped before the head: it costs more than the drafter itself.
    index_N = batch.valid_AB.flatten().nonzero().flatten()
    weight_N = weight_AB.flatten()[index_N]
    losses = chunked_cross_entropy(
        hidden_ABH.flatten(0, 1)[index_N],
        frozen.weight_VH,
        batch.label_AB.flatten()[index_N],
        weight_N,
        chunk_slots=chunk_slots,
    )
    stats = SlotStatistics.count(
        index_N % batch.block_size, losses.is_correct_N, losses.loss_N, batch.block_size
    )
    return ObjectiveResult(losses.loss_sum, weight_N.sum(), stats)


def block_hidden(
    drafter: DFlashDrafter,
    frozen: FrozenHead,
    batch: PackedBatch,
    *,
    noise: float = 0.0,
    generator: torch.Generator | None = None,
) -> Tensor:
    """[A, B, H]: the drafter's final hidden states of every block of a batch.

    A drafter with float32 masters multiplies in the head's type, see `FrozenHead.autocast`.
    """
    if batch.block_size != drafter.config.block_size:
        raise ShapeError(f"blocks of {batch.block_size} slots, the drafter has {drafter.config.block_size}")
    features_SF = batch.features_SF if not noise else _noised(batch.features_SF, noise, generator)
    id_AB = torch.full_like(batch.label_AB, drafter.config.mask_token_id)
    id_AB[:, 0] = batch.anchor_token_A
    with frozen.autocast():
        return drafter.forward_blocks(
            frozen.embed(id_AB),
            drafter.context(features_SF),
            block_positions_AB=batch.block_position_AB,
            ctx_positions_S=batch.context_position_S,
            mask=batch.mask(drafter.config.sliding_window),
        )


def _noised(features_SF: Tensor, noise: float, generator: torch.Generator | None) -> Tensor:
    """A copy with noise; the batch's own features stay clean, since labels may be computed from them."""
    if generator is None:
        raise ConfigError("generator", None, "given: the recipe adds noise")
    shape, device = features_SF.shape, generator.device
    added_SF = torch.randn(shape, generator=generator, device=device).mul_(noise).to(features_SF.device)
    return features_SF + added_SF.to(features_SF.dtype)
