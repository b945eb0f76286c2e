"""Rotary position embedding, half-split form, over the whole head.

A drafter never inherits its target's partial rotation or sections: SGLang, vLLM and transformers would
then disagree on the same file. Angles in float32; nothing is kept in the checkpoint.

Shape letters: T = rows, N = heads, d = head size.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Rotation(NamedTuple):
    """Cosine and sine of each row's angles."""

    cos_T1d: Tensor  # [T, 1, d] float32
    sin_T1d: Tensor


def rotation_of(positions_T: Tensor, head_dim: int, theta: float) -> Rotation:
    """Angles of absolute positions."""
    exponent = torch.arange(0, head_dim, 2, device=positions_T.device, dtype=torch.float32) / head_dim
    angle_Th = positions_T[:, None].float() * (1.0 / theta**exponent)
    angle_T1d = torch.cat([angle_Th, angle_Th], dim=-1)[:, None]
    return Rotation(angle_T1d.cos(), angle_T1d.sin())


def rotate(x_TNd: Tensor, rotation: Rotation) -> Tensor:
    """Rotate queries or keys. Keeps the type of `x_TNd`."""
    first, second = x_TNd.chunk(2, dim=-1)
    turned = torch.cat([-second, first], dim=-1)
    cos_T1d, sin_T1d = rotation.cos_T1d.to(x_TNd.dtype), rotation.sin_T1d.to(x_TNd.dtype)
    return x_TNd * cos_T1d + turned * sin_T1d
