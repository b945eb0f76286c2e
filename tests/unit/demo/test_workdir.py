"""The demo empties only what is its own."""

from __future__ import annotations

from pathlib import Path

import pytest

from dflash_online.demo.workdir import own_workdir
from dflash_online.errors import ConfigError, ProcessError


def test_a_second_demo_starts_from_an_empty_folder(tmp_path: Path) -> None:
    with own_workdir(tmp_path / "out") as folder:
        (folder / "runs").mkdir()
        (folder / "runs" / "file").write_text("old")
        (folder / "result.json").write_text("{}")
    with own_workdir(tmp_path / "out") as folder:
        assert [path.name for path in folder.iterdir()] == [".dflash-demo"]


def test_a_foreign_folder_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("precious")
    with pytest.raises(ConfigError, match="a folder that is new, empty, or left by an earlier demo"):
        with own_workdir(tmp_path):
            pytest.fail("the folder must not be given out")
    assert (tmp_path / "thesis.txt").read_text() == "precious"


def test_two_demos_do_not_share_a_folder(tmp_path: Path) -> None:
    with own_workdir(tmp_path / "out"):
        with pytest.raises(ProcessError, match="another demo runs in"):
            with own_workdir(tmp_path / "out"):
                pytest.fail("the folder must not be given out twice")
