"""A random target of three layers and a drafter that knows its answers, made in seconds.

For servers that SmolLM2 is too slow for: attention kernels that run in an interpreter, several ranks on one
core. The drafter is trained on the very answers that are asked for, so that paths of several nodes are
accepted.
"""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import httpx
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from dflash_online.drafter.checkpoint import TrainingInfo, export_tensors, save_checkpoint
from dflash_online.drafter.init import new_drafter_config
from dflash_online.target.frozen import FrozenHead
from dflash_online.target.inprocess import InProcessTarget
from dflash_online.target.model_info import TargetModelInfo
from tests.e2e.conftest import overfit
from tests.e2e.target_server import TargetServer

VOCAB, LAYER_IDS, NUM_TOKENS = 64, (0, 1), 16


@dataclass(frozen=True)
class TinyTarget:
    model: Path
    drafter: Path
    other_drafter: Path  # of another version, and hardly trained
    prompts: list[list[int]]


def make_tiny_target(folder: Path, num_prompts: int) -> TinyTarget:
    """Write both folders; seeded."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
        initializer_range=0.3,
        dtype="float32",
    )
    model, checkpoint, other = folder / "target", folder / "drafter", folder / "other_drafter"
    LlamaForCausalLM(config).save_pretrained(model)
    target = TargetModelInfo.from_folder(model)
    drafter_config = new_drafter_config(target, num_layers=1, block_size=8, target_layer_ids=LAYER_IDS)
    drafter_config = replace(drafter_config, dtype="float32")
    numbers = random.Random(0)
    prompts = [
        [numbers.randrange(3, VOCAB) for _ in range(numbers.randrange(4, 20))] for _ in range(num_prompts)
    ]
    oracle = InProcessTarget.from_folder(model, LAYER_IDS)
    records = [
        oracle.capture(prompt, record_id=str(number), max_new_tokens=NUM_TOKENS + 8)
        for number, prompt in enumerate(prompts)
    ]
    head = FrozenHead.from_folder(model, dtype=torch.float32)
    for number, (place, steps) in enumerate(((checkpoint, 120), (other, 2)), start=1):
        tensors = export_tensors(overfit(drafter_config, head, records, steps=steps), drafter_config)
        save_checkpoint(place, drafter_config, tensors, training=TrainingInfo(number=number))
    return TinyTarget(model, checkpoint, other, prompts)


def generate_ids(server: TargetServer, prompt: list[int], **sampling: object) -> list[int]:
    sampling = {"temperature": 0.0, "max_new_tokens": NUM_TOKENS, "ignore_eos": True, **sampling}
    answer = server.client.post("/generate", json={"input_ids": prompt, "sampling_params": sampling})
    assert answer.status_code == httpx.codes.OK, answer.text
    ids: list[int] = answer.json()["output_ids"]
    return ids


def generate_all_ids(server: TargetServer, prompts: list[list[int]], concurrency: int) -> list[list[int]]:
    with ThreadPoolExecutor(concurrency) as pool:
        return list(pool.map(lambda prompt: generate_ids(server, prompt), prompts))
