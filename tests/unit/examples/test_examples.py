"""Every example's run config is one that the trainer accepts, and its memory sum is what the formulas give.

The formulas: parameters of a drafter (specification, section F), 18 bytes per trained parameter (float32
master, gradient, two moments; bf16 copy while computing), one chunk of logits three times over in float32
(logits, their gradient, the softmax), records of K*H*2 bytes per token.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from dflash_online.drafter.config import DrafterConfig
from dflash_online.drafter.tensors import expected_shapes
from trainer.runs.config import RunConfig, parse_run_config

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"
TRAINED_BYTES, LOGIT_COPIES = 18, 3


@dataclass(frozen=True, kw_only=True)
class Model:
    """What the sums need of a target and its drafter."""

    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    layers: int
    features: int
    vocab: int
    num_heads_and_embeddings: int
    target_billions: float
    target_layers: int
    target_kv_heads: int
    target_head_dim: int

    @property
    def num_parameters(self) -> int:
        """Specification, section F."""
        h, hd = self.hidden, self.head_dim
        attention = h * hd * (2 * self.heads + 2 * self.kv_heads)
        layer = attention + 3 * h * self.intermediate + 2 * h + 2 * hd
        return self.layers * layer + self.features * h * h + 2 * h


MODELS = {
    "smollm2-cpu": Model(
        hidden=576, intermediate=1536, heads=9, kv_heads=3, head_dim=64, layers=2, features=5, vocab=49152,
        num_heads_and_embeddings=1, target_billions=0.1345, target_layers=30, target_kv_heads=3,
        target_head_dim=64,
    ),
    "qwen3-8b-one-gpu": Model(
        hidden=4096, intermediate=12288, heads=32, kv_heads=8, head_dim=128, layers=5, features=5,
        vocab=151936, num_heads_and_embeddings=2, target_billions=8.19, target_layers=36, target_kv_heads=8,
        target_head_dim=128,
    ),
    "qwen3.6-27b": Model(
        hidden=5120, intermediate=17408, heads=32, kv_heads=8, head_dim=128, layers=5, features=5,
        vocab=248320, num_heads_and_embeddings=2, target_billions=27.0, target_layers=16, target_kv_heads=4,
        target_head_dim=256,
    ),
}  # fmt: skip


def run_config(name: str) -> dict[str, Any]:
    value = json.loads((EXAMPLES / name / "run.json").read_text())
    assert isinstance(value, dict)
    return value


def memory_rows(name: str, config: RunConfig) -> dict[str, float]:
    """Gigabytes (1e9 bytes) by the names of the README's table."""
    model = MODELS[name]
    head_bytes = {"float32": 4}.get(config.head_dtype, 2)
    frozen = model.num_heads_and_embeddings * model.vocab * model.hidden * head_bytes
    chunk = config.chunk_slots * model.vocab * 4 * LOGIT_COPIES
    per_token = model.features * model.hidden * 2
    kv_per_token = 2 * model.target_layers * model.target_kv_heads * model.target_head_dim * 2
    draft_kv_per_token = 2 * model.layers * model.kv_heads * model.head_dim * 2
    sizes = {
        "target weights, bf16": model.target_billions * 2e9,
        "target cache, per 100k tokens": kv_per_token * 1e5,
        "drafter weights in the server, bf16": model.num_parameters * 2,
        "drafter cache, per 100k tokens": draft_kv_per_token * 1e5,
        "trained weights, gradients, optimizer": model.num_parameters * TRAINED_BYTES,
        "frozen embedding and head": frozen,
        "one chunk of logits": chunk,
        "capture slots in /dev/shm": 32 * 4096 * per_token,
        "record files, at most": config.buffer_bytes,
    }
    return {label: size / 1e9 for label, size in sizes.items()}


@pytest.mark.parametrize("name", MODELS)
def test_the_run_config_is_accepted(name: str) -> None:
    config = parse_run_config(json.dumps(run_config(name)).encode())
    assert config.recipe == "zlab"


def test_every_example_is_checked() -> None:
    assert {path.parent.name for path in EXAMPLES.glob("*/run.json")} == set(MODELS)
    assert {path.parent.name for path in EXAMPLES.glob("*/README.md")} == set(MODELS)


@pytest.mark.parametrize("name", MODELS)
def test_the_memory_sum_is_what_the_formulas_give(name: str) -> None:
    readme = (EXAMPLES / name / "README.md").read_text()
    for label, size in memory_rows(name, parse_run_config(json.dumps(run_config(name)).encode())).items():
        assert f"| {label} | {size:.2f} |" in readme, f"{label}: {size:.2f}"


@pytest.mark.parametrize("name", MODELS)
def test_the_parameter_formula_counts_the_real_tensors(name: str) -> None:
    model = MODELS[name]
    config = DrafterConfig(
        hidden_size=model.hidden,
        intermediate_size=model.intermediate,
        num_layers=model.layers,
        num_heads=model.heads,
        num_kv_heads=model.kv_heads,
        head_dim=model.head_dim,
        vocab_size=model.vocab,
        num_target_layers=64,
        target_layer_ids=tuple(range(1, 1 + model.features)),
        mask_token_id=0,
    )
    counted = 0
    for shape in expected_shapes(config).values():
        size = 1
        for length in shape:
            size *= length
        counted += size
    assert counted == model.num_parameters


def test_the_large_example_hooks_the_layers_of_the_published_drafter() -> None:
    config = run_config("qwen3.6-27b")
    assert config["drafter"]["layer_ids"] == [1, 16, 31, 46, 61]
    assert config["num_ranks"] == 4
    assert config["warm_start"]
