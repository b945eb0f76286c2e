"""A folder appears whole or not at all, for one writer that replaces and for those that must not."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap

import pytest

from dflash_online.drafter.folder import new_folder
from dflash_online.errors import CheckpointError


def names(path) -> list[str]:
    return sorted(file.name for file in path.iterdir())


def test_nothing_is_under_the_final_name_before_the_end(tmp_path):
    with new_folder(tmp_path / "deep" / "v") as scratch:
        (scratch / "a").write_text("1")
        assert not (tmp_path / "deep" / "v").exists()
    assert names(tmp_path / "deep") == ["v"]
    assert (tmp_path / "deep/v/a").read_text() == "1"


def test_a_folder_that_exists_is_kept_unless_it_is_to_be_replaced(tmp_path):
    with new_folder(tmp_path / "v") as scratch:
        (scratch / "old").write_text("1")
    with pytest.raises(CheckpointError, match="exists already"), new_folder(tmp_path / "v"):
        pytest.fail("the block must not run")
    assert names(tmp_path / "v") == ["old"]
    with new_folder(tmp_path / "v", replace=True) as scratch:
        (scratch / "new").write_text("1")
        assert names(tmp_path / "v") == ["old"]
    assert names(tmp_path / "v") == ["new"]
    assert names(tmp_path) == ["v"]


def test_an_error_inside_leaves_nothing_and_one_of_the_disk_is_named_with_its_subject(tmp_path):
    with pytest.raises(ZeroDivisionError), new_folder(tmp_path / "v") as scratch:
        (scratch / "a").write_text(str(1 // 0))
    with (
        pytest.raises(CheckpointError, match=r"optimizer state cannot be written: .*nowhere"),
        new_folder(tmp_path / "v", what="optimizer state ") as scratch,
    ):
        (scratch / "nowhere" / "a").write_text("1")
    assert names(tmp_path) == []


def test_what_a_killed_writer_left_goes_away_with_the_next_one_that_replaces(tmp_path):
    script = textwrap.dedent("""
        import os, sys
        from pathlib import Path
        from dflash_online.drafter.folder import new_folder
        with new_folder(Path(sys.argv[1]), replace=True) as scratch:
            (scratch / "a").write_text("1")
            os._exit(9)  # no finally
    """)
    run = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path / "v")], env=dict(os.environ), check=False
    )
    assert run.returncode == 9
    (leftover,) = names(tmp_path)
    assert leftover.startswith(".v.")
    with new_folder(tmp_path / "v", replace=True) as scratch:
        (scratch / "b").write_text("1")
    assert names(tmp_path) == ["v"]
