"""A rival lies in its own process's path only, and one that is not installed is named, not passed over."""

from __future__ import annotations

import dataclasses
import re
from importlib.util import find_spec

import pytest

from tests.rival import Rival


@pytest.mark.rival("dflash")
def test_a_rival_is_found_in_its_own_folder_and_nowhere_else(rival):
    said = rival.run("from importlib.util import find_spec; print(find_spec('dflash').origin)")
    assert said.strip() == f"{rival.folder}/dflash/__init__.py"
    assert find_spec("dflash") is None


def test_a_rival_of_another_version_or_without_a_folder_is_not_installed(tmp_path, monkeypatch):
    (tmp_path / "dflash" / "dflash-0.1.0.dist-info").mkdir(parents=True)
    monkeypatch.setenv("DFLASH_RIVALS", str(tmp_path))
    found = Rival.named("dflash")
    assert (found.version, found.is_installed, str(found)) == ("0.1.0", True, "dflash 0.1.0")
    assert not dataclasses.replace(found, version="0.2.0").is_installed
    assert not Rival.named("specforge").is_installed
    monkeypatch.delenv("DFLASH_RIVALS")
    assert not Rival.named("dflash").is_installed


@pytest.mark.rival("dflash")
def test_a_rival_that_fails_says_why(rival):
    with pytest.raises(AssertionError, match=re.escape("dflash 0.1.0 ended with 3")):
        rival.run("import sys; sys.exit(3)")
