"""Docstrings become requests; source text is read, never run."""

from __future__ import annotations

import pytest

from dflash_online.prompts.docstrings import prompts_from_source

_SOURCE = '''
raise SystemExit("this source must never be run")

def area(width: float, height=1.0, *rest: int, unit="m", **more):
    """Return the area of a rectangle.  More is said here.

    And here.
    """

class Shelf:
    """A shelf."""

    def put(self, book, /, place=None):
        """Puts a book onto the shelf and
        says where it stands."""

    @classmethod
    def empty(cls):
        """Create a shelf without any book."""

    def _hidden(self):
        """Return what nobody may see here."""

def untold(a): pass
def short(a):
    """Return it."""
def noun(a):
    """Wrapper around another function of the module."""
'''


def test_functions_and_methods_become_requests_in_source_order() -> None:
    assert list(prompts_from_source(_SOURCE)) == [
        "Write a Python function `area(width, height=1.0, *rest, unit='m', **more)` that "
        "returns the area of a rectangle.",
        "Write a Python function `put(book, /, place=None)` that "
        "puts a book onto the shelf and says where it stands.",
        "Write a Python function `empty()` that creates a shelf without any book.",
    ]


@pytest.mark.parametrize(
    ("first", "clause"),
    [
        ("Copy", "copies"),
        ("Display", "displays"),
        ("Search", "searches"),
        ("Passes", "passes"),
        ("Tries", "tries"),
    ],
)
def test_verbs_get_the_third_person(first: str, clause: str) -> None:
    source = f'def f(x):\n    """{first} all the things given."""\n'
    assert [prompt.split("` that ")[1] for prompt in prompts_from_source(source)] == [
        f"{clause} all the things given."
    ]
