"""The training objective of one packed batch.

    PackedBatch --drafter--> hidden of every block --valid slots only--> frozen head --> losses, weights
    deepest hooked layer of the features --final norm of the target--> verifier ---^    --> statistics

The caller divides: `loss_sum` and `denominator` are summed over all ranks first, so that the loss does not
depend on how records are spread. Runs where drafter, head and batch are. Knows no optimizer.
Source: DFlash specification, section C.

Shape letters: A = anchors, B = slots of a block, N = valid slots, H = hidden size, S = context rows, F = K*H.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dflash_online.distill.noise import FcInput
from dflash_online.distill.pack import PackedBatch
from dflash_online.distill.recipe import LABEL_TOKENS, PER_SLOT, Recipe
from dflash_online.distill.slot_loss import DEFAULT_CHUNK_SLOTS, SlotTargets, chunked_slot_losses
from dflash_online.distill.slot_weights import slot_weights
from dflash_online.distill.statistics import SlotStatistics
from dflash_online.drafter.model import DFlashDrafter
from dflash_online.errors import ConfigError, ShapeError
from dflash_online.target.frozen import FrozenHead


@dataclass(frozen=True, slots=True)
class ObjectiveResult:
    """Sums of one batch. `loss_sum / denominator` is the loss in nats."""

    loss_sum: Tensor  # [] float32, with gradient
    denominator: Tensor  # [] float32, sum of weights or number of slots, as the recipe says
    stats: SlotStatistics


def block_objective(
    drafter: DFlashDrafter,
    frozen: FrozenHead,
    batch: PackedBatch,
    recipe: Recipe,
    *,
    chunk_slots: int = DEFAULT_CHUNK_SLOTS,
    step: int = 0,
    generator: torch.Generator | None = None,
) -> ObjectiveResult:
    """Weighted loss of the batch's blocks.

    Args:
        chunk_slots: rows of logits in memory at a time.
        step: optimizer steps taken, for the schedule of the noise.
        generator: of the noise; required when the recipe adds any.

    Raises:
        ShapeError: batch and drafter disagree in block size.
        ConfigError: a recipe with noise and no generator, or drafter and recipe disagree in `fc_layers`.
    """
    if drafter.config.fc_layers != recipe.fc_layers:
        raise ConfigError("recipe fc_layers", recipe.fc_layers, f"the drafter's {drafter.config.fc_layers!r}")
    fc_input = _noised(batch, recipe, step, generator)
    hidden_ABH = block_hidden(drafter, frozen, batch, fc_input=fc_input)
    # Slots that teach nothing are dropped before the head: it costs more than the drafter itself.
    index_N = batch.valid_AB.flatten().nonzero().flatten()
    verifier_NH = None
    if recipe.needs_verifier:
        label_SF = batch.features_SF
        if recipe.noise_reaches_labels and fc_input is not None:
            label_SF = fc_input.features_SF
        deepest_SH = label_SF[:, drafter.config.deepest_layer_columns]
        verifier_NH = frozen.normed(deepest_SH[batch.verifier_row_AB.flatten()[index_N]])
    token_N = batch.label_AB.flatten()[index_N]
    targets = SlotTargets(
        label_N=token_N if recipe.label_source == LABEL_TOKENS else None,
        verifier_NH=verifier_NH,
        kl_share=recipe.kl_share,
        kl_temperature=recipe.kl_temperature,
    )
    hidden_NH = hidden_ABH.flatten(0, 1)[index_N]
    losses = chunked_slot_losses(hidden_NH, frozen.weight_VH, targets, chunk_slots=chunk_slots)
    weight_AB = slot_weights(
        recipe,
        batch.valid_AB,
        _spread(losses.is_correct_N, index_N, batch),
        _spread((-losses.cross_entropy_N).exp(), index_N, batch),
    )
    weight_N = weight_AB.flatten()[index_N]
    denominator = torch.ones_like(weight_N).sum() if recipe.denominator == PER_SLOT else weight_N.sum()
    agrees_N, slot_N = losses.label_N == token_N, index_N % batch.block_size
    stats = SlotStatistics.count(
        slot_N, losses.is_correct_N, losses.cross_entropy_N, batch.block_size, agrees_N=agrees_N
    )
    return ObjectiveResult((losses.loss_N * weight_N).sum(), denominator, stats)


def block_hidden(
    drafter: DFlashDrafter, frozen: FrozenHead, batch: PackedBatch, *, fc_input: FcInput | None = None
) -> Tensor:
    """[A, B, H]: the drafter's final hidden states of every block of a batch.

    A drafter with float32 masters multiplies in the head's type, see `FrozenHead.autocast`.

    Args:
        fc_input: read by the drafter instead of the batch's features.
    """
    if batch.block_size != drafter.config.block_size:
        raise ShapeError(f"blocks of {batch.block_size} slots, the drafter has {drafter.config.block_size}")
    features_SF = batch.features_SF if fc_input is None else fc_input.features_SF
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


def _noised(
    batch: PackedBatch, recipe: Recipe, step: int, generator: torch.Generator | None
) -> FcInput | None:
    if recipe.noise is None:
        return None
    if generator is None:
        raise ConfigError("generator", None, "given: the recipe adds noise")
    return recipe.noise.added_to(FcInput.copy_of(batch.features_SF), step=step, generator=generator)


def _spread(value_N: Tensor, index_N: Tensor, batch: PackedBatch) -> Tensor:
    """[A, B]: values of the valid slots in their places, zero elsewhere."""
    flat = value_N.new_zeros(batch.valid_AB.numel())
    flat[index_N] = value_N
    return flat.view(batch.valid_AB.shape)
