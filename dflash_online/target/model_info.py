"""What a drafter must know of its target, read from the folder's small files.

    config.json, tokenizer files --> [ TargetModelInfo ] --> drafter.init, checkpoint checks

Loads no weights. A nested `text_config` (vision-language targets) is understood. Raises ConfigError that
names the folder's field. Knows nothing of drafters.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflash_online.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class TargetModelInfo:
    """Sizes and special ids of a target."""

    hidden_size: int
    intermediate_size: int
    vocab_size: int
    """Rows of the embedding, padded rows included."""
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    has_plain_rotary: bool
    """False with partial rotation or sections (mrope): a drafter then takes its own head size."""
    tie_word_embeddings: bool | None
    """None when the config does not say: then tied exactly if no head is stored."""
    context_length: int
    dtype: str
    num_tokenizer_ids: int | None = None
    """Ids below this one mean something to the tokenizer; None when the folder has no tokenizer.json."""
    unk_token_id: int | None = None
    pad_token_id: int | None = None
    bos_token_ids: tuple[int, ...] = ()
    eos_token_ids: tuple[int, ...] = ()

    @classmethod
    def from_folder(cls, path: Path) -> TargetModelInfo:
        """Read a Hugging Face folder.

        Raises:
            ConfigError: no readable `config.json`, or one of the sizes is missing or no number.
        """
        outer = _read_json(path / "config.json", required=True)
        text = outer.get("text_config") or outer
        hidden, heads = _integer(text, "hidden_size"), _integer(text, "num_attention_heads")
        rope = _rope_parameters(text)
        tokenizer = _read_json(path / "tokenizer.json")
        ids_of = _token_ids(tokenizer)
        names = _read_json(path / "tokenizer_config.json")
        return cls(
            hidden_size=hidden,
            intermediate_size=_integer(text, "intermediate_size", default=4 * hidden),
            vocab_size=_integer(text, "vocab_size"),
            num_layers=_integer(text, "num_hidden_layers"),
            num_heads=heads,
            num_kv_heads=_integer(text, "num_key_value_heads", default=heads),
            head_dim=_integer(text, "head_dim", default=hidden // heads),
            rms_norm_eps=_number(text, "rms_norm_eps", default=1e-6),
            rope_theta=_number(rope, "rope_theta", default=_number(text, "rope_theta", default=1e4)),
            has_plain_rotary=_is_plain_rotary(text, rope),
            tie_word_embeddings=outer.get("tie_word_embeddings", text.get("tie_word_embeddings")),
            context_length=_integer(text, "max_position_embeddings", default=4096),
            dtype=str(text.get("dtype") or text.get("torch_dtype") or outer.get("dtype") or "bfloat16"),
            num_tokenizer_ids=max(ids_of.values()) + 1 if ids_of else None,
            unk_token_id=_special_id("unk", text, names, ids_of),
            pad_token_id=_special_id("pad", text, names, ids_of),
            bos_token_ids=_ids(text.get("bos_token_id", outer.get("bos_token_id"))),
            eos_token_ids=_ids(text.get("eos_token_id", outer.get("eos_token_id"))),
        )


def read_architectures(path: Path) -> tuple[str, ...]:
    """Class names that a Hugging Face folder gives for its model; empty when it gives none.

    Raises:
        ConfigError: no readable `config.json`.
    """
    names = _read_json(path / "config.json", required=True).get("architectures")
    return tuple(map(str, names)) if isinstance(names, list) else ()


def _read_json(path: Path, *, required: bool = False) -> dict[str, Any]:
    if not required and not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as exc:
        raise ConfigError("target", str(path), f"a readable JSON file ({exc})") from exc
    if not isinstance(value, dict):
        raise ConfigError("target", str(path), "a JSON object")
    return value


def _integer(fields: Mapping[str, Any], name: str, *, default: int | None = None) -> int:
    value = fields.get(name)
    if value is None:
        value = default
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConfigError(f"target config.json {name}", value, "an integer >= 1")
    return value


def _number(fields: Mapping[str, Any], name: str, *, default: float) -> float:
    value = fields.get(name)
    if value is None:
        return default
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise ConfigError(f"target config.json {name}", value, "a number")
    return float(value)


def _rope_parameters(text: Mapping[str, Any]) -> Mapping[str, Any]:
    """The rotary settings of full attention; newer files nest them, some once per layer type."""
    rope = text.get("rope_parameters") or {}
    nested = rope.get("full_attention")
    return nested if isinstance(nested, dict) else rope


def _is_plain_rotary(text: Mapping[str, Any], rope: Mapping[str, Any]) -> bool:
    scaling = text.get("rope_scaling") or {}
    partial = rope.get("partial_rotary_factor", text.get("partial_rotary_factor", 1.0))
    return partial in (None, 1, 1.0) and "mrope_section" not in rope and "mrope_section" not in scaling


def _token_ids(tokenizer: Mapping[str, Any]) -> dict[str, int]:
    """Token to id, of vocabulary and added tokens."""
    vocabulary = tokenizer.get("model", {}).get("vocab", {})
    if isinstance(vocabulary, list):  # unigram models list [token, score] pairs by id
        ids = {str(entry[0]): index for index, entry in enumerate(vocabulary)}
    else:
        ids = dict(vocabulary)
    ids.update({token["content"]: token["id"] for token in tokenizer.get("added_tokens", ())})
    return ids


def _special_id(
    kind: str, text: Mapping[str, Any], names: Mapping[str, Any], ids_of: Mapping[str, int]
) -> int | None:
    """Id of the unknown or padding token: config.json first, then the tokenizer's own name for it."""
    value = text.get(f"{kind}_token_id")
    if isinstance(value, int):
        return value
    token = names.get(f"{kind}_token")
    content = token.get("content") if isinstance(token, dict) else token
    return ids_of.get(content) if isinstance(content, str) else None


def _ids(value: object) -> tuple[int, ...]:
    if isinstance(value, int):
        return (value,)
    return tuple(int(i) for i in value) if isinstance(value, list) else ()
