"""The share of a decode step that the tree itself takes: candidates, building, visibility, walk, commit.

    logits of the slots --candidates--> --build--> tree --visibility--> verify --walk--> --commit--> next

The parts are the project's own functions. The verify pass is a real target's, in Transformers, over all nodes
at a time behind `--context` cached tokens; the drafter's layers are left out of the step, so the share is
rather too large. Commit moves the accepted path's keys and values of every layer to the front of the window
and gathers its features, as the server does. Logits of the slots are noise around real head rows, so trees
branch. Medians of rounds in which every part runs once, after two unmeasured ones.

Run: `python benchmarks/tree_overhead.py --model models/smollm2-135m`. Needs no network. Last line: one JSON
object; the aim is a `tree_share` below 0.05.

Shape letters: R = requests, D = drafts, V = vocabulary, N = nodes, P = path, S = slots, F = features.
"""

from __future__ import annotations

import json
import platform
import statistics
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache

from dflash_online.tree.build import tree_of_candidates
from dflash_online.tree.candidates import top_candidates
from dflash_online.tree.draft_tree import DraftTrees, visibility
from dflash_online.tree.walk import path_ranks, walk

TREE_PARTS = ("candidates", "build", "visibility", "walk", "ranks", "commit")


class Stopwatch:
    """Milliseconds of named parts."""

    def __init__(self) -> None:
        self.times: dict[str, list[float]] = defaultdict(list)

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.times[name].append((time.perf_counter() - start) * 1e3)


class World:
    """A target with a filled cache, and buffers of the shape of a server's pools."""

    def __init__(self, model: Any, batch: int, context: int, depths: int, nodes: int) -> None:
        config = model.config
        self.model, self.context, self.nodes = model, context, nodes
        self.generator = torch.Generator().manual_seed(0)
        ids = torch.randint(0, config.vocab_size, (batch, context), generator=self.generator)
        self.cache = DynamicCache(config=config)
        model(ids, past_key_values=self.cache, use_cache=True)
        self.head_VH = model.get_output_embeddings().weight
        self.hidden_RDH = torch.randn(batch, depths, config.hidden_size, generator=self.generator)
        self.anchor_R = ids[:, -1]
        slots, heads = batch * (nodes + 1), config.num_key_value_heads
        size = config.hidden_size // config.num_attention_heads
        self.pools = [torch.zeros(slots, heads, size) for _ in range(2 * config.num_hidden_layers)]
        self.slot_RN = torch.arange(slots).view(batch, nodes + 1)
        self.features_RNF = torch.zeros(batch, nodes + 1, 5 * config.hidden_size)

    def step(self, watch: Stopwatch) -> None:
        """One decode step without the drafter's layers."""
        with watch.part("draft_head"):
            logits_RDV = torch.nn.functional.linear(self.hidden_RDH, self.head_VH)
        with watch.part("candidates"):
            candidates = top_candidates(logits_RDV, self.nodes)
        with watch.part("build"):
            trees = tree_of_candidates(self.anchor_R, candidates, self.nodes)
        with watch.part("visibility"):
            seen_RNN = visibility(trees)
        with watch.part("verify"):
            logits_RNV = self._verify(trees, seen_RNN)
        with watch.part("argmax"):
            target_RN = logits_RNV.argmax(dim=2)
        # Make about half of each path accepted: a random drafter would leave nothing to commit.
        target_RN[:, 0] = trees.token_id_RN[:, 1]
        with watch.part("walk"):
            committed = walk(trees, target_RN)
        with watch.part("ranks"):
            path_ranks(trees, committed.path_RP)
        with watch.part("commit"):
            self._commit(committed.path_RP)

    def _verify(self, trees: DraftTrees, seen_RNN: Tensor) -> Tensor:
        num_requests, num_nodes = trees.token_id_RN.shape
        past = torch.ones(num_requests, num_nodes, self.context, dtype=torch.bool)
        mask = torch.cat([past, seen_RNN], dim=2)[:, None]
        out = self.model(
            trees.token_id_RN,
            position_ids=self.context + trees.depth_RN,
            attention_mask=torch.zeros(mask.shape).masked_fill_(~mask, torch.finfo(torch.float32).min),
            past_key_values=self.cache,
            use_cache=True,
        )
        self.cache.crop(-num_nodes)
        logits: Tensor = out.logits
        return logits

    def _commit(self, path_RP: Tensor) -> None:
        source = self.slot_RN.gather(1, path_RP).flatten()
        target = self.slot_RN[:, : path_RP.shape[1]].flatten()
        for pool in self.pools:
            pool[target] = pool[source]
        self.features_RNF.gather(1, path_RP[:, :, None].expand(-1, -1, self.features_RNF.shape[2]))


@torch.inference_mode()
def measure(model: Any, batch: int, context: int, depths: int, nodes: int, rounds: int) -> dict[str, Any]:
    """Medians in milliseconds, and the share of the tree's parts in the step."""
    world = World(model, batch, context, depths, nodes)
    for _ in range(2):
        world.step(Stopwatch())
    watch = Stopwatch()
    for _ in range(rounds):
        world.step(watch)
    medians = {name: statistics.median(times) for name, times in watch.times.items()}
    steps = [sum(parts) for parts in zip(*watch.times.values(), strict=True)]
    tree_ms = sum(medians[name] for name in TREE_PARTS)
    return {
        **{f"{name}_ms": round(value, 3) for name, value in medians.items()},
        "step_ms": round(statistics.median(steps), 2),
        "tree_ms": round(tree_ms, 3),
        "tree_share": round(tree_ms / statistics.median(steps), 4),
    }


def main(
    model: Annotated[Path, typer.Option(help="Folder of the target model.")],
    context: Annotated[int, typer.Option(min=1, help="Cached tokens of each request.")] = 256,
    depths: Annotated[int, typer.Option(min=1, help="Drafts per block.")] = 7,
    nodes: Annotated[str, typer.Option(help="Tree sizes, comma-separated.")] = "16,64",
    batches: Annotated[str, typer.Option(help="Batch sizes, comma-separated.")] = "1,4",
    rounds: Annotated[int, typer.Option(min=1, help="Measured steps of each setting.")] = 15,
) -> None:
    """Measure the tree's share of a decode step on one CPU thread, in float32."""
    torch.set_num_threads(1)
    target = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, attn_implementation="sdpa")
    results: dict[str, Any] = {}
    for batch in map(int, batches.split(",")):
        for size in map(int, nodes.split(",")):
            name = f"batch_{batch}_nodes_{size}"
            results[name] = measure(target.eval(), batch, context, depths, size, rounds)
            print(name, *(f"{key}={value}" for key, value in results[name].items()))
    summary = {
        "benchmark": "tree_overhead",
        "cpu": platform.processor() or platform.machine(),
        "torch": torch.__version__,
        "threads": 1,
        "model": model.name,
        "context": context,
        "depths": depths,
        "rounds": rounds,
        **results,
    }
    print(json.dumps(summary))


if __name__ == "__main__":
    typer.run(main)
