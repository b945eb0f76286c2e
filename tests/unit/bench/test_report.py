"""Figures from hand-made passes."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from typing import Any

import pytest
from rich.console import Console

from dflash_online.bench.client import Answer, Exchange
from dflash_online.bench.report import (
    AcceptanceDelta,
    BenchReport,
    PassResult,
    Spread,
    compare_outputs,
    pooled_tau,
)


def one_pass(policy: str, *texts: str | None) -> PassResult:
    answers = [
        None if text is None else Answer(text=text, num_tokens=3, ttft_s=0.1, last_token_s=0.5)
        for text in texts
    ]
    exchanges = tuple(None if answer is None else Exchange(answers=(answer,)) for answer in answers)
    delta = AcceptanceDelta("1-ab12cd34ef56", policy, (6, 2, 2))
    return PassResult(
        policy=policy, concurrency=1, wall_s=2.0, exchanges=exchanges, acceptance=(delta,), has_own_cache=True
    )


def test_tau_is_pooled_over_steps_not_over_versions() -> None:
    assert pooled_tau([(120, 60, 20)]) == 1.5
    assert pooled_tau([(10,), (0, 0, 30)]) == pytest.approx(1 + 60 / 40)
    assert pooled_tau([]) is None


def test_percentiles_are_values_that_were_seen() -> None:
    spread = Spread.of([0.001 * i for i in range(1, 201)])
    assert spread is not None
    assert (spread.median_ms, spread.p99_ms) == (pytest.approx(100), pytest.approx(198))
    assert Spread.of([0.5]) == Spread(500, 500)
    assert Spread.of([]) is None


def test_only_what_both_passes_answered_is_compared() -> None:
    failed = Exchange(answers=(), failure="timeout")
    left = one_pass("off", "same", "left", None, "x")
    right = one_pass("chain", "same", "lost", "more", "x")
    right = PassResult(
        policy="chain",
        concurrency=1,
        wall_s=1.0,
        exchanges=(*right.exchanges[:3], failed),
        acceptance=(),
        has_own_cache=True,
    )
    result = compare_outputs(left, right)
    assert (result.num_compared, result.num_identical) == (2, 1)
    assert result.first_difference == (
        "prompt 1, character 1: off has 'left', chain has 'lost' (concurrency 1)"
    )


def test_a_prefix_is_a_difference() -> None:
    result = compare_outputs(one_pass("off", "abc"), one_pass("chain", "abcd"))
    assert result.num_identical == 0
    assert result.first_difference is not None
    assert "character 3" in result.first_difference


def test_time_per_token_leaves_the_first_token_out() -> None:
    assert Answer(text="a", num_tokens=3, ttft_s=0.1, last_token_s=0.5).tpot_s == pytest.approx(0.2)
    assert Answer(text="a", num_tokens=1, ttft_s=0.1, last_token_s=0.1).tpot_s is None


def test_the_report_is_json_and_a_table() -> None:
    report = BenchReport(
        "http://x", "tiny", None, 2, 64, 0.0, (one_pass("off", "a", "b"), one_pass("chain", "a", "b"))
    )
    value = json.loads(json.dumps(report.to_json()))
    assert value["passes"][1]["tau"] == pytest.approx(1.6)
    assert value["passes"][0]["tok_per_s"] == 3.0
    assert value["outputs_compared"] == 2
    console = Console(width=120, file=io.StringIO(), record=True)
    console.print(report.table())
    assert "1.600" in console.export_text()
    found = report.find("chain")
    assert found is not None
    assert found.policy == "chain"
    assert report.find("tree") is None


def timed_pass(policy: str, *tpots_s: float | None, **changes: Any) -> PassResult:
    exchanges = tuple(
        Exchange(answers=(), failure="timeout")
        if tpot_s is None
        else Exchange(answers=(Answer(text="a", num_tokens=11, ttft_s=1.0, last_token_s=1.0 + 10 * tpot_s),))
        for tpot_s in tpots_s
    )
    return replace(one_pass(policy), exchanges=exchanges, **changes)


def report_of(*passes: PassResult) -> BenchReport:
    return BenchReport("http://x", "tiny", None, len(passes[0].exchanges), 64, 0.0, passes)


def test_a_speedup_is_paired_with_off_of_the_same_concurrency_and_temperature() -> None:
    off, hot = timed_pass("off", 0.2, 0.4, 0.6, 0.9), timed_pass("off", 0.1, 0.1, 0.1, 0.1, temperature=1.0)
    tree = timed_pass("tree:16", 0.1, 0.2, 0.3, None)
    report = report_of(hot, off, tree, replace(tree, concurrency=4))
    speedup = report.speedup(tree)
    assert speedup is not None
    assert speedup.num_values == 3
    # Each prompt is twice as fast, so paired resamples have no spread at all.
    assert (speedup.estimate, speedup.low, speedup.high) == pytest.approx((2, 2, 2))
    assert report.speedup(off) is None
    assert report.speedup(report.passes[3]) is None
    assert report.to_json()["passes"][2]["speedup"]["estimate"] == pytest.approx(2)


def test_a_second_pass_of_off_is_measured_against_the_first() -> None:
    report = report_of(timed_pass("off", 0.2, 0.4), timed_pass("off", 0.1, 0.2))
    speedup = report.speedup(report.passes[1])
    assert speedup is not None
    assert speedup.estimate == pytest.approx(2)


def test_the_tpot_of_a_prompt_is_over_all_its_turns() -> None:
    turns = tuple(
        Answer(text="a", num_tokens=num_tokens, ttft_s=0.0, last_token_s=last_s)
        for num_tokens, last_s in ((2, 1.0), (4, 0.5), (1, 0.0))
    )
    one = replace(one_pass("off"), exchanges=(Exchange(answers=turns), Exchange(answers=turns[2:]), None))
    assert one.prompt_tpot_s == [pytest.approx(1.5 / 4), None, None]


def test_a_report_of_several_temperatures_has_a_column_for_them() -> None:
    report = report_of(timed_pass("off", 0.2, 0.4), timed_pass("off", 0.2, 0.4, temperature=0.5))
    headers = [column.header for column in report.table().columns]
    assert headers[:3] == ["policy", "concurrency", "temperature"]
    assert report.to_json()["temperatures"] == [0.0, 0.5]
