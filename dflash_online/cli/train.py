"""`dflash-online train`: drive the trainer service."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from dflash_online.cli.output import JsonOption, console_for, finish, merge, read_key_values
from dflash_online.errors import ConfigError
from dflash_online.trainer_client import DEFAULT_TRAINER_URL, TrainerClient

app = typer.Typer(help="Drive a trainer service: start, watch, steer and end a run.", no_args_is_help=True)

TrainerOption = Annotated[
    str, typer.Option("--trainer", envvar="DFLASH_TRAINER", help="URL of the trainer service.")
]


@app.command(epilog="Example: dflash-online train start --config examples/smollm2-cpu/run.json --set seed=1")
def start(
    config: Annotated[Path, typer.Option(help="Run config, a JSON file.")],
    changes: Annotated[
        list[str] | None, typer.Option("--set", help="key=value, over the file; repeatable.")
    ] = None,
    trainer: TrainerOption = DEFAULT_TRAINER_URL,
    as_json: JsonOption = False,
) -> None:
    """Start a run and print its config with every default."""
    run_config = merge(read_run_config(config), read_key_values(changes or []))
    answer = TrainerClient(trainer).start(run_config)
    _show(console_for(as_json=as_json), answer, as_json=as_json)


@app.command(epilog="Example: dflash-online train status --json")
def status(trainer: TrainerOption = DEFAULT_TRAINER_URL, as_json: JsonOption = False) -> None:
    """What the run does now."""
    _show(console_for(as_json=as_json), TrainerClient(trainer).status(), as_json=as_json)


@app.command(epilog="Example: dflash-online train pause")
def pause(trainer: TrainerOption = DEFAULT_TRAINER_URL, as_json: JsonOption = False) -> None:
    """Stop stepping for a while; the target serves on."""
    _act(trainer, "pause", as_json=as_json)


@app.command(epilog="Example: dflash-online train resume")
def resume(trainer: TrainerOption = DEFAULT_TRAINER_URL, as_json: JsonOption = False) -> None:
    """Go on after a pause."""
    _act(trainer, "resume", as_json=as_json)


@app.command(epilog="Example: dflash-online train stop")
def stop(trainer: TrainerOption = DEFAULT_TRAINER_URL, as_json: JsonOption = False) -> None:
    """End the run with a last checkpoint."""
    _act(trainer, "stop", as_json=as_json)


@app.command(epilog="Example: dflash-online train publish")
def publish(trainer: TrainerOption = DEFAULT_TRAINER_URL, as_json: JsonOption = False) -> None:
    """Bring the weights as they are now into the running target."""
    _act(trainer, "publish", as_json=as_json)


@app.command(epilog="Example: dflash-online train rollback")
def rollback(trainer: TrainerOption = DEFAULT_TRAINER_URL, as_json: JsonOption = False) -> None:
    """Make the version before the live one live again."""
    _act(trainer, "rollback", as_json=as_json)


@app.command(epilog="Example: dflash-online train recipes")
def recipes(as_json: JsonOption = False) -> None:
    """Every named training recipe, in full."""
    from dflash_online.distill.recipe import RECIPES, Recipe

    known = {name: dataclasses.asdict(recipe) for name, recipe in RECIPES.items()}
    console = console_for(as_json=as_json)
    table = Table("field", *known)
    for field in dataclasses.fields(Recipe):
        if field.name != "name":
            table.add_row(field.name, *(_cell(fields[field.name]) for fields in known.values()))
    console.print(table)
    finish(console, {"recipes": known}, as_json=as_json)


def read_run_config(path: Path) -> dict[str, Any]:
    """The JSON object in a run config file.

    Raises:
        ConfigError: no such file, or not a JSON object.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError("run config", str(path), f"a readable JSON file ({error})") from error
    if not isinstance(value, dict):
        raise ConfigError("run config", str(path), f"a JSON object, holds a {type(value).__name__}")
    return value


def _cell(value: object) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {_cell(item)}" for key, item in value.items())
    if isinstance(value, (list, tuple)):
        return " to ".join(map(str, value))
    return "-" if value is None else str(value)


def _act(url: str, action: str, *, as_json: bool) -> None:
    _show(console_for(as_json=as_json), TrainerClient(url).act(action), as_json=as_json)


def _show(console: Console, answer: dict[str, Any], *, as_json: bool) -> None:
    _show_fields(console, answer)
    finish(console, answer, as_json=as_json)


def _show_fields(console: Console, fields: dict[str, Any], title: str | None = None) -> None:
    table = Table(title=title, show_header=False, box=None, title_justify="left")
    for key, value in fields.items():
        text = json.dumps(value, indent=2) if isinstance(value, (dict, list)) else str(value)
        table.add_row(key, text)
    console.print(table, markup=False)
