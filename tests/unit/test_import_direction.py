"""Three packages, one direction of imports, read from the source: nothing is imported here."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

FORBIDDEN = {
    "dflash_online": {"server_patches", "trainer", "tests", "sglang", "sgl_kernel", "fastapi", "uvicorn"},
    "server_patches": {"trainer", "tests"},
    "trainer": {"server_patches", "tests", "sglang", "sgl_kernel"},
}


def imported_names(source: str) -> Iterator[tuple[int, str]]:
    """Line and dotted name of every import, also within functions and by `importlib.import_module`."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.lineno, node.module
        elif isinstance(node, ast.Call) and isinstance(node.func, (ast.Attribute, ast.Name)):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else node.func.id
            if name in ("import_module", "__import__") and node.args:
                first = node.args[0]
                if isinstance(first, ast.Constant) and isinstance(first.value, str):
                    yield node.lineno, first.value


@pytest.mark.parametrize("package", FORBIDDEN)
def test_no_package_imports_against_the_direction(package: str) -> None:
    files = sorted((ROOT / package).rglob("*.py"))
    assert len(files) > 5
    wrong = [
        f"{file.relative_to(ROOT)}:{line} imports {name}"
        for file in files
        for line, name in imported_names(file.read_text(encoding="utf-8"))
        if name.partition(".")[0] in FORBIDDEN[package]
    ]
    assert wrong == []


def test_hidden_imports_are_seen() -> None:
    source = "def f():\n    from sglang.srt import a\n    import_module('trainer.loop')\nimport os.path\n"
    assert sorted(imported_names(source)) == [(2, "sglang.srt"), (3, "trainer.loop"), (4, "os.path")]
