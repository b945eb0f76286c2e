"""Drafters that are not plain DFlash: known by their config or by their tensors, and refused by name.

    config.json, tensor names --> [ refuse_* ] --> UnsupportedCheckpointError, or nothing

Their files look like DFlash's. Loading one as DFlash would leave out a part of its forward pass and give a
drafter that drafts badly and says nothing. Knows no layout: callers say which architectures are their own.
Source: DFlash specification, sections A.5, A.8, F; the tensor names of SGLang 0.5.23 and SpecForge 0.2.0.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from dflash_online.drafter.config import FULL_ATTENTION, SLIDING_ATTENTION
from dflash_online.errors import UnsupportedCheckpointError

_DFLASH2, _DOMINO, _DSPARK, _LAGUNA = "DFlash2", "Domino", "DSpark", "DFlash for Laguna"

# Part of an architecture, model type or projector, and whose it is. First match.
_NAMES = (("dflash2", _DFLASH2), ("domino", _DOMINO), ("dspark", _DSPARK), ("laguna", _LAGUNA))

# Fields that make it another model when they are set, and what that model is called.
_FIELDS = (
    ("conv_kernel_size", f"{_DFLASH2} (grouped convolutions)"),
    ("selector_rank", f"{_DFLASH2} (candidate selector)"),
    ("markov_rank", f"{_DSPARK} (Markov head)"),
    ("gru_hidden_dim", f"{_DOMINO} (recurrent projector)"),
    ("attention_sink_bias", "DFlash with attention sinks (MiMo)"),
    ("final_logit_softcapping", "DFlash with soft-capped logits"),
    ("causal", "DFlash with causal full-attention layers"),
    ("sample_from_anchor", "DFlash that drafts at its anchor too"),
)
_UNIT_FACTORS = (
    "output_multiplier",
    "input_embedding_scale",
    "partial_rotary_factor",
    "attention_value_scale",
)

# Part of a tensor's name, and whose it is.
_TENSORS = (
    ("candidate_selector.", f"{_DFLASH2} (candidate selector)"),
    ("attention_conv.", f"{_DFLASH2} (grouped convolutions)"),
    ("mlp_conv.", f"{_DFLASH2} (grouped convolutions)"),
    ("prefix_gru.", f"{_DOMINO} (recurrent projector)"),
    ("embed_proj.", f"{_DOMINO} (recurrent projector)"),
    ("markov_head.", f"{_DSPARK} (Markov head)"),
    ("confidence_head.", f"{_DSPARK} (confidence head)"),
    ("aux_hidden_norms.", _LAGUNA),
    ("self_attn.g_proj.", _LAGUNA),
    ("self_attn.sinks", "DFlash with attention sinks (MiMo)"),
)


def family_of(name: str) -> str | None:
    """The family that an architecture, model type or projector belongs to; None when it is no known one."""
    lowered = name.lower()
    return next((family for part, family in _NAMES if part in lowered), None)


def refuse_architectures(architectures: Iterable[str], own: str, path: str) -> None:
    """Refuse a config whose `architectures` do not hold our own. None at all is taken for ours."""
    names = list(architectures)
    if names and own not in names:
        families = sorted({family for name in names if (family := family_of(name))})
        is_a = f"{', '.join(families)}: " if families else ""
        raise UnsupportedCheckpointError(path, f"{is_a}architecture {', '.join(names)}, not {own}")


def refuse_fields(fields: Mapping[str, Any], nested: Mapping[str, Any], path: str) -> None:
    """Refuse a config with a field that changes the forward pass.

    Args:
        nested: the fields of `dflash_config`, which go before those of the top level.
    """
    if projector := nested.get("projector_type"):
        family = family_of(str(projector)) or "another family"
        raise UnsupportedCheckpointError(path, f"{family}: projector_type = {projector}")
    for name in _UNIT_FACTORS:
        value = nested.get(name, fields.get(name))
        if value not in (None, 1, 1.0):
            raise UnsupportedCheckpointError(path, f"DFlash with {name} = {value}")
    for name, family in _FIELDS:
        if value := nested.get(name, fields.get(name)):
            raise UnsupportedCheckpointError(path, f"{family}: {name} = {value}")
    reduced, whole = nested.get("draft_vocab_size", fields.get("draft_vocab_size")), fields.get("vocab_size")
    if reduced not in (None, whole):
        raise UnsupportedCheckpointError(
            path, f"DFlash with a reduced vocabulary: draft_vocab_size = {reduced} of {whole}"
        )
    if (activation := fields.get("hidden_act", "silu")) != "silu":
        raise UnsupportedCheckpointError(path, f"DFlash with hidden_act = {activation}, not silu")
    # `is_causal` overrides what the layer types say about blocks, for all layers.
    is_causal, types = fields.get("is_causal"), set(fields.get("layer_types") or (FULL_ATTENTION,))
    if is_causal is not None and types != {SLIDING_ATTENTION if is_causal else FULL_ATTENTION}:
        raise UnsupportedCheckpointError(path, f"is_causal = {is_causal} against layer types {sorted(types)}")


def refuse_tensors(names: Iterable[str], path: str) -> None:
    """Refuse tensors that only another family has, whatever the config says."""
    for name in sorted(names):
        for part, family in _TENSORS:
            if part in name:
                raise UnsupportedCheckpointError(path, f"{family}: tensor {name}")
