"""Tiny drafters, heads and records for the unit tests. Everything is seeded and runs in milliseconds.

Sizes are chosen so that no two of them are equal: a swapped axis fails with a shape error.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from dflash_online.drafter.config import DrafterConfig
from dflash_online.drafter.init import initialize
from dflash_online.drafter.model import DFlashDrafter
from dflash_online.target.frozen import FrozenHead
from dflash_online.wire.record import Record, RecordHeader, RecordSource, TargetIdentity

HIDDEN, VOCAB = 24, 37
TARGET = TargetIdentity(path="tiny", revision="", weight_checksum="00")


def tiny_config(**changes: object) -> DrafterConfig:
    """Two layers, block of 4, two features of a 9-layer target."""
    config = DrafterConfig(
        hidden_size=HIDDEN,
        intermediate_size=40,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=10,
        vocab_size=VOCAB,
        num_target_layers=9,
        target_layer_ids=(1, 5),
        mask_token_id=36,
        block_size=4,
        rope_theta=1e4,
        max_position_embeddings=128,
        dtype="float32",
    )
    return dataclasses.replace(config, **changes)


def sliding_config(window: int) -> DrafterConfig:
    """A sliding layer, then a full one."""
    return tiny_config(layer_types=("sliding_attention", "full_attention"), sliding_window=window)


def tiny_drafter(config: DrafterConfig | None = None, seed: int = 0) -> DFlashDrafter:
    """Fresh weights, large enough that every part of the network matters."""
    drafter = initialize(config or tiny_config(), seed=seed)
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter.mul_(8.0 if parameter.ndim > 1 else 1.0)
        drafter.norm.weight.fill_(1.0)
    return drafter


def tiny_head(seed: int = 1, dtype: torch.dtype = torch.float32) -> FrozenHead:
    """An embedding and an untied head."""
    generator = torch.Generator().manual_seed(seed)
    embedding_VH = torch.randn(VOCAB, HIDDEN, generator=generator)
    head_VH = torch.randn(VOCAB, HIDDEN, generator=generator)
    return FrozenHead(embedding_VH.to(dtype), head_VH.to(dtype), torch.ones(HIDDEN, dtype=dtype), 1e-6)


def tiny_record(
    num_tokens: int,
    spans: tuple[tuple[int, int], ...],
    *,
    seed: int = 0,
    width: int = 2 * HIDDEN,
    record_id: str = "r",
    token_ids: tuple[int, ...] | None = None,
) -> Record:
    """Random tokens and features with these supervised spans."""
    generator = torch.Generator().manual_seed(seed)
    random_ids = torch.randint(VOCAB - 1, (num_tokens,), generator=generator).tolist()
    header = RecordHeader(
        record_id=record_id,
        source=RecordSource.PROMPT,
        cursor=0,
        target=TARGET,
        drafter_version="none",
        layer_ids=(1, 5),
        dtype="bfloat16",
        num_rows=num_tokens - 1,
        row_width=width,
        token_ids=token_ids or tuple(random_ids),
        prompt_length=spans[0][0] if spans and spans[0][0] else 1,
        loss_spans=spans,
        finish_reason="stop",
    )
    return Record(header, torch.randn(num_tokens - 1, width, generator=generator).bfloat16())


def write_target_folder(path: Path, tensors: dict[str, torch.Tensor], **changes: object) -> Path:
    """A target folder with the sizes of this file; `changes` overrides fields of config.json."""
    fields = {
        "hidden_size": HIDDEN,
        "intermediate_size": 40,
        "vocab_size": VOCAB,
        "num_hidden_layers": 9,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 10,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e4,
        "max_position_embeddings": 128,
        "tie_word_embeddings": False,
    } | changes
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(fields))
    save_file(tensors, path / "model.safetensors")
    return path
