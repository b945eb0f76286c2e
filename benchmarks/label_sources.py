"""Which labels train the better drafter? `tokens` against `verifier`, `all` against `all_but_last`.

    two prompt files --the target, greedily--> record files, kept
    record files --each of four recipes, several seeds--> drafter --held-out records--> chain tau

Every drafter gets the same processor time on one thread (wall time of an idle core: a busy machine slows all
alike), the same records in the same order, and differs in the recipe alone. `verifier` pays for a second
product with the head in each step, so that it takes fewer steps. Last line: one JSON object.

    python benchmarks/label_sources.py --prompts gsm8k_train.jsonl --held-out-prompts gsm8k_test.jsonl \
        --target models/smollm2-135m --seconds 120 --seeds 3 --out RESULT.json

The target answers in this process, in bfloat16 where that is fast, else in float32; features are bfloat16. A
second run finds the answers in `--cache`. With `--records` and `--held-out`, two folders of record files such
as a run's `buffer` and `held_out`, nothing is answered.
"""

from __future__ import annotations

import hashlib
import json
import statistics
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table

from dflash_online.distill.objective import block_objective
from dflash_online.distill.pack import pack_records
from dflash_online.distill.recipe import ZLAB, Recipe
from dflash_online.distill.statistics import SlotStatistics
from dflash_online.drafter.config import select_layer_ids
from dflash_online.drafter.init import initialize, new_drafter_config
from dflash_online.evaluate.sources import records_in_process, take_prompts
from dflash_online.evaluate.tau import evaluate_drafter
from dflash_online.target.frozen import FrozenHead, fastest_dtype
from dflash_online.target.model_info import TargetModelInfo
from dflash_online.wire.codec import decode_record, encode_record
from dflash_online.wire.record import Record

BLOCK_SIZE, NUM_LAYERS, RECORDS_PER_STEP, ANCHORS_PER_STEP = 8, 2, 8, 64
NUM_FEATURES, ANSWER_TOKENS = 5, 96
LEARNING_RATE, WARMUP_STEPS = 1e-3, 20  # the demo's, but for the longer warm-up of longer runs
CACHE = Path(tempfile.gettempdir()) / "dflash-label-sources"
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


def answer(prompts: Path, num_records: int, target: Path, cache: Path, *, dtype: torch.dtype) -> Path:
    """A folder with the target's greedy answers to the first prompts of a file, made unless it is there.

    Its name depends on all that an answer depends on; the target's files count by size and date.
    """
    files = sorted((file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in target.iterdir())
    origin = repr((files, NUM_FEATURES, ANSWER_TOKENS, dtype)).encode() + prompts.read_bytes()
    folder = cache / f"{prompts.stem}-{num_records}-{hashlib.blake2b(origin, digest_size=6).hexdigest()}"
    if folder.is_dir():
        return folder
    items = take_prompts(str(prompts), num_records)
    if len(items) < num_records:
        raise typer.BadParameter(f"{prompts} holds {len(items)} prompts, fewer than {num_records}")
    layer_ids = select_layer_ids(TargetModelInfo.from_folder(target).num_layers, NUM_FEATURES)
    records = records_in_process(items, target, layer_ids, ANSWER_TOKENS, print, dtype=dtype)
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache) as unfinished:
        made = Path(unfinished) / "records"  # takes its name when whole: a run may be stopped
        made.mkdir()
        for i, record in enumerate(track(records, f"answering {prompts.name}", len(items))):
            (made / f"{i:06}.rec").write_bytes(b"".join(encode_record(record)))
        made.rename(folder)
    return folder


def read_folder(folder: Path) -> list[Record]:
    """Every record file of a folder, in the order of their names."""
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
    target: Annotated[Path, typer.Option(help="Folder of the target.")],
    prompts: Annotated[Path | None, typer.Option(help="Prompt file to train on the answers to.")] = None,
    held_out_prompts: Annotated[Path | None, typer.Option(help="Prompt file to measure on.")] = None,
    num_records: Annotated[int, typer.Option(min=RECORDS_PER_STEP, help="Of --prompts.")] = 256,
    num_held_out: Annotated[int, typer.Option(min=1, help="Of --held-out-prompts.")] = 48,
    cache: Annotated[Path, typer.Option(help="Folder that keeps the answers.")] = CACHE,
    records: Annotated[Path | None, typer.Option(help="Instead: folder of records to train on.")] = None,
    held_out: Annotated[Path | None, typer.Option(help="Instead: folder of records to measure on.")] = None,
    seconds: Annotated[float, typer.Option(help="Processor time per drafter.")] = 120.0,
    seeds: Annotated[int, typer.Option(help="Drafters per recipe.")] = 3,
    out: Annotated[Path | None, typer.Option(help="JSON file for the last line.")] = None,
) -> None:
    """Train and measure all recipes, seed by seed."""
    torch.set_num_threads(1)
    info = TargetModelInfo.from_folder(target)
    dtype = fastest_dtype(info.hidden_size)
    if prompts is not None and held_out_prompts is not None:
        records = answer(prompts, num_records, target, cache, dtype=dtype)
        held_out = answer(held_out_prompts, num_held_out, target, cache, dtype=dtype)
    if records is None or held_out is None:
        raise typer.BadParameter("give --prompts and --held-out-prompts, or --records and --held-out")
    head = FrozenHead.from_folder(target, dtype=dtype)
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
