"""`dflash-online demo`: the whole loop on one machine with a real small model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from dflash_online.cli.output import JsonOption, console_for
from dflash_online.demo.config import EXAMPLE_CONFIG, DemoConfig
from dflash_online.demo.interruption import Interrupted

EXAMPLE = "Example: dflash-online demo --minutes 8"


def demo(
    minutes: Annotated[float, typer.Option(help="Of training.")] = 8.0,
    workdir: Annotated[Path, typer.Option(help="Logs, records, checkpoints; emptied first.")] = Path(
        "demo-out"
    ),
    models: Annotated[Path, typer.Option(help="Where the model is kept for the next time.")] = Path("models"),
    config: Annotated[Path, typer.Option(help="Run config to train with.")] = EXAMPLE_CONFIG,
    as_json: JsonOption = False,
) -> None:
    """Fetch a model, make a drafter, serve, train, swap, and measure: first version against last.

    Ends with a table and one JSON line. Exit code 1 when a request failed, a greedy output differs, or
    something was left behind. Ctrl-C at any moment ends every process that was started.
    """
    import json

    from dflash_online.demo.run import run_demo

    console = console_for(as_json=as_json)
    settings = DemoConfig(minutes=minutes, workdir=workdir, models_dir=models, run_config=config)
    try:
        result = run_demo(settings, console)
    except Interrupted as interrupted:
        typer.echo("dflash-online: ended by a signal; no process was left behind", err=True)
        raise typer.Exit(interrupted.exit_code) from None
    console.print(result.table())
    found = result.to_json()
    # The one command whose JSON line comes in any case: it is the demo's result.
    typer.echo(json.dumps(found))
    is_clean = not found["leftover_processes"] and found["ports_free"]
    if found["requests_failed"] or found["outputs_identical"] < found["outputs_compared"] or not is_clean:
        raise typer.Exit(1)
