"""Where a drafter begins: a config made for a target, fresh weights, or the weights of another drafter.

    TargetModelInfo --new_drafter_config--> DrafterConfig --initialize--> DFlashDrafter
    checkpoint folder --warm_start--> DFlashDrafter

Raises ConfigError where no sensible choice exists. Source: DFlash specification, sections A.4 to A.6.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

from dflash_online.drafter.checkpoint import check_against_target, load_checkpoint
from dflash_online.drafter.config import (
    FC_ALL,
    FULL_ATTENTION,
    SLIDING_ATTENTION,
    DrafterConfig,
    select_layer_ids,
)
from dflash_online.drafter.model import DFlashDrafter
from dflash_online.drafter.tensors import export_tensors
from dflash_online.errors import ConfigError
from dflash_online.target.model_info import TargetModelInfo

_INITIAL_STD = 0.02
# With a tied head a fresh drafter's logits are led by the mask's own embedding. A small final norm takes that
# back. Measured on SmolLM2-135M, 64 anchors a step, same seed: first loss 9.6 nats instead of 25.6, held-out
# tau after 150 steps 1.39 instead of 1.34.
_INITIAL_FINAL_NORM = 0.3
_OWN_HEAD_DIM = 128


def new_drafter_config(
    target: TargetModelInfo,
    *,
    num_layers: int = 5,
    block_size: int = 16,
    num_features: int = 5,
    target_layer_ids: tuple[int, ...] | None = None,
    mask_token_id: int | None = None,
    intermediate_size: int | None = None,
    layer_types: tuple[str, ...] = (),
    sliding_window: int | None = None,
    dtype: str = "bfloat16",
    fc_layers: str = FC_ALL,
) -> DrafterConfig:
    """A drafter that fits a target.

    Heads are the target's where its rotary embedding is plain and its heads are at most 128 wide; otherwise
    heads of 128 that together are as wide as the hidden size, because a drafter must not inherit partial
    rotation, sections (mrope) or heads of 256.

    Args:
        target_layer_ids: instead of `num_features` evenly spread layers.
        mask_token_id: None applies `choose_mask_token_id`.
        intermediate_size: None takes the target's.

    Raises:
        ConfigError: a value is out of bounds, or no mask id can be chosen.
    """
    heads, kv_heads, head_dim = target.num_heads, target.num_kv_heads, target.head_dim
    if not target.has_plain_rotary or head_dim > _OWN_HEAD_DIM:
        head_dim = _OWN_HEAD_DIM
        heads = max(1, target.hidden_size // head_dim)
        kv_heads = max(n for n in range(1, min(8, heads) + 1) if heads % n == 0)
    config = DrafterConfig(
        hidden_size=target.hidden_size,
        intermediate_size=intermediate_size or target.intermediate_size,
        num_layers=num_layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        vocab_size=target.vocab_size,
        num_target_layers=target.num_layers,
        target_layer_ids=target_layer_ids or select_layer_ids(target.num_layers, num_features),
        mask_token_id=choose_mask_token_id(target) if mask_token_id is None else mask_token_id,
        block_size=block_size,
        rms_norm_eps=target.rms_norm_eps,
        rope_theta=target.rope_theta,
        max_position_embeddings=target.context_length,
        layer_types=layer_types,
        sliding_window=sliding_window,
        dtype=dtype,
        fc_layers=fc_layers,
    )
    check_against_target(config, target)
    return config


def choose_mask_token_id(target: TargetModelInfo) -> int:
    """An id whose embedding row can stand for "to be drafted", best one that never occurs in text.

    In this order: the first row beyond the tokenizer's ids (Qwen: 151669 of 151936); the unknown token, which
    a byte-level tokenizer never emits (SmolLM2: 0); the padding token. Beginning and end of text are never
    taken: the drafter must be able to see and to draft them.

    Raises:
        ConfigError: none of these exists; the user must name an id.
    """
    if target.num_tokenizer_ids is not None and target.num_tokenizer_ids < target.vocab_size:
        return target.num_tokenizer_ids
    taken = (*target.bos_token_ids, *target.eos_token_ids)
    for candidate in (target.unk_token_id, target.pad_token_id):
        if candidate is not None and candidate not in taken and candidate < target.vocab_size:
            return candidate
    raise ConfigError("mask_token_id", None, "given: the target has no unused, unknown or padding id to take")


def initialize(config: DrafterConfig, *, seed: int) -> DFlashDrafter:
    """Fresh float32 weights: matrices normal with deviation 0.02, norms one (the final one 0.3), biases zero.

    The same seed gives the same weights on every machine.
    """
    generator = torch.Generator().manual_seed(seed)
    drafter = DFlashDrafter(config)
    with torch.no_grad():
        for module in drafter.modules():
            if isinstance(module, nn.Linear):
                module.weight.normal_(0.0, _INITIAL_STD, generator=generator)
                if module.bias is not None:
                    module.bias.zero_()
        drafter.norm.weight.fill_(_INITIAL_FINAL_NORM)
    return drafter


def warm_start(
    path: Path, *, target: TargetModelInfo | None = None, num_layers: int | None = None
) -> DFlashDrafter:
    """The drafter of a folder, own or published, as float32 masters.

    Args:
        target: when given, the drafter must fit it.
        num_layers: fewer keep the first layers, whose inputs are then unchanged; more append full layers
            that start as the identity. None keeps the drafter's own number.

    Raises:
        CheckpointError: see `load_checkpoint`.
        ConfigError: the drafter does not fit the target.
    """
    checkpoint = load_checkpoint(path)
    if target is not None:
        check_against_target(checkpoint.config, target)
    config, tensors = checkpoint.config, checkpoint.tensors
    if num_layers is None or num_layers == config.num_layers:
        return DFlashDrafter.from_tensors(config, tensors)
    types = (config.layer_types + (FULL_ATTENTION,) * num_layers)[:num_layers]
    window = config.sliding_window if SLIDING_ATTENTION in types else None
    resized = replace(config, num_layers=num_layers, layer_types=types, sliding_window=window)
    fresh = export_tensors(initialize(resized, seed=0), resized)
    for name, tensor in fresh.items():
        if name in tensors:
            tensor.copy_(tensors[name])
        elif ".o_proj." in name or ".down_proj." in name:
            tensor.zero_()
    return DFlashDrafter.from_tensors(resized, fresh)
