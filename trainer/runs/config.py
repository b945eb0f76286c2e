"""The run config: every number of one run, with default, unit and bound.

    POST /train/start body --parse--> RunConfig --JSON--> store --> feed, worker, rollout

Parsed strictly: an unknown field, a value of another type or out of bounds stops the start with field,
value and bound. Pydantic reads the JSON into the plain dataclasses below; docs/run-config.md lists them.
Knows neither store nor network: what depends on the target is resolved in `trainer.runs.resolve`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from pydantic import ConfigDict, SecretStr, TypeAdapter, ValidationError

from dflash_online.errors import ConfigError

_STRICT = ConfigDict(extra="forbid", strict=True)
_FROM_SCRATCH_LR, _WARM_START_LR = 6e-4, 6e-5


def _require(name: str, value: object, bound: str, holds: bool) -> None:
    if not holds:
        raise ConfigError(name, value, bound)


def _require_at_least(prefix: str, owner: object, bounds: Mapping[str, float]) -> None:
    """Each named number of `owner`, when given, is finite and not below its bound."""
    for name, low in bounds.items():
        value = getattr(owner, name)
        holds = value is None or (math.isfinite(value) and value >= low)
        _require(prefix + name, value, f"at least {low:g}", holds)


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingConfig:
    """How the target answers captured prompts. Should equal the settings of serving."""

    __pydantic_config__: ClassVar[ConfigDict] = _STRICT
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = -1
    """-1: all tokens."""
    max_new_tokens: int = 96

    def __post_init__(self) -> None:
        _require_at_least("sampling.", self, {"temperature": 0, "max_new_tokens": 1})
        _require("sampling.top_p", self.top_p, "above 0 and at most 1", 0 < self.top_p <= 1)
        _require("sampling.top_k", self.top_k, "-1 (all) or at least 1", self.top_k == -1 or self.top_k >= 1)

    def as_params(self) -> dict[str, float | int | bool]:
        """SGLang's `sampling_params`."""
        params: dict[str, float | int | bool] = {
            "temperature": self.temperature,
            "max_new_tokens": self.max_new_tokens,
        }
        if self.temperature > 0:
            params |= {"top_p": self.top_p, "top_k": self.top_k}
        return params


@dataclass(frozen=True, kw_only=True, slots=True)
class DrafterSpec:
    """A fresh drafter. Ignored, save for a check, when `warm_start` names a checkpoint."""

    __pydantic_config__: ClassVar[ConfigDict] = _STRICT
    num_layers: int = 2
    block_size: int | None = None
    """None: as the drafter that the target serves now, else 16."""
    layer_ids: tuple[int, ...] | None = None
    """None: those that the target hooks. Given: must equal them."""
    mask_token_id: int | None = None
    """None: as the drafter that the target serves now, else chosen for the target."""
    intermediate_size: int | None = None
    """None: the target's."""

    def __post_init__(self) -> None:
        lows = {"num_layers": 1, "block_size": 2, "mask_token_id": 0, "intermediate_size": 1}
        _require_at_least("drafter.", self, lows)


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimizerConfig:
    """AdamW on float32 master weights; warm-up, then constant, then decay on demand."""

    __pydantic_config__: ClassVar[ConfigDict] = _STRICT
    lr: float | None = None
    """Peak learning rate. None: 6e-4 from scratch, 6e-5 from a warm start."""
    warmup_steps: int = 50
    decay_steps: int = 0
    """Last steps before `max_steps` in which the rate falls linearly to a tenth; 0: none."""
    beta1: float = 0.9
    beta2: float = 0.95
    weight_decay: float = 0.01
    clip: float = 1.0
    """Bound of the gradient's global norm."""

    def __post_init__(self) -> None:
        lows = {"warmup_steps": 0, "decay_steps": 0, "weight_decay": 0}
        _require_at_least("optimizer.", self, lows)
        _require("optimizer.lr", self.lr, "above 0 and finite", self.lr is None or 0 < self.lr < math.inf)
        _require("optimizer.clip", self.clip, "above 0", self.clip > 0)
        for name in ("beta1", "beta2"):
            _require(f"optimizer.{name}", getattr(self, name), "in [0, 1)", 0 <= getattr(self, name) < 1)


@dataclass(frozen=True, kw_only=True, slots=True)
class GateConfig:
    """Held-out check before a publish: new and old drafter on the same records."""

    __pydantic_config__: ClassVar[ConfigDict] = _STRICT
    enabled: bool = True
    min_gain: float = -0.02
    """Relative gain of held-out tau that a new version must show; negative allows a small loss."""
    min_records: int = 4
    """A publish waits for that many held-out records (or for all, when fewer are held out)."""

    def __post_init__(self) -> None:
        _require("gate.min_gain", self.min_gain, "above -1 and finite", -1 < self.min_gain < math.inf)
        _require_at_least("gate.", self, {"min_records": 1})


@dataclass(frozen=True, kw_only=True, slots=True)
class GuardConfig:
    """Live check after a publish: a version that drafts worse than the one before is rolled back."""

    __pydantic_config__: ClassVar[ConfigDict] = _STRICT
    enabled: bool = True
    min_steps: int = 300
    """Verify steps that both versions need before they are compared."""
    margin: float = 0.1
    """Roll back when live tau is below (1 - margin) times that of the version before."""
    poll_s: float = 3.0
    """Seconds between two looks at the target: acceptance and identity."""

    def __post_init__(self) -> None:
        _require_at_least("guard.", self, {"min_steps": 1, "poll_s": 0.05})
        _require("guard.margin", self.margin, "in [0, 1)", 0 <= self.margin < 1)


