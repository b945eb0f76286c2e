"""Rotary position embedding, half-split form, over the whole head.

A drafter never inherits its target's partial rotation or sections: SGLang, vLLM and transformers would
then disagree on the same file. Its own YaRN scaling is honoured. Angles in float32; nothing is kept in the
checkpoint.

Shape letters: T = rows, N = heads, d = head size.
"""

from __future__ import annotations

from dataclasses import asdict
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from dflash_online.drafter.config import YarnScaling


class Rotation(NamedTuple):
    """Cosine and sine of each row's angles."""

    cos_T1d: Tensor  # [T, 1, d] float32
    sin_T1d: Tensor


def rotation_of(
    positions_T: Tensor, head_dim: int, theta: float, yarn: YarnScaling | None = None
) -> Rotation:
    """Angles of absolute positions."""
    if yarn is None:
        exponent = torch.arange(0, head_dim, 2, device=positions_T.device, dtype=torch.float32) / head_dim
        frequency_h, factor = 1.0 / theta**exponent, 1.0
    else:
        frequency_h, factor = _yarn_frequencies(head_dim, theta, yarn)
        frequency_h = frequency_h.to(positions_T.device)
    angle_Th = positions_T[:, None].float() * frequency_h
    angle_T1d = torch.cat([angle_Th, angle_Th], dim=-1)[:, None]
    return Rotation(angle_T1d.cos() * factor, angle_T1d.sin() * factor)


@cache
def _yarn_frequencies(head_dim: int, theta: float, yarn: YarnScaling) -> tuple[Tensor, float]:
    """[d/2] float32 on the CPU, and the factor on cosine and sine: transformers' own."""
    from transformers import Qwen3Config
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    parameters = asdict(yarn) | {"rope_type": "yarn", "rope_theta": theta}
    length = int(yarn.factor * yarn.original_max_position_embeddings)  # else it warns that they disagree
    config = Qwen3Config(head_dim=head_dim, max_position_embeddings=length, rope_parameters=parameters)
    frequency_h, factor = ROPE_INIT_FUNCTIONS["yarn"](config, torch.device("cpu"))
    return frequency_h, float(factor)


def rotate(x_TNd: Tensor, rotation: Rotation) -> Tensor:
    """Rotate queries or keys. Keeps the type of `x_TNd`."""
    first, second = x_TNd.chunk(2, dim=-1)
    turned = torch.cat([-second, first], dim=-1)
    cos_T1d, sin_T1d = rotation.cos_T1d.to(x_TNd.dtype), rotation.sin_T1d.to(x_TNd.dtype)
    return x_TNd * cos_T1d + turned * sin_T1d
