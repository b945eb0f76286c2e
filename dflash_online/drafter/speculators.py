"""`config.json` in the layout of vLLM's `speculators` 0.9.0, in terms of the DFlash layout.

    DFlash config.json --to_speculators--> speculators config.json --from_speculators--> DFlash config.json

The tensors are the same, names and all. The config differs: the transformer's fields lie in
`transformer_layer_config`, the hooked layers are counted from the embedding (id 1 is the output of decoder
layer 0), the target is named, and its number of layers is not. Raises UnsupportedCheckpointError,
CheckpointError, ConfigError. Source: DFlash specification, sections A.4, A.5, C.5; speculators 0.9.0,
models/dflash/config.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from dflash_online.drafter.config import SLIDING_ATTENTION, DrafterConfig
from dflash_online.drafter.families import family_of
from dflash_online.drafter.hf_config import ARCHITECTURE, SPECULATORS_TYPE, ConfigFields, config_to_json
from dflash_online.errors import CheckpointError, ConfigError, UnsupportedCheckpointError

VERSION = "0.9.0"

# Copies of the target's tensors: 0.9.0 leaves them out of its files and takes them from the target at load,
# over those that a file has.
BORROWED_TENSORS = frozenset(
    ("embed_tokens.weight", "lm_head.weight", "verifier_lm_head.weight", "verifier_norm.weight")
)

# What the DFlash layout holds beside the transformer's own fields.
_OUTER_FIELDS = frozenset(
    ("architectures", "block_size", "dflash_config", "dtype", "num_target_layers", "rope_theta")
)


class Layout(StrEnum):
    """How a drafter's `config.json` is laid out."""

    ZLAB = "zlab"
    """Published by z-lab; read by SGLang, vLLM, z-lab's `dflash` and everything here."""
    SPECULATORS = "speculators"
    """Written by vLLM's speculators."""


@dataclass(frozen=True, slots=True)
class Verifier:
    """The target as speculators names it: what its loader takes embedding and head from."""

    name_or_path: str | None = None
    architectures: tuple[str, ...] = ()


def layout_of(fields: Mapping[str, Any]) -> Layout:
    """The layout of a `config.json`."""
    return Layout.SPECULATORS if SPECULATORS_TYPE in fields else Layout.ZLAB


def to_speculators(config: DrafterConfig, verifier: Verifier) -> dict[str, Any]:
    """The file's content. `num_target_layers` is ours: that layout has no place for it."""
    zlab = config_to_json(config)
    return {
        "architectures": [ARCHITECTURE],
        "aux_hidden_state_layer_ids": [layer_id + 1 for layer_id in config.target_layer_ids],
        "block_size": config.block_size,
        "draft_vocab_size": config.vocab_size,
        "dtype": config.dtype,
        "mask_token_id": config.mask_token_id,
        "num_target_layers": config.num_target_layers,
        "sample_from_anchor": False,
        "sliding_window_non_causal": False,
        "speculators_config": {
            "algorithm": "dflash",
            "default_proposal_method": "greedy",
            "proposal_methods": [
                {
                    "accept_tolerance": 0.0,
                    "proposal_type": "greedy",
                    "speculative_tokens": config.num_drafts,
                    "verifier_accept_k": 1,
                }
            ],
            "verifier": {
                "architectures": list(verifier.architectures),
                "name_or_path": verifier.name_or_path,
            },
        },
        SPECULATORS_TYPE: "dflash",
        "speculators_version": VERSION,
        "target_hidden_size": None,
        "tie_word_embeddings": False,
        "transformer_layer_config": {
            name: value for name, value in zlab.items() if name not in _OUTER_FIELDS
        },
    }


def from_speculators(
    fields: Mapping[str, Any], *, path: str, num_target_layers: int | None = None
) -> dict[str, Any]:
    """The same drafter's `config.json` in the DFlash layout, for `config_from_json`.

    Args:
        path: named in errors.
        num_target_layers: of the target; needed where the file does not say, as only ours do.

    Raises:
        UnsupportedCheckpointError: another speculator, or a DFlash with what ours does not do.
        CheckpointError: a field is missing or of the wrong type.
        ConfigError: the embedding's output is hooked.
    """
    kind = fields.get(SPECULATORS_TYPE)
    if kind != "dflash":
        raise UnsupportedCheckpointError(
            path, f"{family_of(str(kind)) or 'another speculator'}: {SPECULATORS_TYPE} = {kind}, not dflash"
        )
    outer = ConfigFields(fields, {}, path)
    inner = dict(outer.object("transformer_layer_config"))
    _refuse_variants(outer, inner, path)
    ids = outer.integers("aux_hidden_state_layer_ids")
    if min(ids, default=1) < 1:
        raise ConfigError("aux_hidden_state_layer_ids", list(ids), ">= 1 each (0 is the embedding's output)")
    num_layers = outer.get("num_target_layers")
    if num_layers is None and num_target_layers is None:
        raise CheckpointError(path, "the target's number of layers is not in this layout; name its folder")
    dflash_fields = {
        "block_size": outer.integer("block_size"),
        "mask_token_id": outer.integer("mask_token_id"),
        "num_target_layers": num_target_layers if num_layers is None else outer.integer("num_target_layers"),
        "target_layer_ids": [layer_id - 1 for layer_id in ids],
    }
    dtype = fields.get("dtype") or fields.get("torch_dtype") or inner.get("dtype")
    # Fields that `config_from_json` refuses when they say what DFlash does not do.
    judged = {name: outer.get(name) for name in ("draft_vocab_size", "sample_from_anchor")}
    return inner | judged | {"architectures": [ARCHITECTURE], "dflash_config": dflash_fields, "dtype": dtype}


def verifier_of(fields: Mapping[str, Any], path: str) -> Verifier:
    """The target that a speculators config names.

    Raises:
        CheckpointError: a field is of the wrong type.
    """
    settings = ConfigFields(fields, {}, path).object("speculators_config")
    return verifier_from(ConfigFields(settings, {}, path).object("verifier"), path)


def verifier_from(fields: Mapping[str, Any], path: str) -> Verifier:
    """A target's name out of JSON; `dataclasses.asdict` gives it back.

    Raises:
        CheckpointError: a field is of the wrong type.
    """
    named = ConfigFields(fields, {}, path)
    name = named.get("name_or_path")
    if not isinstance(name, str | None):
        raise CheckpointError(path, f"name_or_path must be a string, got {name!r}")
    return Verifier(name, named.strings("architectures"))


def _refuse_variants(outer: ConfigFields, inner: Mapping[str, Any], path: str) -> None:
    if outer.flag("sliding_window_non_causal") and SLIDING_ATTENTION in (inner.get("layer_types") or ()):
        raise UnsupportedCheckpointError(path, "DFlash with sliding_window_non_causal = True")
    width = outer.get("target_hidden_size")
    if width is not None and width != inner.get("hidden_size"):
        raise UnsupportedCheckpointError(
            path, f"DFlash of hidden_size {inner.get('hidden_size')} for a target of {width}"
        )