@dataclass(frozen=True, kw_only=True, slots=True)
class RunConfig:
    """One run. Equal configs on equal prompts and targets train the same drafter."""

    __pydantic_config__: ClassVar[ConfigDict] = _STRICT
    target_urls: tuple[str, ...]
    """Base URLs of target servers with equal weights."""
    target_path: str | None = None
    """Folder of the target's weights and tokenizer on this machine. None: the path that the target names."""
    target_api_key: SecretStr | None = None
    """Sent as bearer token; never shown again."""
    prompts: str = "stdlib-docstrings"
    """JSONL file, dataset folder, or the name of a builtin."""
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    epochs: int | None = None
    """Passes over the prompts. None: until stopped."""
    held_out_share: float = 0.1
    """Share of the prompts, chosen by content, that is never trained on."""
    held_out_records: int = 16
    """Of the held-out prompts, that many are captured, first of all."""
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    capture_concurrency: int = 4
    """Captures in flight, over all targets."""
    buffer_bytes: int = 2 << 30
    """Bound of the record files. Full: the feed waits; nothing that arrived is dropped."""
    max_uses: int = 16
    """Steps that may use one record."""
    drafter: DrafterSpec = field(default_factory=DrafterSpec)
    warm_start: str | None = None
    """Checkpoint folder to start from."""
    recipe: str = "zlab"
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    records_per_step: int = 8
    anchors_per_step: int = 512
    """Blocks trained per step, over all records."""
    packs_per_step: int | None = None
    """Parts that a step is packed into; how ranks share them changes nothing. None: one per rank."""
    chunk_slots: int = 1024
    """Slots whose full-vocabulary logits exist at one time."""
    max_steps: int | None = None
    max_minutes: float | None = None
    """Of training, pauses not counted."""
    publish_every_s: float | None = 60.0
    publish_every_steps: int | None = None
    publish_initial: bool = False
    """Publish the untrained weights at once, as the first version."""
    publish_final: bool = True
    """Publish once more when `max_steps`, `max_minutes` or `epochs` end the run."""
    gate: GateConfig = field(default_factory=GateConfig)
    guard: GuardConfig = field(default_factory=GuardConfig)
    checkpoint_every_s: float = 60.0
    keep_checkpoints: int = 4
    """Checkpoints kept beside those that are published; older ones are deleted."""
    num_ranks: int = 1
    device: Literal["auto", "cpu", "cuda"] = "auto"
    head_dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Of the frozen head's product; sums are float32 always. auto: whichever this machine does faster."""
    worker_threads: int = 0
    """CPU threads per rank; 0: torch's own choice."""
    seed: int = 0

    def __post_init__(self) -> None:
        _require("target_urls", self.target_urls, "at least one URL", len(self.target_urls) >= 1)
        for url in self.target_urls:
            _require(
                "target_urls", url, "an http:// or https:// URL", url.startswith(("http://", "https://"))
            )
        share = self.held_out_share
        _require("held_out_share", share, "in [0, 1)", 0 <= share < 1)
        lows = {
            "epochs": 1,
            "held_out_records": 0,
            "capture_concurrency": 1,
            "buffer_bytes": 1,
            "max_uses": 1,
        }
        lows |= {"records_per_step": 1, "anchors_per_step": 1, "packs_per_step": 1, "chunk_slots": 1}
        lows |= {"max_steps": 1, "publish_every_steps": 1, "keep_checkpoints": 1, "num_ranks": 1}
        lows |= {"worker_threads": 0, "seed": 0}
        _require_at_least("", self, lows)
        for name in ("max_minutes", "publish_every_s", "checkpoint_every_s"):
            value = getattr(self, name)
            _require(name, value, "above 0 and finite", value is None or 0 < value < math.inf)
        ranks, packs = self.num_ranks, self.num_packs
        _require("packs_per_step", packs, f"a multiple of num_ranks {ranks}", packs % ranks == 0)
        for name in ("records_per_step", "anchors_per_step"):
            value = getattr(self, name)
            _require(name, value, f"at least packs_per_step {packs}", packs <= value)

    @property
    def num_packs(self) -> int:
        """Parts of a step, over all ranks."""
        return self.packs_per_step or self.num_ranks

    @property
    def learning_rate(self) -> float:
        """Peak learning rate after the default is filled in."""
        default = _WARM_START_LR if self.warm_start else _FROM_SCRATCH_LR
        return self.optimizer.lr or default

    @property
    def api_key(self) -> str | None:
        """The bearer token in clear."""
        return self.target_api_key.get_secret_value() if self.target_api_key else None


_ADAPTER: TypeAdapter[RunConfig] = TypeAdapter(RunConfig)


def parse_run_config(body: str | bytes) -> RunConfig:
    """Read a config from JSON.

    Raises:
        ConfigError: names the first field that is unknown, of another type or out of bounds.
    """
    try:
        return _ADAPTER.validate_json(body or b"{}")
    except ValidationError as exc:
        raise config_error(exc) from exc


def dump_run_config(config: RunConfig) -> dict[str, Any]:
    """The whole config with its defaults, as JSON values. The API key is masked."""
    dumped: dict[str, Any] = json.loads(_ADAPTER.dump_json(config))
    return dumped


def config_error(exc: ValidationError) -> ConfigError:
    """The first complaint of Pydantic as field, value and bound."""
    first = exc.errors(include_url=False)[0]
    # Python-only parts of the path, as the name of a union's member, are no field names.
    place = ".".join(str(part) for part in first["loc"]) or "body"
    if first["type"] == "extra_forbidden" or first["type"] == "unexpected_keyword_argument":
        return ConfigError(place, first["input"], "a known field (docs/run-config.md lists them)")
    if first["type"] in ("missing", "missing_keyword_only_argument"):
        return ConfigError(place, None, "given")
    return ConfigError(place, first["input"], first["msg"].removeprefix("Input should be "))
