"""Entries of the list of policies."""

from __future__ import annotations

import pytest

from dflash_online.bench.policy import PolicyEntry
from dflash_online.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "mode", "num_nodes"),
    [
        ("off", "off", None),
        ("chain", "chain", None),
        ("chain:7", "chain", 7),
        ("tree:16", "tree", 16),
        ("auto", "auto", None),
        ("current", "current", None),
    ],
)
def test_an_entry_is_a_mode_with_or_without_a_number(text: str, mode: str, num_nodes: int | None) -> None:
    assert PolicyEntry.parse(text) == PolicyEntry(text, mode, num_nodes)


@pytest.mark.parametrize(
    "text", ["tree:", "tree:0", "tree:-1", "tree:x", "tree:1:2", "off:3", "current:3", "bush", ""]
)
def test_a_malformed_entry_is_refused_with_field_value_and_bound(text: str) -> None:
    with pytest.raises(ConfigError) as refused:
        PolicyEntry.parse(text)
    assert (refused.value.field, refused.value.value) == ("policy", text)
    assert refused.value.bound


def test_a_mode_that_drafts_nothing_takes_no_default() -> None:
    assert PolicyEntry.parse("off").nodes_or(5) is None
    assert PolicyEntry.parse("tree").nodes_or(5) == 5
    assert PolicyEntry.parse("tree:8").nodes_or(5) == 8
