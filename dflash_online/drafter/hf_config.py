"""`config.json` of a drafter: SGLang, vLLM and z-lab's `dflash` load ours, and we read all published layouts.

    DrafterConfig --config_to_json--> config.json --config_from_json--> DrafterConfig

Anything that would change the forward pass and that this drafter does not do is refused by name
(`drafter.families`). Raises UnsupportedCheckpointError for those, CheckpointError for missing or malformed
fields, ConfigError for values out of bounds. Source: DFlash specification, sections A.3 to A.6, F.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from dflash_online.drafter.config import (
    FC_ALL,
    SLIDING_ATTENTION,
    DrafterConfig,
    YarnScaling,
    select_layer_ids,
)
from dflash_online.drafter.families import family_of, refuse_architectures, refuse_fields
from dflash_online.errors import CheckpointError, UnsupportedCheckpointError

ARCHITECTURE = "DFlashDraftModel"
SPECULATORS_TYPE = "speculators_model_type"

# Of DeepSeek's kind of YaRN, which no DFlash drafter has.
_OTHER_YARN = ("mscale", "mscale_all_dim")


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
        "rope_parameters": _rope_parameters(config),
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
    _refuse_speculators(fields, path)
    nested = ConfigFields(fields, {}, path).object("dflash_config")
    layout = ConfigFields(fields, nested, path)
    refuse_architectures(layout.strings("architectures"), ARCHITECTURE, path)
    layer_types = layout.strings("layer_types")
    refuse_fields(fields, nested, path)
    hidden, heads, layers = (
        layout.integer(name) for name in ("hidden_size", "num_attention_heads", "num_hidden_layers")
    )
    if SLIDING_ATTENTION in layer_types and not layout.flag("use_sliding_window"):
        raise UnsupportedCheckpointError(
            path, "sliding layers without use_sliding_window: readers disagree on them"
        )
    rope = _rope_fields(layout, path)
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
        rope_theta=rope.number("rope_theta"),
        yarn=_yarn(rope, path),
        max_position_embeddings=layout.integer("max_position_embeddings", default=40960),
        attention_bias=layout.flag("attention_bias"),
        layer_types=layer_types,
        sliding_window=layout.integer("sliding_window") if SLIDING_ATTENTION in layer_types else None,
        dtype=str(fields.get("dtype") or fields.get("torch_dtype") or "bfloat16").removeprefix("torch."),
        fc_layers=str(nested.get("fc_layers", FC_ALL)),
    )


class ConfigFields:
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
        if not isinstance(value, list) or not all(type(i) is int for i in value):
            raise CheckpointError(self._path, f"{name} must be a list of integers, got {value!r}")
        return tuple(value)

    def strings(self, name: str) -> tuple[str, ...]:
        """Empty when the field is missing."""
        value = self.get(name) or []
        if not isinstance(value, list) or not all(isinstance(i, str) for i in value):
            raise CheckpointError(self._path, f"{name} must be a list of strings, got {value!r}")
        return tuple(value)

    def flag(self, name: str) -> bool:
        """False when the field is missing."""
        value = self.get(name)
        if not isinstance(value, bool | None):
            raise CheckpointError(self._path, f"{name} must be true or false, got {value!r}")
        return bool(value)

    def object(self, name: str) -> Mapping[str, Any]:
        """Empty when the field is missing."""
        value = self.get(name) or {}
        if not isinstance(value, dict):
            raise CheckpointError(self._path, f"{name} must be an object, got {value!r}")
        return value


def _rope_parameters(config: DrafterConfig) -> dict[str, Any]:
    if config.yarn is None:
        return {"rope_theta": config.rope_theta, "rope_type": "default"}
    return asdict(config.yarn) | {"rope_theta": config.rope_theta, "rope_type": "yarn"}


def _rope_fields(layout: ConfigFields, path: str) -> ConfigFields:
    """The rotary settings in one place: newer files nest them all, older ones leave `rope_theta` outside."""
    rope = {"rope_theta": layout.get("rope_theta")}
    rope |= layout.object("rope_parameters") or layout.object("rope_scaling")
    kind = rope.get("rope_type", rope.get("type", "default"))
    is_partial = rope.get("partial_rotary_factor", 1.0) != 1.0
    if (
        kind not in ("default", "yarn")
        or is_partial
        or any(rope.get(name) is not None for name in _OTHER_YARN)
    ):
        raise UnsupportedCheckpointError(path, f"DFlash with rotary settings {rope}")
    return ConfigFields(rope | {"rope_type": kind}, {}, path)


def _yarn(rope: ConfigFields, path: str) -> YarnScaling | None:
    if rope.get("rope_type") != "yarn":
        return None
    yarn = YarnScaling(
        factor=rope.number("factor"),
        original_max_position_embeddings=rope.integer("original_max_position_embeddings"),
        beta_fast=rope.number("beta_fast", default=32.0),
        beta_slow=rope.number("beta_slow", default=1.0),
        truncate=rope.get("truncate") is None or rope.flag("truncate"),
    )
    stated = rope.number("attention_factor", default=yarn.attention_factor)
    if not math.isclose(stated, yarn.attention_factor, rel_tol=1e-6):
        raise UnsupportedCheckpointError(path, f"DFlash with a YaRN attention_factor of {stated}")
    return yarn


def _refuse_speculators(fields: Mapping[str, Any], path: str) -> None:
    kind = fields.get(SPECULATORS_TYPE)
    if kind is not None:
        family = family_of(str(kind))
        raise UnsupportedCheckpointError(
            path,
            f"{family}: {SPECULATORS_TYPE} = {kind}"
            if family
            else "the speculators layout; convert it first: "
            f"dflash-online drafter convert {path} FOLDER --to zlab",
        )
