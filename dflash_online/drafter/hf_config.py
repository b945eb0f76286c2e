"""`config.json` of a drafter: SGLang, vLLM and z-lab's `dflash` load ours, and we read all published layouts.

    DrafterConfig --config_to_json--> config.json --config_from_json--> DrafterConfig

Anything that would change the forward pass and that this drafter does not do is refused by name: loading
it anyway would give a drafter that drafts badly and says nothing. Raises UnsupportedCheckpointError for
those, CheckpointError for missing or malformed fields, ConfigError for values out of bounds.
Source: DFlash specification, sections A.3 to A.6, A.8, F.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dflash_online.drafter.config import (
    FC_ALL,
    FULL_ATTENTION,
    SLIDING_ATTENTION,
    DrafterConfig,
    select_layer_ids,
)
from dflash_online.errors import CheckpointError, UnsupportedCheckpointError

ARCHITECTURE = "DFlashDraftModel"

# Fields that make it another model when they are set, and what that model is called.
_OTHER_FAMILIES = (
    ("conv_kernel_size", "DFlash2 (grouped convolutions)"),
    ("selector_rank", "DFlash2 (candidate selector)"),
    ("markov_rank", "DSpark (Markov head)"),
    ("gru_hidden_dim", "Domino (recurrent projector)"),
    ("attention_sink_bias", "DFlash with attention sinks (MiMo)"),
    ("final_logit_softcapping", "DFlash with soft-capped logits"),
    ("causal", "DFlash with causal full-attention layers"),
    ("draft_vocab_size", "DFlash with a reduced vocabulary"),
)
_UNIT_FACTORS = (
    "output_multiplier",
    "input_embedding_scale",
    "partial_rotary_factor",
    "attention_value_scale",
)


def config_to_json(config: DrafterConfig) -> dict[str, Any]:
    """The file's content, in both places and spellings that its readers look for."""
    dflash_fields: dict[str, Any] = {
        "block_size": config.block_size,
        "mask_token_id": config.mask_token_id,
        "num_target_layers": config.num_target_layers,
        "target_layer_ids": list(config.target_layer_ids),
    }
    if config.fc_layers != FC_ALL:
        # Ours alone: no other reader knows the field, and servable checkpoints do not have it.
        dflash_fields["fc_layers"] = config.fc_layers
    is_sliding = SLIDING_ATTENTION in config.layer_types
    return {
        "architectures": [ARCHITECTURE],
        "model_type": "qwen3",
        "attention_bias": config.attention_bias,
        "attention_dropout": 0.0,
        "block_size": config.block_size,
        "dflash_config": dflash_fields,
        "dtype": config.dtype,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "hidden_size": config.hidden_size,
        "initializer_range": 0.02,
        "intermediate_size": config.intermediate_size,
        "layer_types": list(config.layer_types),
        "max_position_embeddings": config.max_position_embeddings,
        "max_window_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_hidden_layers": config.num_layers,
        "num_key_value_heads": config.num_kv_heads,
        "num_target_layers": config.num_target_layers,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_parameters": {"rope_theta": config.rope_theta, "rope_type": "default"},
        "rope_theta": config.rope_theta,
        # Qwen3's config class drops the window unless `use_sliding_window` says so.
        "sliding_window": config.sliding_window if is_sliding else None,
        "tie_word_embeddings": False,
        "use_sliding_window": is_sliding,
        "vocab_size": config.vocab_size,
    }


