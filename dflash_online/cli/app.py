"""All command groups put together, and the one place where an error becomes an exit code.

    terminal --> main --> one file per command group --> library, or a service as a child process

Exit codes: 0 done; 1 the command ran and its result is a failure; 2 wrong usage, or a named error
(message on stderr, no traceback); 130 ended by Ctrl-C. `target serve` and `trainer serve` pass on the
service's own code. Imports neither trainer nor server_patches.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import NoReturn

import typer

from dflash_online.cli import bench, demo, doctor, drafter, evaluate, model, target, train, trainer
from dflash_online.errors import DflashOnlineError

app = typer.Typer(
    name="dflash-online",
    help="Keeps a DFlash drafter matched to the model that is serving right now.",
    epilog="Exit codes: 0 done, 1 the result is a failure, 2 usage or a named error, 130 Ctrl-C.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)
for _group, _name in (
    (model.app, "model"),
    (drafter.app, "drafter"),
    (target.app, "target"),
    (trainer.app, "trainer"),
    (train.app, "train"),
):
    app.add_typer(_group, name=_name)
app.command("eval", epilog=evaluate.EXAMPLE)(evaluate.evaluate)
app.command("doctor", epilog=doctor.EXAMPLE)(doctor.doctor)
app.command("bench", epilog=bench.EXAMPLE)(bench.bench)
app.command("demo", epilog=demo.EXAMPLE)(demo.demo)


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run one command and exit."""
    try:
        app(args=None if arguments is None else list(arguments))
    except DflashOnlineError as error:
        typer.echo(f"dflash-online: {error}", err=True)
        sys.exit(2)
    sys.exit(0)
