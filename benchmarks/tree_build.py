"""Milliseconds of tree building, as on a CPU, against a Python heap and against tensors; of selection too.

Measured on the CPU, one thread, random logits. (a) `tree_of_candidates` from the same candidates against the
oracle `heap_tree` request by request, and against the tensors that other devices use, for one request, 4 and
32. (b) `top_candidates` against `torch.topk` plus `torch.logsumexp` of the float32 logits, which leaves the
order of ties open. (c) What `warm_up` takes in a new process, importing numba included. Rivals take turns, so
that a busy machine slows both; ratios are of medians, above 1 where the project's own code is faster.

Run: `python benchmarks/tree_build.py --help`. Needs no model and no network. Last line: one JSON object.
"""

from __future__ import annotations

import json
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from importlib.metadata import version
from typing import Annotated

import torch
import typer

from dflash_online.tree import build
from dflash_online.tree.build import tree_of_candidates
from dflash_online.tree.candidates import top_candidates
from dflash_online.tree.reference import heap_tree


def compare(ours: Callable[[], object], rival: Callable[[], object], rounds: int) -> dict[str, float]:
    """Milliseconds of both, taking turns, after two unmeasured rounds."""
    times: dict[Callable[[], object], list[float]] = {ours: [], rival: []}
    for number in range(rounds + 2):
        for run, spent in times.items():
            start = time.perf_counter()
            run()
            if number >= 2:
                spent.append((time.perf_counter() - start) * 1e3)
    own, other = times[ours], times[rival]
    return {
        "ms_median": round(statistics.median(own), 3),
        "ms_min": round(min(own), 3),
        "rival_ms_median": round(statistics.median(other), 3),
        "rival_ms_min": round(min(other), 3),
        "ratio": round(statistics.median(other) / statistics.median(own), 2),
    }


def compare_trees(batch: int, depths: int, nodes: int, rounds: int) -> dict[str, dict[str, float]]:
    """(a): from the same candidates to a tree."""
    generator = torch.Generator().manual_seed(0)
    candidates = top_candidates(4 * torch.randn(batch, depths, 4096, generator=generator), nodes)
    anchor_R = torch.zeros(batch, dtype=torch.int64)

    def chosen() -> object:
        return tree_of_candidates(anchor_R, candidates, nodes)

    def heaps() -> object:
        pairs = zip(candidates.log_prob_RDK, candidates.token_id_RDK, strict=True)
        return [heap_tree(log_prob_DK, token_DK, nodes) for log_prob_DK, token_DK in pairs]

    def tensors() -> object:
        compiled_heap, build.compiled_heap = build.compiled_heap, lambda: None
        try:
            return chosen()
        finally:
            build.compiled_heap = compiled_heap

    return {
        f"tree_batch_{batch}": compare(chosen, heaps, rounds),
        f"tensors_batch_{batch}": compare(chosen, tensors, rounds),
    }


def compare_selection(
    dtype: torch.dtype, depths: int, vocab: int, nodes: int, rounds: int
) -> dict[str, float]:
    """(b): from logits of one request to candidates."""
    generator = torch.Generator().manual_seed(0)
    logits_RDV = (4 * torch.randn(1, depths, vocab, generator=generator)).to(dtype)

    def plain() -> object:
        logits = logits_RDV.float()
        top = logits.topk(nodes, dim=2)
        return top.values - logits.logsumexp(dim=2, keepdim=True), top.indices

    return compare(lambda: top_candidates(logits_RDV, nodes), plain, rounds)


def time_warm_up() -> dict[str, float]:
    """(c): seconds by the clock and of the CPU, of a process that has imported torch and `build`."""
    code = (
        "import json, time, torch; from dflash_online.tree import build; start = time.perf_counter(), "
        "time.process_time(); build.warm_up('cpu'); assert build.compiled_heap(); print(json.dumps("
        "[round(time.perf_counter() - start[0], 2), round(time.process_time() - start[1], 2)]))"
    )
    runs = [
        json.loads(subprocess.run([sys.executable, "-c", code], check=True, capture_output=True).stdout)
        for _ in range(3)
    ]
    clock, cpu = min(runs)
    return {"seconds": clock, "cpu_seconds": cpu}


def main(
    rounds: Annotated[int, typer.Option(help="Measured rounds of each comparison.")] = 30,
    depths: Annotated[int, typer.Option(help="Drafts per block.")] = 15,
    nodes: Annotated[int, typer.Option(help="Draft nodes per tree, and candidates per depth.")] = 64,
    vocab: Annotated[int, typer.Option(help="Vocabulary of the selection.")] = 151936,
) -> None:
    """Measure tree building on one CPU thread."""
    torch.set_num_threads(1)
    results: dict[str, dict[str, float]] = {}
    for batch in (1, 4, 32):
        results |= compare_trees(batch, depths, nodes, rounds)
    for dtype in (torch.float32, torch.bfloat16):
        name = f"candidates_{str(dtype).removeprefix('torch.')}"
        results[name] = compare_selection(dtype, depths, vocab, nodes, rounds)
    results["warm_up"] = time_warm_up()
    for name, figures in results.items():
        print(name, *(f"{key}={value}" for key, value in figures.items()))
    summary = {
        "benchmark": "tree_build",
        "cpu": platform.processor() or platform.machine(),
        "torch": torch.__version__,
        "numba": version("numba"),
        "threads": 1,
        "rounds": rounds,
        "depths": depths,
        "nodes": nodes,
        "vocab": vocab,
        **results,
    }
    print(json.dumps(summary))


if __name__ == "__main__":
    typer.run(main)
