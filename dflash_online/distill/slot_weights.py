"""How much each slot of a block counts.

    recipe, validity, what the drafter made of the labels --slot_weights--> [A, B]

A miss voids everything behind it, so early slots count more. All weights are constants to autograd.
Source: DFlash specification, sections C.4 and C.5. No formula of the streak-aware weights is published; ours
says what the name says: behind the first miss of a block a slot counts half, since no round gets there.

Shape letters: A = anchors, B = slots of a block, D = B-1 drafts.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dflash_online.distill.recipe import DPACE, STREAK, Recipe

_BROKEN_STREAK_SHARE = 0.5


def slot_weights(recipe: Recipe, valid_AB: Tensor, is_correct_AB: Tensor, probability_AB: Tensor) -> Tensor:
    """[A, B] float32, 0 on every slot that teaches nothing.

    Args:
        valid_AB: bool, as in a packed batch; the anchor is never valid.
        is_correct_AB: bool, the drafter's best token is the label.
        probability_AB: the drafter's probability of the label. Both are read at valid slots only.
    """
    if recipe.weighting == DPACE:
        return _dpace(recipe.dpace_alpha, valid_AB, probability_AB)
    slot_B = torch.arange(valid_AB.shape[1], dtype=torch.float32, device=valid_AB.device)
    decay_B = torch.exp((1 - slot_B) / recipe.gamma_for(valid_AB.shape[1]))
    weight_AB = decay_B * valid_AB
    if recipe.weighting == STREAK:
        misses_AB = (valid_AB & ~is_correct_AB).cumsum(dim=1)
        # The slot of the first miss itself is still reached.
        is_broken_AB = torch.zeros_like(valid_AB)
        is_broken_AB[:, 1:] = misses_AB[:, :-1] > 0
        weight_AB = torch.where(is_broken_AB, _BROKEN_STREAK_SHARE * weight_AB, weight_AB)
    return weight_AB


def _dpace(alpha: float, valid_AB: Tensor, probability_AB: Tensor) -> Tensor:
    """`w_k = sum over m >= k of prod over i <= m of s_i`, where `s_i = (1-alpha) q_i + alpha`.

    An invalid slot is a factor of 1 and no term of the sum.
    """
    factor_AB = torch.where(valid_AB, (1 - alpha) * probability_AB + alpha, 1.0)
    reach_AB = factor_AB.cumprod(dim=1) * valid_AB
    return reach_AB.flip(1).cumsum(dim=1).flip(1) * valid_AB
