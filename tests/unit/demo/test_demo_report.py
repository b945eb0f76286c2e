"""The JSON line that scripts rely on, and what the screen shows."""

from __future__ import annotations

import io
import json
from typing import Any

import pytest
from rich.console import Console

from dflash_online.bench.client import Answer, Exchange
from dflash_online.bench.report import AcceptanceDelta, BenchReport, PassResult
from dflash_online.demo.memory import PeakMemory, process_label
from dflash_online.demo.report import DemoResult
from dflash_online.demo.screen import DemoScreen, LoopView, view_panel

PROMISED = (
    "tau_first tau_last outputs_compared outputs_identical requests_sent requests_failed swaps"
    " swap_pause_max_ms tok_per_s_off tok_per_s_on drafter_version_last peak_rss_mb wall_s"
).split()

INFO = {
    "sglang_version": "0.5.23",
    "device": "cpu",
    "drafter": {"version": "4-ab12cd34ef56", "num_swaps": 3, "max_pause_ms": 11.2},
}


def status(**changes: Any) -> dict[str, Any]:
    live = {"chain": {"tau": 1.5, "num_steps": 200, "histogram": [100, 100]}}
    versions = [
        {"version": "1-000000000000", "state": "served_before", "step": None, "live": {}},
        {
            "version": "4-ab12cd34ef56",
            "state": "published",
            "step": 40,
            "held_out_tau": 1.4,
            "published_at": 1.0,
            "live": live,
        },
    ]
    return {
        "state": "running",
        "step": 50,
        "metrics": {"loss": 3.25},
        "records": {"num_total": 90, "num_held_out": 10, "num_unused": 5, "num_tokens": 9000, "dropped": {}},
        "buffer": {"bytes": 3 << 20},
        "versions": versions,
        **changes,
    }


def report(concurrency: int, **passes: tuple[str, list[int], float]) -> BenchReport:
    def one(policy: str, text: str, histogram: list[int], wall_s: float) -> PassResult:
        answer = Answer(text=text, num_tokens=30, ttft_s=0.1, last_token_s=0.5)
        failed = Exchange(answers=(), failure="timeout")
        return PassResult(
            policy=policy,
            concurrency=concurrency,
            wall_s=wall_s,
            exchanges=(Exchange(answers=(answer,)), failed),
            acceptance=(AcceptanceDelta("v", policy, tuple(histogram)),) if histogram else (),
            has_own_cache=True,
        )

    return BenchReport(
        "u", "m", None, 2, 64, 0.0, tuple(one(policy, *figures) for policy, figures in passes.items())
    )


def result() -> DemoResult:
    return DemoResult(
        first=report(4, off=("a", [], 1.0), chain=("a", [10], 2.0)),
        last=report(4, chain=("a", [5, 5], 1.0), tree=("a", [5, 0, 5], 1.0)),
        speed=report(1, off=("b", [], 3.0), chain=("c", [0, 10], 1.5), tree=("b", [0, 10], 1.2)),
        info=INFO,
        status=status(),
        peak_rss_mb={"demo": 100.0, "target": 3000.0},
        minutes=1.0,
        wall_s=99.0,
        steps_s={"train": 60.0},
        num_leftover_processes=0,
        are_ports_free=True,
    )


def test_every_promised_key_is_there_with_its_figure() -> None:
    line = json.loads(json.dumps(result().to_json()))
    assert {key: line[key] for key in PROMISED} == {
        "tau_first": 1.0,
        "tau_last": 1.5,
        "outputs_compared": 5,
        "outputs_identical": 4,
        "requests_sent": 14,
        "requests_failed": 7,
        "swaps": 3,
        "swap_pause_max_ms": 11.2,
        "tok_per_s_off": 10.0,
        "tok_per_s_on": 20.0,
        "drafter_version_last": "4-ab12cd34ef56",
        "peak_rss_mb": {"demo": 100.0, "target": 3000.0},
        "wall_s": 99.0,
    }
    assert (line["tau_last_tree"], line["tok_per_s_tree"]) == (2.0, 25.0)
    assert line["versions_published"] == 1
    assert line["records_captured"] == 100
    assert "off has 'b', chain has 'c'" in line["first_difference"]


def shown(thing: Any) -> str:
    console = Console(file=io.StringIO(), width=140, record=True)
    console.print(thing)
    return console.export_text()


def test_the_table_has_a_row_per_pass() -> None:
    text = shown(result().table())
    assert text.count("chain") == 3
    assert "1.500" in text


def test_the_live_view_shows_tau_now_and_per_version() -> None:
    view = LoopView(status=status(), info=INFO, elapsed_s=30, total_s=60, tok_per_s=42.0)
    assert view.tau_now() == 1.5
    assert view.num_published() == 1
    text = shown(view_panel(view))
    for part in ("1.500", "3.250", "42 tok/s", "4-ab12cd34ef56", "1.400", "30 of 60 s"):
        assert part in text, part
    assert "tau 1.500 (4-ab12cd34ef56), step 50, loss 3.250, records 90" in view.line()


def test_the_live_view_bears_a_run_that_has_nothing_yet() -> None:
    early = status(metrics=None, versions=[], step=0)
    info = {"drafter": {"version": "1-000000000000", "num_swaps": 0, "max_pause_ms": None}}
    view = LoopView(status=early, info=info, elapsed_s=0, total_s=60, tok_per_s=0.0)
    assert "tau now" in shown(view_panel(view))
    assert "tau - (1-000000000000)" in view.line()


def test_off_a_terminal_the_screen_writes_plain_lines() -> None:
    file = io.StringIO()
    with DemoScreen(Console(file=file, width=200)) as screen:
        screen.step("a step")
        screen.waiting("seen on terminals alone")
        view = LoopView(status=status(), info=INFO, elapsed_s=30, total_s=60, tok_per_s=42.0)
        screen.show(view)
        screen.show(view)
    lines = file.getvalue().splitlines()
    assert lines[0] == "[00:00] a step"
    assert len(lines) == 2


@pytest.mark.parametrize(
    ("command", "label"),
    [
        (["/usr/bin/python3.11", "-u", "-m", "trainer", "--port", "1"], "trainer"),
        (["sglang::scheduler"], "sglang::scheduler"),
        (["/usr/bin/torchrun", "x"], "torchrun"),
        (["sglang::detokenizer", ""], "sglang::detokenizer"),
        ([], "unknown"),
    ],
)
def test_processes_have_short_names(command: list[str], label: str) -> None:
    assert process_label(command) == label


def test_peaks_hold_the_demo_itself() -> None:
    with PeakMemory() as memory:
        memory.look()
    assert memory.peaks_mb()["demo"] > 10
