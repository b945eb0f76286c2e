"""Plots are written where there is something to show; without matplotlib an error says what to install."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from dflash_online.bench.client import Answer, Exchange
from dflash_online.bench.plot import write_plots
from dflash_online.bench.report import AcceptanceDelta, BenchReport, PassResult
from dflash_online.errors import ConfigError
from dflash_online.evaluate.plot import require_matplotlib


def one_pass(policy: str, num_nodes: int, tpot_s: float) -> PassResult:
    answers = [
        Answer(text="a", num_tokens=11, ttft_s=0.0, last_token_s=10 * tpot_s * factor)
        for factor in (1.0, 1.5)
    ]
    return PassResult(
        policy=policy,
        concurrency=1,
        wall_s=1.0,
        exchanges=tuple(Exchange(answers=(answer,)) for answer in answers),
        acceptance=(AcceptanceDelta("v", policy, (5, 5)),) if num_nodes else (),
        has_own_cache=True,
        num_nodes=num_nodes,
    )


def report(*passes: PassResult) -> BenchReport:
    return BenchReport("u", "m", None, 2, 64, 0.0, passes)


def test_tau_and_speedup_become_png_files(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    passes = one_pass("off", 0, 0.2), one_pass("tree:16", 16, 0.1), one_pass("tree:4", 4, 0.15)
    files = write_plots(report(*passes), tmp_path / "new")
    assert [file.name for file in files] == ["tau.png", "speedup.png"]
    assert all(file.read_bytes().startswith(b"\x89PNG") for file in files)


def test_what_has_no_point_is_not_written(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    assert write_plots(report(one_pass("off", 0, 0.2), one_pass("current", 7, 0.1)), tmp_path) == []
    assert [file.name for file in write_plots(report(one_pass("chain:7", 7, 0.1)), tmp_path)] == ["tau.png"]


def test_a_folder_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="--plots must be a folder that can be written"):
        write_plots(report(one_pass("chain:7", 7, 0.1)), tmp_path / "file")


def test_without_matplotlib_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.delitem(sys.modules, "matplotlib.figure", raising=False)
    with pytest.raises(ConfigError, match=r"pip install 'dflash-online\[plots\]'"):
        require_matplotlib(Path("plots"))
