"""Rotary angles against those of transformers' Qwen3, which z-lab's and speculators' drafters use."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from dflash_online.drafter.config import YarnScaling
from dflash_online.drafter.rotary import rotation_of

YARN = YarnScaling(factor=32.0, original_max_position_embeddings=4096, truncate=False)
POSITIONS = torch.arange(0, 131072, 331)


@pytest.mark.parametrize(
    "yarn",
    [
        None,
        YARN,
        dataclasses.replace(YARN, truncate=True, beta_fast=16.0, beta_slow=2.0),
    ],
)
def test_angles_are_those_of_transformers(yarn):
    from transformers import Qwen3Config
    from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

    rope = {"rope_type": "default", "rope_theta": 150000.0}
    if yarn is not None:
        rope |= dataclasses.asdict(yarn) | {"rope_type": "yarn"}
    config = Qwen3Config(head_dim=64, max_position_embeddings=131072, rope_parameters=rope)
    cos, sin = Qwen3RotaryEmbedding(config)(torch.zeros(1), POSITIONS[None])
    ours = rotation_of(POSITIONS, 64, 150000.0, yarn)
    torch.testing.assert_close(ours.cos_T1d[:, 0], cos[0], rtol=0, atol=1e-6)
    torch.testing.assert_close(ours.sin_T1d[:, 0], sin[0], rtol=0, atol=1e-6)


def test_yarn_turns_fast_angles_as_before_and_slow_ones_less():
    plain, stretched = (rotation_of(torch.tensor([7]), 64, 150000.0, yarn) for yarn in (None, YARN))
    factor = YARN.attention_factor
    assert torch.allclose(stretched.sin_T1d[0, 0, 0], plain.sin_T1d[0, 0, 0] * factor)
    torch.testing.assert_close(
        torch.asin(stretched.sin_T1d[0, 0, 31] / factor) * 32, torch.asin(plain.sin_T1d[0, 0, 31])
    )
