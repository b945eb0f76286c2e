"""Passes against a real HTTP server whose figures are known beforehand."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest
from openai_server import ACCEPTED, VERSION, Behaviour, serving, words_for

from dflash_online.bench.measure import BenchConfig, acceptance_between, run_bench
from dflash_online.bench.report import BenchReport
from dflash_online.errors import ConfigError, TargetUnavailableError
from dflash_online.process.port import free_port
from dflash_online.prompts.item import Message, PromptItem, user_prompt
from dflash_online.target.client import VersionAcceptance

_PROMPTS = [user_prompt(f"prompt {'x' * i}", f"test:{i}") for i in range(6)]


def measure(behaviour: Behaviour, prompts: list[PromptItem] | None = None, **settings: Any) -> BenchReport:
    with serving(behaviour) as url:
        config = BenchConfig(url=url, **{"num_warmup": 1, "request_timeout_s": 10.0, **settings})
        return asyncio.run(
            run_bench(config, _PROMPTS if prompts is None else prompts, lambda *progress: None)
        )


def test_tau_is_the_difference_of_the_exact_histograms() -> None:
    report = measure(Behaviour(num_steps=1000), policies=("off", "chain"))
    off, chain = report.passes
    assert off.tau is None
    assert chain.tau == 1 + ACCEPTED
    num_tokens = sum(len(words_for(prompt.messages[0].content)) for prompt in _PROMPTS if prompt.messages)
    assert [delta.drafter_version for delta in chain.acceptance] == [VERSION]
    assert sum(chain.acceptance[0].histogram) == num_tokens  # the warm-up's steps are left out


def test_tokens_and_latencies_come_from_the_server_and_the_clock() -> None:
    behaviour = Behaviour(delay_s=0.01)
    (only,) = measure(behaviour, num_warmup=0).passes
    words = [words_for(prompt.messages[0].content) for prompt in _PROMPTS if prompt.messages]
    assert [answer.num_tokens for answer in only.answers] == [len(one) for one in words]
    assert [exchange.text for exchange in only.exchanges if exchange] == ["".join(one) for one in words]
    as_json = only.to_json()
    assert 10 <= as_json["ttft_ms"]["median"] <= as_json["ttft_ms"]["p99"] < 1000
    assert 10 <= as_json["tpot_ms"]["median"] <= as_json["tpot_ms"]["p99"] < 1000
    assert only.tok_per_s == pytest.approx(sum(map(len, words)) / only.wall_s)


def test_concurrency_is_what_the_server_sees() -> None:
    behaviour = Behaviour(delay_s=0.02)
    report = measure(behaviour, concurrencies=(3,))
    assert behaviour.max_in_flight == 3
    assert report.passes[0].concurrency == 3


def test_identical_outputs_are_counted() -> None:
    result = measure(Behaviour(), policies=("off", "chain"), concurrencies=(1, 2)).to_json()
    assert (result["outputs_compared"], result["outputs_identical"]) == (12, 12)
    assert result["first_difference"] is None
    assert (result["requests_sent"], result["requests_failed"]) == (24, 0)


def test_the_first_difference_is_named() -> None:
    result = measure(Behaviour(answer_by_policy=True), policies=("off", "chain")).to_json()
    assert (result["outputs_compared"], result["outputs_identical"]) == (6, 0)
    place = len("".join(words_for("prompt ")[:-1]))
    assert result["first_difference"].startswith(f"prompt 0, character {place}: off has ")
    assert "wrong" in result["first_difference"]


def test_sampled_outputs_are_not_compared() -> None:
    report = measure(Behaviour(answer_by_policy=True), policies=("off", "chain"), temperatures=(0.7,))
    assert report.comparison().num_compared == 0


def test_each_policy_is_sent_with_its_own_number_or_the_default() -> None:
    behaviour = Behaviour()
    report = measure(behaviour, policies=("off", "chain:5", "tree", "tree:16"), num_nodes=9)
    assert behaviour.policy_bodies[:4] == [
        {"mode": "off"},
        {"mode": "chain", "num_nodes": 5},
        {"mode": "tree", "num_nodes": 9},
        {"mode": "tree", "num_nodes": 16},
    ]
    assert [(one.policy, one.num_nodes) for one in report.passes] == [
        ("off", 0),
        ("chain:5", 5),
        ("tree", 9),
        ("tree:16", 16),
    ]


def test_current_is_the_policy_found_even_after_another() -> None:
    behaviour = Behaviour(policy={"mode": "chain", "num_nodes": 5})
    report = measure(behaviour, policies=("off", "current"))
    assert behaviour.policies_set == ["off", "chain", "chain"]
    assert [one.num_nodes for one in report.passes] == [0, 5]


def test_temperatures_are_passes_of_their_own_and_only_greedy_ones_are_compared() -> None:
    behaviour = Behaviour(answer_by_policy=True)
    report = measure(behaviour, policies=("off", "chain"), temperatures=(1.0, 0.0), num_warmup=0)
    assert [(one["temperature"], one["policy"]) for one in report.to_json()["passes"]] == [
        (1.0, "off"),
        (1.0, "chain"),
        (0.0, "off"),
        (0.0, "chain"),
    ]
    assert [body["temperature"] for body in behaviour.bodies] == [1.0] * 12 + [0.0] * 12
    assert report.comparison().num_compared == 6


def test_the_policy_found_is_restored() -> None:
    behaviour = Behaviour(policy={"mode": "chain", "num_nodes": 5})
    measure(behaviour, policies=("off",))
    assert behaviour.policies_set == ["off", "chain"]
    assert behaviour.policy == {"mode": "chain", "num_nodes": 5}


def test_each_pass_has_a_cache_key_of_its_own_on_our_server() -> None:
    behaviour = Behaviour()
    measure(behaviour, policies=("off", "chain"), num_warmup=1)
    keys = [body["extra_key"] for body in behaviour.bodies]
    assert len(set(keys)) == 4
    assert keys[1:7] == [keys[1]] * 6


def test_a_foreign_server_is_measured_without_our_fields() -> None:
    behaviour = Behaviour(is_ours=False)
    (only,) = measure(behaviour, extra_body={"top_k": 1}).passes
    assert only.tau is None
    assert not only.has_own_cache
    assert all("extra_key" not in body and body["top_k"] == 1 for body in behaviour.bodies)
    assert {body["model"] for body in behaviour.bodies} == {"tiny"}


def test_a_policy_is_refused_on_a_foreign_server() -> None:
    with pytest.raises(ConfigError, match="policies must be 'current' on a server without /dflash routes"):
        measure(Behaviour(is_ours=False), policies=("off",))


def test_failures_are_counted_by_kind_and_end_nothing() -> None:
    prompts = [user_prompt(text, "t") for text in ("good", "refused", "shed", "also good")]
    behaviour = Behaviour(status_for={"refused": 400, "shed": 503})
    (only,) = measure(behaviour, prompts, num_warmup=0).passes
    assert only.errors == {"http_400": 1, "http_503": 1}
    assert (only.num_requests, len(only.answers)) == (4, 2)


@pytest.mark.parametrize(
    ("behaviour", "kind"),
    [
        (Behaviour(drop_done=True), "broken"),
        (Behaviour(malformed=True), "malformed"),
        (Behaviour(delay_s=5.0), "timeout"),
    ],
)
def test_broken_answers_have_a_kind(behaviour: Behaviour, kind: str) -> None:
    (only,) = measure(behaviour, _PROMPTS[:1], num_warmup=0, request_timeout_s=0.5).passes
    assert only.errors == {kind: 1}


def test_a_pass_ends_in_time_and_counts_what_it_did_not_send() -> None:
    behaviour = Behaviour(delay_s=0.1)
    (only,) = measure(behaviour, num_warmup=0, max_pass_s=0.2).passes
    assert only.to_json()["prompts_unsent"] >= 3
    assert only.wall_s < 3


def test_follow_ups_are_sent_after_the_answer() -> None:
    behaviour = Behaviour()
    (only,) = measure(behaviour, [user_prompt("one", "t", ["two"])], num_warmup=0).passes
    first, second = behaviour.bodies
    assert [turn["role"] for turn in second["messages"]] == ["user", "assistant", "user"]
    assert second["messages"][1]["content"] == "".join(words_for("one"))
    assert len(first["messages"]) == 1
    assert only.num_requests == 2


def test_raw_text_and_finished_conversations_are_understood() -> None:
    behaviour = Behaviour()
    turns = (Message("user", "hi"), Message("assistant", "hello"))
    talk = PromptItem(messages=turns, text=None, conversation=True, origin="t")
    raw = replace(talk, messages=None, text="Once", conversation=False)
    (only,) = measure(behaviour, [talk, raw], num_warmup=0).passes
    assert behaviour.bodies[0]["messages"] == [{"role": "user", "content": "hi"}]
    assert behaviour.bodies[1]["prompt"] == "Once"
    assert [answer.text for answer in only.answers] == ["".join(words_for(text)) for text in ("hi", "Once")]


def test_a_server_that_does_not_answer_is_an_error() -> None:
    config = BenchConfig(url=f"http://127.0.0.1:{free_port()}")
    with pytest.raises(TargetUnavailableError):
        asyncio.run(run_bench(config, _PROMPTS, lambda *progress: None))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"concurrencies": ()}, "concurrencies must be >= 1"),
        ({"concurrencies": (1, 0)}, "concurrencies must be >= 1"),
        ({"max_tokens": 0}, "max_tokens must be >= 1, got 0"),
        ({"temperatures": (0.0, -1.0)}, "temperatures must be >= 0"),
        ({"temperatures": ()}, "temperatures must be >= 0"),
        ({"num_nodes": 0}, "num_nodes must be >= 1, got 0"),
        ({"policies": ("off", "tree:0")}, "policy must be tree:NODES with a whole number >= 1, got 'tree:0'"),
    ],
)
def test_settings_are_bounded(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        BenchConfig(url="http://x", **settings)


def test_acceptance_of_a_new_version_starts_at_zero() -> None:
    old = VersionAcceptance(drafter_version="1-a", policy="chain", histogram=(5, 1))
    grown = replace(old, histogram=(7, 1, 1))
    new = VersionAcceptance(drafter_version="2-b", policy="chain", histogram=(1, 2, 3))
    deltas = acceptance_between([old], [grown, new])
    assert [delta.histogram for delta in deltas] == [(2, 0, 1), (1, 2, 3)]
    assert acceptance_between([old], [old]) == ()
