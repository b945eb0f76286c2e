"""Peak memory of the loss at the size of a large target, chunked against naive full logits.

Measured: memory above what head, hidden states and labels take, over one loss with its gradient, at 512
anchors of 16 slots (7680 drafts), hidden size 5120, vocabulary 248,320, the head in bfloat16. Each case runs
in a process of its own: peak resident size on a CPU, the allocator's peak on a GPU.

    chunk      as many drafts as one chunk holds: the floor, whatever the number of drafts
    chunked    all drafts, `distill.slot_loss`; `verifier`: labels from the target's head, `mixture`: soft KL
    naive      all logits at once, gradient by autograd; on fewer drafts where it would not fit, and scaled up

The ratio that must stay below 1.3: chunked over (chunk + the hidden states' own gradient). Run:
`python benchmarks/loss_memory.py --help`. Needs no model and no network. Last line: one JSON object.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import time
from typing import Annotated

import psutil
import torch
import typer

from dflash_online.distill.slot_loss import SlotTargets, chunked_slot_losses, plain_slot_losses

KINDS = ("tokens", "verifier", "mixture")
BOUND = 1.3


def run_child(rival: str, kind: str, slots: int, hidden: int, vocab: int, chunk: int, device: str) -> None:
    """One loss with its gradient; prints bytes above the start."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    # Values do not matter, pages do: every one is written.
    head_VH = torch.empty(vocab, hidden, dtype=torch.bfloat16, device=device).uniform_(-0.02, 0.02)
    hidden_NH = torch.randn(slots, hidden, device=device, requires_grad=True)
    verifier_NH = None if kind == "tokens" else torch.randn(slots, hidden, device=device)
    label_N = torch.randint(vocab, (slots,), device=device) if kind == "tokens" else None
    share = 0.7 if kind == "mixture" else 0.0
    targets = SlotTargets(label_N=label_N, verifier_NH=verifier_NH, kl_share=share, kl_temperature=2.0)
    before = used_bytes(device)
    start = time.perf_counter()
    if rival == "naive":
        losses = plain_slot_losses(hidden_NH, head_VH, targets)
    else:
        losses = chunked_slot_losses(hidden_NH, head_VH, targets, chunk_slots=chunk)
    torch.autograd.backward(losses.loss_N.mean())
    assert hidden_NH.grad is not None
    assert hidden_NH.grad.isfinite().all()
    peak = peak_bytes(device) - before
    print(json.dumps({"peak_mib": peak / 2**20, "seconds": time.perf_counter() - start}))


def used_bytes(device: str) -> int:
    """Taken now; sets the peak back."""
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        return torch.cuda.memory_allocated()
    return psutil.Process().memory_info().rss


def peak_bytes(device: str) -> int:
    """The most that was taken at one time."""
    if device == "cuda":
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def measure(rival: str, kind: str, slots: int, *shape: object) -> dict[str, float]:
    """Run a child to its end."""
    arguments = [sys.executable, __file__, "child", rival, kind, str(slots), *map(str, shape)]
    said = subprocess.run(arguments, check=True, stdout=subprocess.PIPE, text=True).stdout
    found: dict[str, float] = json.loads(said)
    return found


def main(
    anchors: Annotated[int, typer.Option(help="Blocks.")] = 512,
    block_size: Annotated[int, typer.Option(help="Slots per block; one less are drafts.")] = 16,
    hidden: Annotated[int, typer.Option(help="Hidden size of the target.")] = 5120,
    vocab: Annotated[int, typer.Option(help="Rows of the head.")] = 248_320,
    chunk_slots: Annotated[int, typer.Option(help="Drafts per chunk.")] = 256,
    naive_slots: Annotated[int, typer.Option(help="Drafts of the naive rival, scaled up to all.")] = 480,
    kinds: Annotated[str, typer.Option(help="Of tokens, verifier, mixture.")] = "tokens,verifier",
) -> None:
    """Measure the loss's peak memory."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    slots, shape = anchors * (block_size - 1), (hidden, vocab, chunk_slots, device)
    gradient_mib = slots * hidden * 4 / 2**20  # float32, as the hidden states
    results: dict[str, dict[str, float | bool]] = {}
    for kind in kinds.split(","):
        chunk = measure("chunked", kind, chunk_slots, *shape)
        chunked = measure("chunked", kind, slots, *shape)
        naive = measure("naive", kind, min(naive_slots, slots), *shape)
        naive_mib = naive["peak_mib"] * slots / min(naive_slots, slots)
        # The chunk's own run holds a gradient of its drafts too. In each run the function keeps one and
        # autograd hands out another.
        floor_mib = chunk["peak_mib"] + 2 * gradient_mib * (1 - chunk_slots / slots)
        results[kind] = {
            "chunk_mib": round(chunk["peak_mib"], 1),
            "floor_mib": round(floor_mib, 1),
            "chunked_mib": round(chunked["peak_mib"], 1),
            "ratio_to_floor": round(chunked["peak_mib"] / floor_mib, 3),
            "is_within_bound": chunked["peak_mib"] <= BOUND * floor_mib,
            "naive_mib": round(naive_mib, 1),
            "naive_ratio": round(naive_mib / chunked["peak_mib"], 1),
            "seconds": round(chunked["seconds"], 1),
        }
        print(kind, *(f"{name}={value}" for name, value in results[kind].items()), flush=True)
    summary = {
        "benchmark": "loss_memory",
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
        "torch": torch.__version__,
        "slots": slots,
        "hidden": hidden,
        "vocab": vocab,
        "chunk_slots": chunk_slots,
        "naive_slots": min(naive_slots, slots),
        "bound": BOUND,
        **results,
    }
    print(json.dumps(summary))


if __name__ == "__main__":
    if sys.argv[1:2] == ["child"]:
        rival, kind, *numbers, device = sys.argv[2:]
        run_child(rival, kind, *map(int, numbers), device)
    else:
        typer.run(main)
