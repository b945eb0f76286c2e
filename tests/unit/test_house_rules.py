"""What can be checked cheaply of the house style: headers, sizes, plain text, names, no foreign paths."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("dflash_online", "server_patches", "trainer")
FILES = sorted(file for package in (*PACKAGES, "tests") for file in (ROOT / package).rglob("*.py"))
MODULES = [file for file in FILES if file.relative_to(ROOT).parts[0] in PACKAGES]

MAX_LINES, MAX_FUNCTION_LINES = 400, 60


def named(files: list[Path]) -> list[str]:
    return [str(file.relative_to(ROOT)) for file in files]


def test_every_module_says_what_it_is() -> None:
    silent = [
        file for file in FILES if file.read_text() and not ast.get_docstring(ast.parse(file.read_text()))
    ]
    assert named(silent) == []


def test_source_is_ascii() -> None:
    assert named([file for file in FILES if not file.read_bytes().isascii()]) == []


def test_no_module_is_too_long() -> None:
    assert named([file for file in MODULES if file.read_text().count("\n") > MAX_LINES]) == []


def test_no_function_is_too_long() -> None:
    long = [
        f"{file.relative_to(ROOT)}:{node.lineno} {node.name}"
        for file in MODULES
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
        and (node.end_lineno or node.lineno) - node.lineno >= MAX_FUNCTION_LINES
    ]
    assert long == []


@pytest.mark.parametrize("name", ["util", "utils", "helper", "helpers", "common", "misc"])
def test_no_room_lacks_an_idea(name: str) -> None:
    assert named([file for file in FILES if name in file.relative_to(ROOT).with_suffix("").parts]) == []


def test_packages_print_nothing_and_swallow_nothing() -> None:
    swallowed = re.compile(r"except( Exception| BaseException)?:\s*\n\s*pass")
    assert named([file for file in MODULES if swallowed.search(file.read_text())]) == []
