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


@app.command(epilog="Example: dflash-online trainer serve --runs-dir runs --port 8900")
def serve(
    runs_dir: Annotated[Path, typer.Option(help="Folder of database, records, checkpoints.")] = Path("runs"),
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535)] = 8900,
    trainer_flags: Annotated[list[str] | None, typer.Argument(help="After `--`: further flags.")] = None,
) -> None:
    """Start the trainer service. SIGINT and SIGTERM are passed on; the exit code is the service's."""
    arguments = ["--runs-dir", str(runs_dir), "--host", host, "--port", str(port), *(trainer_flags or ())]
    serve_module("trainer", "trainer", arguments, host, port)
