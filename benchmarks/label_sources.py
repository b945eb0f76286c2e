"""Which labels train the better drafter? `tokens` against `verifier`, `all` against `all_but_last`.

    a run's record files --each of four recipes, several seeds--> drafter --held-out records--> chain tau

Every drafter gets the same processor time on one thread (wall time of an idle core: a busy machine slows all
alike), the same records in the same order, and differs in the recipe alone. `verifier` pays for a second
product with the head in each step, so that it takes fewer steps. Last line: one JSON object.

    python benchmarks/label_sources.py --records runs/RUN/buffer --held-out runs/RUN/held_out \
        --target models/smollm2-135m --seconds 120 --seeds 3 --out RESULT.json
"""

from __future__ import annotations

import json
import statistics
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table

from dflash_online.distill.objective import block_objective
from dflash_online.distill.pack import pack_records
from dflash_online.distill.recipe import ZLAB, Recipe
from dflash_online.distill.statistics import SlotStatistics
from dflash_online.drafter.init import initialize, new_drafter_config
from dflash_online.evaluate.tau import evaluate_drafter
from dflash_online.target.frozen import FrozenHead, fastest_dtype
from dflash_online.target.model_info import TargetModelInfo
from dflash_online.wire.codec import decode_record
from dflash_online.wire.record import Record

BLOCK_SIZE, NUM_LAYERS, RECORDS_PER_STEP, ANCHORS_PER_STEP = 8, 2, 8, 64
LEARNING_RATE, WARMUP_STEPS = 1e-3, 20  # the demo's, but for the longer warm-up of longer runs
RECIPES = tuple(
    replace(ZLAB, name=f"{labels}, {layers}", label_source=labels, fc_layers=layers)
    for labels in ("tokens", "verifier")
    for layers in ("all", "all_but_last")
)


@dataclass(frozen=True)
class Material:
    """What all drafters share."""

    target: TargetModelInfo
    head: FrozenHead
    train: list[Record]
    held_out: list[Record]


def read_folder(folder: Path) -> list[Record]:
    """Every record file of a run, in the order of their names."""
    records = [decode_record(file.read_bytes()) for file in sorted(folder.glob("*.rec"))]
    if not records:
        raise typer.BadParameter(f"{folder} holds no *.rec file")
    return records


def train_and_measure(material: Material, recipe: Recipe, *, seed: int, seconds: float) -> dict[str, Any]:
    """One drafter: as many steps as the time allows, then held-out records."""
    config = new_drafter_config(
        material.target,
        num_layers=NUM_LAYERS,
        block_size=BLOCK_SIZE,
        target_layer_ids=material.train[0].header.layer_ids,
        fc_layers=recipe.fc_layers,
    )
    drafter = initialize(config, seed=seed)
    optimizer = torch.optim.AdamW(
        drafter.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.01
    )
    pick = torch.Generator().manual_seed(seed)
    sums, num_steps = SlotStatistics.zeros(BLOCK_SIZE), 0
    start = time.process_time()
    while (used := time.process_time() - start) < seconds:
        # Falls to a tenth over the last half of the time, whatever the number of steps.
        rate = LEARNING_RATE * min(1.0, (num_steps + 1) / WARMUP_STEPS) * min(1.0, 1.9 - 1.8 * used / seconds)
        for group in optimizer.param_groups:
            group["lr"] = rate
        order = torch.randperm(len(material.train), generator=pick)[:RECORDS_PER_STEP].tolist()
        batch = pack_records(
            [material.train[i] for i in order],
            block_size=BLOCK_SIZE,
            num_anchors=ANCHORS_PER_STEP,
            generator=pick,
        )
        result = block_objective(drafter, material.head, batch, recipe)
        optimizer.zero_grad(set_to_none=True)
        torch.autograd.backward(result.loss_sum / result.denominator)
        torch.nn.utils.clip_grad_norm_(drafter.parameters(), 1.0)
        optimizer.step()
        sums, num_steps = sums + result.stats, num_steps + 1
    with torch.no_grad():
        measured = evaluate_drafter(drafter.eval(), material.head, material.held_out)
    assert measured.stats is not None
    return {
        "recipe": recipe.name,
        "seed": seed,
        "steps": num_steps,
        "tau": measured.tau,
        "accuracy": measured.stats.accuracy(),
        "label_agreement": sums.label_agreement(),
    }


def table_of(runs: list[dict[str, Any]]) -> tuple[Table, dict[str, dict[str, Any]]]:
    """Means over seeds, one row per recipe."""
    table = Table("labels, fc layers", "tau by seed", "tau", "top-1 slot 1", "label agreement", "steps")
    means: dict[str, dict[str, Any]] = {}
    for recipe in RECIPES:
        some = [run for run in runs if run["recipe"] == recipe.name]
        means[recipe.name] = {
            "tau_by_seed": [round(run["tau"], 4) for run in some],
            "tau": round(statistics.fmean(run["tau"] for run in some), 4),
            "accuracy": [
                round(statistics.fmean(slot), 4) for slot in zip(*(r["accuracy"] for r in some), strict=True)
            ],
            "label_agreement": round(statistics.fmean(run["label_agreement"] for run in some), 4),
            "steps": [run["steps"] for run in some],
        }
        row = means[recipe.name]
        table.add_row(
            recipe.name,
            ", ".join(f"{tau:.3f}" for tau in row["tau_by_seed"]),
            f"{row['tau']:.3f}",
            f"{row['accuracy'][0]:.3f}",
            f"{row['label_agreement']:.3f}",
            ", ".join(map(str, row["steps"])),
        )
    return table, means


def main(
    records: Annotated[Path, typer.Option(help="Folder of record files to train on.")],
    held_out: Annotated[Path, typer.Option(help="Folder of record files to measure on.")],
    target: Annotated[Path, typer.Option(help="Folder of the target.")],
    seconds: Annotated[float, typer.Option(help="Processor time per drafter.")] = 120.0,
    seeds: Annotated[int, typer.Option(help="Drafters per recipe.")] = 3,
    out: Annotated[Path | None, typer.Option(help="JSON file for the last line.")] = None,
) -> None:
    """Train and measure all recipes, seed by seed."""
    torch.set_num_threads(1)
    info = TargetModelInfo.from_folder(target)
    head = FrozenHead.from_folder(target, dtype=fastest_dtype(info.hidden_size))
    material = Material(info, head, read_folder(records), read_folder(held_out))
    runs = []
    for seed in range(seeds):
        for recipe in RECIPES:
            runs.append(train_and_measure(material, recipe, seed=seed, seconds=seconds))
            print(
                f"{recipe.name}, seed {seed}: tau {runs[-1]['tau']:.3f}, {runs[-1]['steps']} steps",
                flush=True,
            )
    table, means = table_of(runs)
    Console(width=110).print(table)
    line = json.dumps(
        {
            "benchmark": "label_sources",
            "torch": torch.__version__,
            "head_dtype": str(head.weight_VH.dtype).removeprefix("torch."),
            "num_records": len(material.train),
            "num_held_out": len(material.held_out),
            "seconds": seconds,
            "seeds": seeds,
            "recipes": means,
        }
    )
    if out is not None:
        out.write_text(line + "\n", encoding="ascii")
    print(line)


if __name__ == "__main__":
    typer.run(main)