def config_from_json(
    fields: Mapping[str, Any], *, path: str = "config.json", num_features: int | None = None
) -> DrafterConfig:
    """Read a published or own `config.json`, older and newer layouts.

    Args:
        path: named in errors.
        num_features: K by the shape of `fc.weight`. Stands in for `target_layer_ids` where an old file lacks
            them; readers that guess K from the number of draft layers guess wrong for most such files.

    Raises:
        UnsupportedCheckpointError: a drafter of another family, or with a feature that is not implemented.
        CheckpointError: a field is missing or of the wrong type.
        ConfigError: a value is out of bounds.
    """
    nested = fields.get("dflash_config") or {}
    if not isinstance(nested, dict):
        raise CheckpointError(path, f"dflash_config must be an object, got {nested!r}")
    _refuse_other_families(fields, nested, path)
    layout = _Layout(fields, nested, path)
    hidden, heads, layers = (
        layout.integer(name) for name in ("hidden_size", "num_attention_heads", "num_hidden_layers")
    )
    layer_types = _layer_types(fields, layers, path)
    num_target_layers = layout.integer("num_target_layers")
    if layout.get("target_layer_ids") is None and num_features is not None:
        target_layer_ids = select_layer_ids(num_target_layers, num_features)
    else:
        target_layer_ids = layout.integers("target_layer_ids")
    return DrafterConfig(
        hidden_size=hidden,
        intermediate_size=layout.integer("intermediate_size"),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=layout.integer("num_key_value_heads", default=heads),
        head_dim=layout.integer("head_dim", default=hidden // max(heads, 1)),
        vocab_size=layout.integer("vocab_size"),
        num_target_layers=num_target_layers,
        target_layer_ids=target_layer_ids,
        mask_token_id=layout.integer("mask_token_id"),
        block_size=layout.integer("block_size", default=16),
        rms_norm_eps=layout.number("rms_norm_eps", default=1e-6),
        rope_theta=_rope_theta(layout, path),
        max_position_embeddings=layout.integer("max_position_embeddings", default=40960),
        attention_bias=bool(fields.get("attention_bias", False)),
        layer_types=layer_types,
        sliding_window=layout.integer("sliding_window") if SLIDING_ATTENTION in layer_types else None,
        dtype=str(fields.get("dtype") or fields.get("torch_dtype") or "bfloat16").removeprefix("torch."),
        fc_layers=str(nested.get("fc_layers", FC_ALL)),
    )


class _Layout:
    """Looks a field up where published files put it: `dflash_config` first, then the top level."""

    def __init__(self, fields: Mapping[str, Any], nested: Mapping[str, Any], path: str) -> None:
        self._fields, self._nested, self._path = fields, nested, path

    def get(self, name: str) -> Any:
        value = self._nested.get(name)
        return self._fields.get(name) if value is None else value

    def integer(self, name: str, *, default: int | None = None) -> int:
        value = self.get(name)
        value = default if value is None else value
        if not isinstance(value, int) or isinstance(value, bool):
            raise CheckpointError(self._path, f"{name} must be an integer, got {value!r}")
        return value

    def number(self, name: str, *, default: float | None = None) -> float:
        value = self.get(name)
        value = default if value is None else value
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise CheckpointError(self._path, f"{name} must be a number, got {value!r}")
        return float(value)

    def integers(self, name: str) -> tuple[int, ...]:
        value = self.get(name)
        if not isinstance(value, list) or not all(isinstance(i, int) for i in value):
            raise CheckpointError(self._path, f"{name} must be a list of integers, got {value!r}")
        return tuple(value)


def _rope_theta(layout: _Layout, path: str) -> float:
    rope = layout.get("rope_parameters") or {}
    scaling = layout.get("rope_scaling") or {}
    kind = rope.get("rope_type", scaling.get("rope_type", scaling.get("type", "default")))
    if kind != "default" or rope.get("partial_rotary_factor", 1.0) != 1.0:
        raise UnsupportedCheckpointError(path, f"DFlash with rotary settings {dict(rope or scaling)}")
    theta = rope.get("rope_theta")
    return layout.number("rope_theta") if theta is None else float(theta)


def _layer_types(fields: Mapping[str, Any], num_layers: int, path: str) -> tuple[str, ...]:
    types = tuple(fields.get("layer_types") or (FULL_ATTENTION,) * num_layers)
    if SLIDING_ATTENTION in types and not fields.get("use_sliding_window"):
        raise UnsupportedCheckpointError(
            path, "sliding layers without use_sliding_window: readers disagree on them"
        )
    return types


def _refuse_other_families(fields: Mapping[str, Any], nested: Mapping[str, Any], path: str) -> None:
    if "speculators_model_type" in fields:
        raise UnsupportedCheckpointError(
            path, "the speculators layout; convert it to the DFlash layout first"
        )
    architectures = fields.get("architectures") or [ARCHITECTURE]
    if ARCHITECTURE not in architectures:
        raise UnsupportedCheckpointError(path, f"{', '.join(map(str, architectures))}, not {ARCHITECTURE}")
    if nested.get("projector_type"):
        raise UnsupportedCheckpointError(path, f"projector {nested['projector_type']} (Domino)")
    for name in _UNIT_FACTORS:
        value = nested.get(name, fields.get(name))
        if value not in (None, 1, 1.0):
            raise UnsupportedCheckpointError(path, f"DFlash with {name} = {value}")
    for name, family in _OTHER_FAMILIES:
        value = nested.get(name, fields.get(name))
        is_plain = name == "draft_vocab_size" and value == fields.get("vocab_size")
        if value and not is_plain:
            raise UnsupportedCheckpointError(path, f"{family}: {name} = {value}")
    # `is_causal` overrides what the layer types say about blocks, for all layers.
    is_causal, types = fields.get("is_causal"), set(fields.get("layer_types") or (FULL_ATTENTION,))
    if is_causal is not None and types != {SLIDING_ATTENTION if is_causal else FULL_ATTENTION}:
        raise UnsupportedCheckpointError(path, f"is_causal = {is_causal} against layer types {sorted(types)}")
