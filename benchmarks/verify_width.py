"""What a verify pass costs beside a decode step: the target's matrix products, by the width of the window.

Speculation pays where tau exceeds (verify + draft) / decode. On a GPU a few more rows are nearly free, for
the weights have to be read anyway. On a CPU they are not: one row takes a matrix-vector product, which is
bound by memory, and from two rows on a matrix product that packs its operands. This measures every linear
layer of a target once per width, one request, nothing else of a step. Widths take turns; ratios of medians.

    python benchmarks/verify_width.py --target models/smollm2-135m --threads 1

Needs the config of a target and no weights of it: they are random. Last line: one JSON object.
"""

from __future__ import annotations

import json
import platform
import statistics
import time
from pathlib import Path
from typing import Annotated

import torch
import typer
from transformers import AutoConfig

WIDTHS = (1, 2, 6, 8, 17, 33)


def linear_shapes(folder: Path) -> list[tuple[int, int, int]]:
    """(outputs, inputs, number) of a LLaMA-like target's linear layers, fused as SGLang fuses them."""
    config = AutoConfig.from_pretrained(folder)
    hidden, layers = config.hidden_size, config.num_hidden_layers
    head_dim = getattr(config, "head_dim", None) or hidden // config.num_attention_heads
    queries, keys = config.num_attention_heads * head_dim, config.num_key_value_heads * head_dim
    return [
        (queries + 2 * keys, hidden, layers),
        (hidden, queries, layers),
        (2 * config.intermediate_size, hidden, layers),
        (hidden, config.intermediate_size, layers),
        (config.vocab_size, hidden, 1),
    ]


def measure(shapes: list[tuple[int, int, int]], dtype: torch.dtype, rounds: int) -> dict[int, float]:
    """Median milliseconds of all layers, by width. Every layer has weights of its own, as in a model."""
    weights = [torch.randn(n, k).to(dtype) for n, k, number in shapes for _ in range(number)]
    times: dict[int, list[float]] = {width: [] for width in WIDTHS}
    for number in range(rounds + 1):
        for width, spent in times.items():
            rows = {k: torch.randn(width, k).to(dtype) for _, k, _ in shapes}
            start = time.perf_counter()
            for weight in weights:
                torch.nn.functional.linear(rows[weight.shape[1]], weight)
            if number:
                spent.append((time.perf_counter() - start) * 1e3)
    return {width: statistics.median(spent) for width, spent in times.items()}


def main(
    target: Annotated[Path, typer.Option(help="Folder of the target, for its config.")],
    threads: Annotated[int, typer.Option(help="Compute threads.")] = 1,
    rounds: Annotated[int, typer.Option(help="Measured rounds.")] = 15,
) -> None:
    """Measure float32 and bfloat16."""
    torch.set_num_threads(threads)
    shapes = linear_shapes(target)
    summary: dict[str, object] = {
        "benchmark": "verify_width",
        "target": target.name,
        "torch": torch.__version__,
        "cpu": platform.processor() or platform.machine(),
        "threads": threads,
        "rounds": rounds,
    }
    for dtype in (torch.float32, torch.bfloat16):
        name = str(dtype).removeprefix("torch.")
        spent = measure(shapes, dtype, rounds)
        print(name, *(f"W={width}: {ms:.1f} ms ({ms / spent[1]:.2f})" for width, ms in spent.items()))
        summary[f"{name}_ms"] = {width: round(ms, 2) for width, ms in spent.items()}
        summary[f"{name}_ratio"] = {width: round(ms / spent[1], 2) for width, ms in spent.items()}
    print(json.dumps(summary))


if __name__ == "__main__":
    typer.run(main)
