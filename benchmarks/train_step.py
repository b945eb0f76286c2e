"""Anchors per second and peak memory of one training step, chunked loss against naive full logits.

Measured: sample anchors, forward, loss, backward, clip, AdamW, on random records of the SmolLM2-135M shape
(hidden 576, vocabulary 49152, 5 features; 60 prompt and 96 response tokens a record). Rivals, same drafter,
same records, same head type: `chunked` is `distill.objective`; `naive` projects every slot of every block and
lets autograd differentiate `F.cross_entropy` in float32, as a first implementation would. Each runs in a
child process of its own, so that its peak resident memory is its own; the two take turns step by step, so
that a busy machine slows both.

Run: `python benchmarks/train_step.py --help`. Needs no model and no network. Last line: one JSON object.
"""

from __future__ import annotations

import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from typing import Annotated

import torch
import torch.nn.functional as F
import typer
from torch import Tensor

from dflash_online.distill.objective import block_hidden, block_objective
from dflash_online.distill.pack import PackedBatch, pack_records
from dflash_online.distill.recipe import RECIPES
from dflash_online.drafter.config import DrafterConfig
from dflash_online.drafter.init import initialize
from dflash_online.drafter.model import DFlashDrafter
from dflash_online.target.frozen import FrozenHead, fastest_dtype
from dflash_online.wire.record import Record, RecordHeader, RecordSource, TargetIdentity

PROMPT_TOKENS, RESPONSE_TOKENS = 60, 96
HIDDEN, VOCAB = 576, 49152
RIVALS = ("chunked", "naive")


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """What one step works on."""

    num_layers: int
    block_size: int
    num_records: int
    num_anchors: int
    num_threads: int


def smollm2_drafter(shape: Shape) -> DrafterConfig:
    """A drafter of SmolLM2-135M."""
    return DrafterConfig(
        hidden_size=HIDDEN,
        intermediate_size=1536,
        num_layers=shape.num_layers,
        num_heads=9,
        num_kv_heads=3,
        head_dim=64,
        vocab_size=VOCAB,
        num_target_layers=30,
        target_layer_ids=(1, 8, 14, 20, 27),
        mask_token_id=0,
        block_size=shape.block_size,
    )


def random_records(num_records: int) -> list[Record]:
    """Records of the demo's size."""
    generator = torch.Generator().manual_seed(0)
    num_tokens, width = PROMPT_TOKENS + RESPONSE_TOKENS, 5 * HIDDEN
    records = []
    for index in range(num_records):
        tokens = torch.randint(VOCAB, (num_tokens,), generator=generator).tolist()
        header = RecordHeader(
            record_id=str(index),
            source=RecordSource.PROMPT,
            cursor=index,
            target=TargetIdentity(path="random", revision="", weight_checksum=""),
            drafter_version="none",
            layer_ids=(1, 8, 14, 20, 27),
            dtype="bfloat16",
            num_rows=num_tokens - 1,
            row_width=width,
            token_ids=tuple(tokens),
            prompt_length=PROMPT_TOKENS,
            loss_spans=((PROMPT_TOKENS, num_tokens),),
            finish_reason="length",
        )
        features_TF = torch.randn(num_tokens - 1, width, generator=generator).bfloat16()
        records.append(Record(header, features_TF))
    return records


def chunked_loss(drafter: DFlashDrafter, head: FrozenHead, batch: PackedBatch) -> Tensor:
    """The project's objective."""
    result = block_objective(drafter, head, batch, RECIPES["zlab"])
    return result.loss_sum / result.denominator


def naive_loss(drafter: DFlashDrafter, head: FrozenHead, batch: PackedBatch) -> Tensor:
    """The named rival: logits of every slot at once, weights applied afterwards."""
    hidden_ABH = block_hidden(drafter, head, batch)
    logits_NV = head.logits(hidden_ABH.flatten(0, 1)).float()
    loss_N = F.cross_entropy(logits_NV, batch.label_AB.flatten(), reduction="none")
    slot_B = torch.arange(batch.block_size)
    decay_B = torch.exp((1 - slot_B) / RECIPES["zlab"].gamma_for(batch.block_size))
    weight_N = (decay_B * batch.valid_AB).flatten()
    return (loss_N * weight_N).sum() / weight_N.sum()


