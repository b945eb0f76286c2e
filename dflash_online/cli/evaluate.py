"""`dflash-online eval`: how well a drafter drafts, on records that it was not trained on."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import track

from dflash_online.cli.output import JsonOption, console_for, finish
from dflash_online.errors import ConfigError

if TYPE_CHECKING:
    from dflash_online.drafter.checkpoint import Checkpoint
    from dflash_online.evaluate.harness import Harness
    from dflash_online.evaluate.table import Reports
    from dflash_online.wire.record import Record

EXAMPLE = (
    "Example: dflash-online eval --drafter runs/r1/checkpoints/v000003 --target models/smollm2-135m "
    "--records runs/r1/held_out --nodes 8,16 --against runs/r1/checkpoints/v000001"
)


def evaluate(
    drafter: Annotated[Path, typer.Option(help="Drafter folder.")],
    target: Annotated[
        Path, typer.Option(help="Hugging Face folder of the target: embedding and head are read.")
    ],
    records: Annotated[
        Path | None, typer.Option(help="Folder of record files (wire format v1), as a run's held_out.")
    ] = None,
    prompts: Annotated[
        str | None,
        typer.Option(help="Instead: prompts, a file or builtin; the target answers them, greedily."),
    ] = None,
    url: Annotated[
        str | None,
        typer.Option(help="With --prompts: the server that answers. Default: the target, loaded here."),
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(min=2, help="Of an answer to a prompt.")] = 96,
    nodes: Annotated[str, typer.Option(help="Budgets of draft trees, besides the root.")] = "8,16,32,64",
    against: Annotated[
        Path | None, typer.Option(help="A second drafter to compare on the same records, one by one.")
    ] = None,
    limit: Annotated[int, typer.Option(min=1, help="Records or prompts to take at most.")] = 64,
    plots: Annotated[Path | None, typer.Option(help="Folder for PNG plots; needs matplotlib.")] = None,
    out: Annotated[Path | None, typer.Option(help="File for the JSON result.")] = None,
    seed: Annotated[int, typer.Option(help="Of the bootstrap.")] = 0,
    as_json: JsonOption = False,
) -> None:
    """tau by chain, by trees and by the top-8 oracle; accuracy, loss and calibration per slot."""
    from dflash_online.evaluate.plot import require_matplotlib, write_plots

    if plots is not None:
        require_matplotlib(plots)
    console = console_for(as_json=as_json)
    checkpoints = [_load(folder, target) for folder in (drafter, against) if folder is not None]
    harnesses = _harnesses(checkpoints, target, _budgets(nodes))
    total, source = _open(records, prompts, url, target, checkpoints[0], limit, max_new_tokens, console)
    for record in track(source, f"walking {total} records", total, console=console, transient=True):
        for harness in harnesses.values():
            harness.add(record)
    reports = {label: harness.report for label, harness in harnesses.items()}
    _name_left_out(reports, console, "--records" if records else "--prompts", str(records or prompts))
    _show(reports, checkpoints, console)
    result: dict[str, Any] = {
        "drafters": [
            _identity(checkpoint) | report.to_json(seed=seed)
            for checkpoint, report in zip(checkpoints, reports.values(), strict=True)
        ]
    }
    if len(reports) == 2:
        result["paired"] = _compare(reports, seed, console)
    if plots is not None:
        result["plots"] = [str(path) for path in write_plots(reports, plots)]
    if out is not None:
        out.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    finish(console, result, as_json=as_json)


def _name_left_out(reports: Reports, console: Console, option: str, place: str) -> None:
    for label, report in reports.items():
        for reason, count in report.left_out.items():
            console.print(f"{label}: {count} records left out: {reason}", markup=False)
        if not report.record_ids:
            raise ConfigError(option, place, "a source of records that this drafter can be measured on")


def _show(reports: Reports, checkpoints: list[Checkpoint], console: Console) -> None:
    from dflash_online.evaluate.table import length_table, slot_table, tau_table

    for table in (tau_table(reports), slot_table(reports), length_table(reports)):
        console.print(table)
    for (label, report), checkpoint in zip(reports.items(), checkpoints, strict=True):
        error, std = report.calibration_error, _fc_std(checkpoint)
        console.print(f"{label}: calibration error {error:.3f}, std of fc.weight {std:.4f}", markup=False)


def _compare(reports: Reports, seed: int, console: Console) -> dict[str, Any]:
    """The first drafter against the second."""
    from dflash_online.evaluate.harness import compare_reports
    from dflash_online.evaluate.table import paired_table

    first, second = reports.values()
    pairs = {name: compare_reports(second, first, reading=name, seed=seed) for name in first.histograms}
    console.print(paired_table(pairs))
    return {name: asdict(pair) for name, pair in pairs.items()}


def _identity(checkpoint: Checkpoint) -> dict[str, Any]:
    return {
        "version": str(checkpoint.version),
        "path": str(checkpoint.path),
        "fc_weight_std": _fc_std(checkpoint),
    }


def _load(folder: Path, target: Path) -> Checkpoint:
    from dflash_online.drafter.checkpoint import check_against_target, load_checkpoint
    from dflash_online.target.model_info import TargetModelInfo

    checkpoint = load_checkpoint(folder)
    check_against_target(checkpoint.config, TargetModelInfo.from_folder(target))
    return checkpoint


def _harnesses(checkpoints: list[Checkpoint], target: Path, budgets: tuple[int, ...]) -> dict[str, Harness]:
    """By label: the version, with the folder's name where two versions are equal."""
    from dflash_online.drafter.model import DFlashDrafter
    from dflash_online.evaluate.harness import Harness
    from dflash_online.target.frozen import FrozenHead

    frozen = FrozenHead.from_folder(target)
    found: dict[str, Harness] = {}
    for checkpoint in checkpoints:
        label = str(checkpoint.version)
        label = f"{label} ({checkpoint.path})" if label in found else label
        model = DFlashDrafter.from_tensors(checkpoint.config, checkpoint.tensors).eval()
        found[label] = Harness(model, frozen, num_nodes=budgets)
    if len({checkpoint.config.target_layer_ids for checkpoint in checkpoints}) != 1:
        ids = [list(checkpoint.config.target_layer_ids) for checkpoint in checkpoints]
        raise ConfigError(
            "--against", str(checkpoints[1].path), f"a drafter of the same hooked layers, got {ids}"
        )
    return found


