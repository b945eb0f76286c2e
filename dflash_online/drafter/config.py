"""What a drafter is: every number that its architecture and its serving need.

    target config.json --init--> DrafterConfig <--checkpoint--> drafter config.json (Hugging Face form)

Knows neither torch nor files. Source: DFlash specification sections A.1 to A.6.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from dflash_online.errors import ConfigError

FULL_ATTENTION, SLIDING_ATTENTION = "full_attention", "sliding_attention"
FC_ALL, FC_ALL_BUT_LAST = "all", "all_but_last"


def select_layer_ids(num_target_layers: int, num_features: int) -> tuple[int, ...]:
    """Evenly spread decoder layers to hook: `round(1 + i*(N-4)/(K-1))`, Python rounding.

    Id i is the output of decoder layer i. One feature: the middle layer.

    Raises:
        ConfigError: the target is too shallow for that many distinct layers.
    """
    if num_features == 1:
        return (num_target_layers // 2,)
    span = num_target_layers - 4
    ids = (
        tuple(round(1 + i * span / (num_features - 1)) for i in range(num_features))
        if num_features > 1
        else ()
    )
    if not ids or len(set(ids)) < num_features or span < 0:
        raise ConfigError(
            "num_features", num_features, f"1 to about {max(span, 1)} for {num_target_layers} layers"
        )
    return ids


@dataclass(frozen=True, kw_only=True, slots=True)
class YarnScaling:
    """Rotary angles stretched for contexts longer than those trained on. Source: YaRN, arXiv:2309.00071."""

    factor: float
    """By which the slow angles are slowed down."""
    original_max_position_embeddings: int
    """Context length before the stretching."""
    beta_fast: float = 32.0
    """Angles that turn more often than this over the original context stay as they are."""
    beta_slow: float = 1.0
    """Angles that turn less often than this are slowed down in full."""
    truncate: bool = True
    """Round the ends of the ramp between the two to whole angles."""

    def __post_init__(self) -> None:
        _require("yarn factor", self.factor, "finite and >= 1", 1 <= self.factor < math.inf)
        original = self.original_max_position_embeddings
        _require("yarn original_max_position_embeddings", original, "at least 1", original >= 1)
        in_order = 0 < self.beta_slow < self.beta_fast < math.inf
        _require("yarn beta_slow, beta_fast", (self.beta_slow, self.beta_fast), "rising and > 0", in_order)

    @property
    def attention_factor(self) -> float:
        """On cosine and sine. A file may state it, and no other: SGLang does not read it."""
        return 0.1 * math.log(self.factor) + 1


@dataclass(frozen=True, kw_only=True, slots=True)
class DrafterConfig:
    """One drafter's architecture. Checked at construction; equal configs load each other's weights."""

    hidden_size: int
    """H: must equal the target's, whose embedding and head are used unchanged."""
    intermediate_size: int
    num_layers: int
    """L: draft layers; independent of the number of features."""
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    """Rows of the target's embedding, padding included."""
    num_target_layers: int
    """N: decoder layers of the target."""
    target_layer_ids: tuple[int, ...]
    """Hooked layers; id i is the output of decoder layer i, before the final norm."""
    mask_token_id: int
    """Vocabulary id whose target embedding fills the slots to draft."""
    block_size: int = 16
    """B: slots per block; slot 0 is the anchor, so B-1 drafts."""
    rms_norm_eps: float = 1e-6
    rope_theta: float = 1e6
    yarn: YarnScaling | None = None
    """None: plain rotary angles, as in all published drafters but those of gpt-oss."""
    max_position_embeddings: int = 40960
    attention_bias: bool = False
    layer_types: tuple[str, ...] = ()
    """`full_attention` or `sliding_attention` per draft layer; empty means all full."""
    sliding_window: int | None = None
    """W: tokens a sliding layer sees, the current one included."""
    dtype: str = "bfloat16"
    """Of the saved weights."""
    fc_layers: str = FC_ALL
    """Hooked layers that `fc` reads: `all`, or `all_but_last`, an old flaw that no server loads."""

    def __post_init__(self) -> None:
        if not self.layer_types:
            object.__setattr__(self, "layer_types", (FULL_ATTENTION,) * self.num_layers)
        for name in (
            "hidden_size",
            "intermediate_size",
            "num_layers",
            "num_heads",
            "num_kv_heads",
            "vocab_size",
        ):
            _require(name, getattr(self, name), "at least 1", getattr(self, name) >= 1)
        _require(
            "head_dim", self.head_dim, "even and at least 2", self.head_dim >= 2 and self.head_dim % 2 == 0
        )
        divides = self.num_heads % self.num_kv_heads == 0
        _require("num_kv_heads", self.num_kv_heads, f"a divisor of num_heads {self.num_heads}", divides)
        _require("block_size", self.block_size, ">= 2 (anchor, one draft)", self.block_size >= 2)
        _require("rms_norm_eps", self.rms_norm_eps, "finite and > 0", 0 < self.rms_norm_eps < math.inf)
        finite_theta = math.isfinite(self.rope_theta) and self.rope_theta > 0
        _require("rope_theta", self.rope_theta, "finite and > 0", finite_theta)
        in_vocab = 0 <= self.mask_token_id < self.vocab_size
        _require(
            "mask_token_id", self.mask_token_id, f"in 0..{self.vocab_size - 1} (target vocabulary)", in_vocab
        )
        self._check_layers()

    def _check_layers(self) -> None:
        ids, last = self.target_layer_ids, self.num_target_layers - 1
        distinct = len(ids) >= 1 and len(set(ids)) == len(ids)
        _require("target_layer_ids", ids, "distinct and not empty", distinct)
        # The last layer is no safe choice: some models cannot be tapped behind it, others tap after the norm.
        within = all(0 <= i < last for i in ids)
        _require("target_layer_ids", ids, f"in 0..{last - 1} (the target has {last + 1} layers)", within)
        known = len(self.layer_types) == self.num_layers and set(self.layer_types) <= {
            FULL_ATTENTION,
            SLIDING_ATTENTION,
        }
        _require(
            "layer_types", self.layer_types, f"{self.num_layers} of full_attention, sliding_attention", known
        )
        fc_known = self.fc_layers in (FC_ALL, FC_ALL_BUT_LAST)
        _require("fc_layers", self.fc_layers, f"{FC_ALL} or {FC_ALL_BUT_LAST}", fc_known)
        # The deepest layer must be the last columns of a feature row, or another one would be left out.
        has_rest = self.fc_layers == FC_ALL or (len(ids) > 1 and list(ids) == sorted(ids))
        _require("target_layer_ids", ids, f"two or more, rising, with fc_layers {FC_ALL_BUT_LAST}", has_rest)
        needs_window = SLIDING_ATTENTION in self.layer_types
        has_window = not needs_window or (self.sliding_window is not None and self.sliding_window >= 1)
        _require("sliding_window", self.sliding_window, ">= 1 with sliding layers", has_window)

    @property
    def feature_width(self) -> int:
        """K*H: values per feature row."""
        return len(self.target_layer_ids) * self.hidden_size

    @property
    def fc_width(self) -> int:
        """Leading values of a feature row that `fc` reads."""
        unread = self.hidden_size if self.fc_layers == FC_ALL_BUT_LAST else 0
        return self.feature_width - unread

    @property
    def deepest_layer_columns(self) -> slice:
        """Where a feature row holds the deepest hooked layer, from which a verifier's labels are made."""
        index = self.target_layer_ids.index(max(self.target_layer_ids))
        return slice(index * self.hidden_size, (index + 1) * self.hidden_size)

    @property
    def num_drafts(self) -> int:
        """D = B-1: tokens drafted per block."""
        return self.block_size - 1


def _require(field: str, value: object, bound: str, holds: bool) -> None:
    if not holds:
        raise ConfigError(field, value, bound)
