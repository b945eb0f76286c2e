"""What a command prints: tables and progress for people, one JSON line for programs.

With `--json` standard output ends with exactly one JSON line, and all else goes to standard error.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any

import typer
from rich.console import Console

JsonOption = Annotated[bool, typer.Option("--json", help="End standard output with one JSON line.")]


def console_for(*, as_json: bool) -> Console:
    """Where people read: standard output, or standard error when a program reads the former."""
    return Console(stderr=as_json, highlight=False, soft_wrap=True)


def finish(console: Console, result: Mapping[str, Any], *, as_json: bool, text: str | None = None) -> None:
    """The last words of a command: a line for people, or the JSON line."""
    if as_json:
        typer.echo(json.dumps(result))
    elif text is not None:
        console.print(text, markup=False)


def read_key_values(pairs: list[str]) -> dict[str, Any]:
    """`a.b=1` becomes `{"a": {"b": 1}}`; a value that is no JSON is a string.

    Raises:
        typer.BadParameter: a pair without `=`, or one that needs a value to be an object.
    """
    tree: dict[str, Any] = {}
    for pair in pairs:
        path, separator, text = pair.partition("=")
        if not separator or not path:
            raise typer.BadParameter(f"must be key=value, got {pair!r}", param_hint="--set")
        merge_at(tree, path.split("."), _value(text), pair)
    return tree


def merge(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """`base` with `changes` on top, objects merged key by key."""
    merged = dict(base)
    for key, value in changes.items():
        below = merged.get(key)
        merged[key] = merge(below, value) if isinstance(below, dict) and isinstance(value, dict) else value
    return merged


def merge_at(tree: dict[str, Any], path: list[str], value: object, pair: str) -> None:
    """Set one value deep in a tree of objects."""
    for key in path[:-1]:
        tree = tree.setdefault(key, {})
        if not isinstance(tree, dict):
            raise typer.BadParameter(f"{key} already has a value in {pair!r}", param_hint="--set")
    tree[path[-1]] = value


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text