def _open(
    records: Path | None,
    prompts: str | None,
    url: str | None,
    target: Path,
    checkpoint: Checkpoint,
    limit: int,
    max_new_tokens: int,
    console: Console,
) -> tuple[int, Iterator[Record]]:
    """How many records there will be, and the records."""
    from dflash_online.evaluate import sources

    def warn(text: str) -> None:
        console.print(text, markup=False)

    if (records is None) == (prompts is None):
        raise ConfigError("--records, --prompts", [str(records), prompts], "exactly one of the two")
    if records is not None:
        if url is not None:
            raise ConfigError("--url", url, "used with --prompts only")
        files = sources.record_files(records, limit)
        return len(files), sources.records_of_folder(files, warn)
    items = sources.take_prompts(prompts or "", limit)
    if url is not None:
        return len(items), sources.records_of_server(items, target, url, max_new_tokens, warn)
    layer_ids = checkpoint.config.target_layer_ids
    return len(items), sources.records_in_process(items, target, layer_ids, max_new_tokens, warn)


def _budgets(text: str) -> tuple[int, ...]:
    from dflash_online.evaluate.readings import check_budgets

    try:
        return check_budgets([int(part) for part in text.split(",") if part.strip()])
    except ValueError as error:
        raise ConfigError("--nodes", text, "numbers with commas between them") from error


def _fc_std(checkpoint: Checkpoint) -> float:
    return float(checkpoint.tensors["fc.weight"].float().std())
