"""`dflash-online trainer`: the trainer service as a child process."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from dflash_online.cli.serve import serve_module

app = typer.Typer(help="Run the trainer service.", no_args_is_help=True)


@app.callback()
def _group() -> None:
    """Keep `serve` a command of its own although it is the only one."""


@app.command(epilog="Example: dflash-online trainer serve --runs runs --port 8400")
def serve(
    runs: Annotated[Path, typer.Option(help="Folder of runs: database, records, checkpoints.")] = Path(
        "runs"
    ),
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535)] = 8400,
    trainer_flags: Annotated[list[str] | None, typer.Argument(help="After `--`: further flags.")] = None,
) -> None:
    """Start the trainer service. SIGINT and SIGTERM are passed on; the exit code is the service's."""
    arguments = ["--runs", str(runs), "--host", host, "--port", str(port), *(trainer_flags or ())]
    serve_module("trainer", "trainer", arguments, host, port)
