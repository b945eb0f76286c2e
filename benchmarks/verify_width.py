"""What a verify pass costs beside a decode step: the target's matrix products, by the width of the window.

Speculation pays where tau exceeds (verify + draft) / decode. On a GPU a few more rows are nearly free, for
the weights have to be read anyway. With torch on a CPU they are not: one row takes a matrix-vector product,
which is bound by memory, and from two rows on a matrix product that packs its operands. The plugin's product
(`server_patches.cpu.linear`, float32, one thread) reads the weights once. This measures every linear layer
of a target once per width, one request, nothing else of a step. Widths and products take turns; medians.

    python benchmarks/verify_width.py --target models/smollm2-135m --threads 1

Needs the config of a target and no weights of it: they are random. Last line: one JSON object.
"""

from __future__ import annotations

import json
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import torch
import typer
from transformers import AutoConfig

from server_patches.cpu.linear import linear

WIDTHS = (1, 2, 6, 9, 17, 33)
Product = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


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


def measure(
    shapes: list[tuple[int, int, int]], dtype: torch.dtype, rounds: int, products: dict[str, Product]
) -> dict[str, dict[int, float]]:
    """Median milliseconds of all layers, by product and width. Every layer has weights of its own."""
    weights = [torch.randn(n, k).to(dtype) for n, k, number in shapes for _ in range(number)]
    times = {name: {width: list[float]() for width in WIDTHS} for name in products}
    for number in range(rounds + 1):
        for width in WIDTHS:
            rows = {k: torch.randn(width, k).to(dtype) for _, k, _ in shapes}
            for name, product in products.items():
                start = time.perf_counter()
                for weight in weights:
                    product(rows[weight.shape[1]], weight)
                if number:
                    times[name][width].append((time.perf_counter() - start) * 1e3)
    return {
        name: {width: statistics.median(spent) for width, spent in by_width.items()}
        for name, by_width in times.items()
    }


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
        products: dict[str, Product] = {"torch": torch.nn.functional.linear}
        if dtype == torch.float32:
            products["plugin"] = linear
        by_product = measure(shapes, dtype, rounds, products)
        for product, spent in by_product.items():
            name = f"{product}_{str(dtype).removeprefix('torch.')}"
            print(name, *(f"W={width}: {ms:.1f} ms ({ms / spent[1]:.2f})" for width, ms in spent.items()))
            summary[f"{name}_ms"] = {width: round(ms, 2) for width, ms in spent.items()}
            summary[f"{name}_ratio"] = {width: round(ms / spent[1], 2) for width, ms in spent.items()}
        if "plugin" in by_product:
            summary["torch_over_plugin"] = {
                width: round(by_product["torch"][width] / ms, 2) for width, ms in by_product["plugin"].items()
            }
    print(json.dumps(summary))


if __name__ == "__main__":
    typer.run(main)