def run_child(rival: str, shape: Shape) -> None:
    """Answer each line on standard input with the seconds of one step; then the peak memory in MiB."""
    torch.set_num_threads(shape.num_threads)
    torch.manual_seed(0)
    dtype = fastest_dtype(HIDDEN)
    weight_VH = (0.14 * torch.randn(VOCAB, HIDDEN)).to(dtype)
    head = FrozenHead(weight_VH, weight_VH, torch.ones(HIDDEN, dtype=dtype), 1e-5)
    drafter = initialize(smollm2_drafter(shape), seed=0)
    optimizer = torch.optim.AdamW(drafter.parameters(), lr=1e-3, fused=True)
    records, generator = random_records(shape.num_records), torch.Generator().manual_seed(0)
    loss_of = chunked_loss if rival == "chunked" else naive_loss
    reply({"rss_before_mib": peak_rss_mib(), "head_dtype": str(dtype).removeprefix("torch.")})
    for _ in sys.stdin:
        start = time.perf_counter()
        batch = pack_records(
            records, block_size=shape.block_size, num_anchors=shape.num_anchors, generator=generator
        )
        loss = loss_of(drafter, head, batch)
        optimizer.zero_grad(set_to_none=True)
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(drafter.parameters(), 1.0)
        optimizer.step()
        seconds = time.perf_counter() - start
        reply(
            {"seconds": seconds, "anchors": batch.num_anchors, "loss": loss.item(), "rss_mib": peak_rss_mib()}
        )


def reply(fields: dict[str, object]) -> None:
    """One JSON line to the parent."""
    print(json.dumps(fields), flush=True)


def peak_rss_mib() -> float:
    """Peak resident memory of this process so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def measure(shape: Shape, steps: int, warmup: int) -> dict[str, dict[str, float | str]]:
    """Run both rivals step by step in turn and sum up the steps after the warm-up."""
    arguments = [str(getattr(shape, name)) for name in Shape.__slots__]
    environment = os.environ | {"OMP_NUM_THREADS": str(shape.num_threads)}
    children = {
        rival: subprocess.Popen(
            [sys.executable, __file__, "child", rival, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )
        for rival in RIVALS
    }
    try:
        first = {rival: ask(child, None) for rival, child in children.items()}
        replies: dict[str, list[dict[str, float]]] = {rival: [] for rival in RIVALS}
        for _ in range(warmup + steps):
            for rival, child in children.items():
                replies[rival].append(ask(child, "step"))
    finally:
        for child in children.values():
            child.communicate(timeout=60)
    results: dict[str, dict[str, float | str]] = {}
    for rival, answers in replies.items():
        seconds = [answer["seconds"] for answer in answers[warmup:]]
        results[rival] = {
            "anchors_per_s": round(sum(answer["anchors"] for answer in answers[warmup:]) / sum(seconds), 1),
            "step_s_median": round(statistics.median(seconds), 4),
            "step_s_min": round(min(seconds), 4),
            "step_s_max": round(max(seconds), 4),
            "peak_rss_mib": round(answers[-1]["rss_mib"]),
            "rss_before_mib": round(float(first[rival]["rss_before_mib"])),
            "first_loss": round(answers[0]["loss"], 4),
            "head_dtype": str(first[rival]["head_dtype"]),
        }
    return results


def ask(child: subprocess.Popen[str], line: str | None) -> dict[str, float]:
    """Send a line, if any, and read the JSON answer."""
    assert child.stdin is not None
    assert child.stdout is not None
    if line is not None:
        child.stdin.write(line + "\n")
        child.stdin.flush()
    answer: dict[str, float] = json.loads(child.stdout.readline())
    return answer


def main(
    steps: Annotated[int, typer.Option(help="Measured steps per rival.")] = 8,
    warmup: Annotated[int, typer.Option(help="Steps before measuring.")] = 2,
    layers: Annotated[int, typer.Option(help="Draft layers.")] = 2,
    block_size: Annotated[int, typer.Option(help="Slots per block.")] = 8,
    records: Annotated[int, typer.Option(help="Records per step.")] = 8,
    anchors: Annotated[int, typer.Option(help="Anchors per step.")] = 64,
    threads: Annotated[int, typer.Option(help="Threads of each child; they take turns.")] = 2,
) -> None:
    """Measure one training step, chunked loss against naive full logits."""
    shape = Shape(
        num_layers=layers,
        block_size=block_size,
        num_records=records,
        num_anchors=anchors,
        num_threads=threads,
    )
    results = measure(shape, steps, warmup)
    for rival, figures in results.items():
        print(rival, *(f"{name}={value}" for name, value in figures.items()))
    summary = {
        "benchmark": "train_step",
        "cpu": platform.processor() or platform.machine(),
        "torch": torch.__version__,
        "layers": layers,
        "block_size": block_size,
        "records": records,
        "anchors": anchors,
        "threads": threads,
        "steps": steps,
        **results,
    }
    print(json.dumps(summary))


if __name__ == "__main__":
    if sys.argv[1:2] == ["child"]:
        layers_, block_, records_, anchors_, threads_ = map(int, sys.argv[3:])
        run_child(
            sys.argv[2],
            Shape(
                num_layers=layers_,
                block_size=block_,
                num_records=records_,
                num_anchors=anchors_,
                num_threads=threads_,
            ),
        )
    else:
        typer.run(main)
