"""`dflash-online bench`: measure a live server, ours or any that speaks the OpenAI form."""

from __future__ import annotations

import asyncio
import json
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from dflash_online.cli.output import JsonOption, console_for, finish
from dflash_online.errors import ConfigError
from dflash_online.prompts.item import PromptItem
from dflash_online.prompts.read import open_prompts, split_prompts

if TYPE_CHECKING:  # importing them takes seconds (torch), which `--help` need not
    from dflash_online.bench.measure import BenchConfig
    from dflash_online.bench.report import BenchReport

Number = TypeVar("Number", int, float)

EXAMPLE = "Example: dflash-online bench --url http://127.0.0.1:30000 --policy off,chain:7,tree:16"


def bench(
    url: Annotated[str, typer.Option(help="Base URL of the server, without /v1.")] = "http://127.0.0.1:30000",
    concurrency: Annotated[str, typer.Option(help="Requests in flight, e.g. 1,4,12: one pass each.")] = "1",
    policy: Annotated[
        str, typer.Option(help="current, or a list such as off,chain:7,tree:16: one pass each.")
    ] = "current",
    prompts: Annotated[
        str, typer.Option(help="stdlib-docstrings, a file, or a dataset folder.")
    ] = "stdlib-docstrings",
    num_prompts: Annotated[int, typer.Option(min=1, help="Prompts to send, the first ones.")] = 32,
    held_out_share: Annotated[
        float | None, typer.Option(min=0.0, max=1.0, help="Only the held-out part, split as a run splits it.")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the split: the run config's.")] = 0,
    max_tokens: Annotated[int, typer.Option(min=1, help="Per answer.")] = 128,
    temperature: Annotated[str, typer.Option(help="Sampling temperatures, e.g. 0,1: one pass each.")] = "0",
    num_nodes: Annotated[int | None, typer.Option(min=1, help="For policies that name none.")] = None,
    model: Annotated[str | None, typer.Option(help="Default: the first that the server lists.")] = None,
    warmup: Annotated[int, typer.Option(min=0, help="Requests before each pass, not counted.")] = 2,
    timeout: Annotated[float, typer.Option(min=0.1, help="Seconds for one request.")] = 600.0,
    max_minutes: Annotated[
        float, typer.Option(min=0.01, help="A pass sends nothing after that long.")
    ] = 30.0,
    extra_body: Annotated[str, typer.Option(help="JSON object added to each request.")] = "{}",
    api_key: Annotated[str | None, typer.Option(envvar="DFLASH_API_KEY", help="Bearer token.")] = None,
    out: Annotated[Path | None, typer.Option(help="Also write the JSON to this file.")] = None,
    plots: Annotated[
        Path | None, typer.Option(help="Folder for PNG plots over draft nodes; needs matplotlib.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """tau, tokens/s, time to first token and per output token, failures; greedy outputs compared.

    Exit code 1 when a request failed or two greedy outputs differ.
    """
    from dflash_online.bench.measure import BenchConfig
    from dflash_online.evaluate.plot import require_matplotlib

    if plots is not None:
        require_matplotlib(plots)
    items = iter(open_prompts(prompts))
    if held_out_share is not None:
        items = iter(split_prompts(items, held_out_share, seed)[1])
    config = BenchConfig(
        url=url,
        concurrencies=_numbers("--concurrency", concurrency, int),
        policies=tuple(part.strip() for part in policy.split(",") if part.strip()),
        num_nodes=num_nodes,
        model=model,
        max_tokens=max_tokens,
        temperatures=_numbers("--temperature", temperature, float),
        num_warmup=warmup,
        request_timeout_s=timeout,
        max_pass_s=60 * max_minutes,
        api_key=api_key,
        extra_body=_object(extra_body),
    )
    console = console_for(as_json=as_json)
    report = _run(config, list(islice(items, num_prompts)), console)
    _finish(report, console, out, plots, as_json=as_json)


def _finish(
    report: BenchReport, console: Console, out: Path | None, plots: Path | None, *, as_json: bool
) -> None:
    """Table, files, JSON line and exit code."""
    result = report.to_json()
    console.print(report.table())
    if result["outputs_compared"]:
        console.print(
            f"greedy outputs identical: {result['outputs_identical']} of {result['outputs_compared']}"
        )
    if result["first_difference"]:
        console.print(result["first_difference"], markup=False)
    if out is not None:
        _write(out, json.dumps(result, indent=2) + "\n")
    if plots is not None:
        _plot(report, plots, console)
    finish(console, result, as_json=as_json)
    if result["requests_failed"] or result["outputs_identical"] < result["outputs_compared"]:
        raise typer.Exit(1)


def _plot(report: BenchReport, folder: Path, console: Console) -> None:
    from dflash_online.bench.plot import write_plots

    files = write_plots(report, folder)
    for file in files:
        console.print(f"plot: {file}", markup=False)
    if not files:
        console.print("nothing to plot: no pass has both a number of draft nodes and an interval")


def _run(config: BenchConfig, prompts: list[PromptItem], console: Console) -> BenchReport:
    """Run every pass, with one progress bar per pass on a terminal."""
    from dflash_online.bench.measure import run_bench

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        tasks: dict[str, TaskID] = {}

        def show(name: str, num_done: int, num_all: int) -> None:
            if name not in tasks:
                tasks[name] = bar.add_task(name, total=num_all)
            bar.update(tasks[name], completed=num_done)

        return asyncio.run(run_bench(config, prompts, show))


def _numbers(option: str, text: str, kind: type[Number]) -> tuple[Number, ...]:
    try:
        return tuple(kind(part) for part in text.split(","))
    except ValueError as error:
        name = "whole numbers" if kind is int else "numbers"
        raise ConfigError(option, text, f"{name} separated by commas") from error


def _object(text: str) -> dict[str, object]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise ConfigError("--extra-body", text, f"JSON ({error})") from error
    if not isinstance(value, dict):
        raise ConfigError("--extra-body", text, "a JSON object")
    return value


def _write(path: Path, text: str) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError("--out", str(path), f"a file that can be written ({error})") from error
