"""Shared by all tests: rivals by marker, and one guard for the end of the process."""

from __future__ import annotations

import ctypes
import sys

import pytest

from tests.rival import Rival


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip a test by the name of the rival that is not installed."""
    for mark in item.iter_markers("rival"):
        rival = Rival.named(*mark.args)
        if not rival.is_installed:
            pytest.skip(f"{rival} is not installed: make rivals")


@pytest.fixture
def rival(request: pytest.FixtureRequest) -> Rival:
    """The rival that the test's marker names."""
    return Rival.named(*request.node.get_closest_marker("rival").args)


def pytest_unconfigure() -> None:
    """Keep sentencepiece 0.2.1 (SGLang pins it, transformers imports it) from crashing at exit.

    Its SWIG runtime keeps a capsule whose destructor needs a type that Python 3.11 has already cleared by
    then: the run would end with signal 11 after every test has passed. A reference that is never given back
    keeps the destructor from running. TODO(sentencepiece): remove when SGLang pins a version without it.
    """
    for name, module in list(sys.modules.items()):
        if name.startswith("swig_runtime_data"):
            for value in vars(module).values():
                ctypes.pythonapi.Py_IncRef(ctypes.py_object(value))
