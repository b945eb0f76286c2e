"""Rivals import beside our dependencies, and one that is not installed is named, not passed over."""

from __future__ import annotations

import dataclasses
import re

import pytest

from tests.rival import Rival


@pytest.mark.rival("specforge")
def test_the_rival_imports_from_its_own_folder(rival):
    said = rival.run("import specforge.algorithms.common.dflash_family_model as m; print('from', m.__file__)")
    assert said.splitlines()[-1].startswith(f"from {rival.folder}/specforge/")


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
