"""Trees change speed only: in the real server, with drafts that are really accepted along branches."""

from __future__ import annotations

import re
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from scipy.stats import chi2_contingency
from sglang.srt.sampling.custom_logit_processor import DisallowedTokensLogitsProcessor

from dflash_online.evaluate.tau import tau_of
from tests.e2e.assertions import (
    assert_stop_strings_and_log_probabilities_survive,
    assert_the_context_limit_ends_a_request,
)
from tests.e2e.penalty_oracle import assert_penalties_are_exact
from tests.e2e.target_server import PROMPTS, TargetServer, chat_text

TEXTS = [chat_text(prompt) for prompt in PROMPTS]


@pytest.fixture(scope="module")
def plain_outputs(server: TargetServer) -> list[list[int]]:
    server.set_policy("off")
    return server.generate_all(TEXTS, concurrency=1)


@pytest.mark.parametrize(("concurrency", "num_nodes"), [(1, 16), (4, 7), (10, 1), (10, 64)])
def test_greedy_output_of_a_tree_equals_plain_decoding(
    tree_server: TargetServer, plain_outputs: list[list[int]], concurrency: int, num_nodes: int
) -> None:
    tree_server.set_policy("tree", num_nodes=num_nodes)
    assert tree_server.generate_all(TEXTS, concurrency) == plain_outputs
    histogram = tree_server.histograms_by_policy(tree_server.drafter()["version"])[f"tree:{num_nodes}"]
    assert tau_of(histogram) > 1.3
    assert len(histogram) <= 1 + min(num_nodes, 7)


def test_a_tree_accepts_more_than_a_chain(tree_server: TargetServer, plain_outputs: list[list[int]]) -> None:
    assert plain_outputs
    version = tree_server.drafter()["version"]
    before = tree_server.histograms_by_policy(version)
    for mode, num_nodes in (("chain", 7), ("tree", 32)):
        tree_server.set_policy(mode, num_nodes=num_nodes)
        tree_server.generate_all(TEXTS, concurrency=5)
    after = tree_server.histograms_by_policy(version)
    tau = {name: tau_of(_difference(after[name], before.get(name, []))) for name in ("chain", "tree:32")}
    assert tau["tree:32"] >= tau["chain"] > 1.3


def _difference(after: list[int], before: list[int]) -> list[int]:
    return [count - (before[i] if i < len(before) else 0) for i, count in enumerate(after)]


def test_policies_may_change_while_trees_are_verified(
    tree_server: TargetServer, plain_outputs: list[list[int]]
) -> None:
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(tree_server.generate_all, TEXTS, 5)
        while not running.done():
            for policy in (
                {"mode": "tree", "num_nodes": 40},
                {"mode": "off"},
                {"mode": "tree", "num_nodes": 3},
                {"mode": "chain"},
            ):
                tree_server.set_policy(**policy)
        assert running.result() == plain_outputs


@pytest.mark.parametrize("max_new_tokens", range(2, 12))
def test_a_length_limit_within_an_accepted_path_cuts_exactly(
    tree_server: TargetServer, plain_outputs: list[list[int]], max_new_tokens: int
) -> None:
    found = tree_server.generate_all(TEXTS[:4], 4, max_new_tokens=max_new_tokens)
    assert found == [output[:max_new_tokens] for output in plain_outputs[:4]]


def test_a_stop_token_within_an_accepted_path_cuts_exactly(
    tree_server: TargetServer, plain_outputs: list[list[int]]
) -> None:
    for text, plain in list(zip(TEXTS, plain_outputs, strict=True))[:5]:
        for stop in {plain[index] for index in (4, 9) if index < len(plain)}:
            found = tree_server.generate(text, stop_token_ids=[stop])["output_ids"]
            assert found == plain[: plain.index(stop) + 1]


def test_prefixes_cached_out_of_a_tree_are_right(
    tree_server: TargetServer, plain_outputs: list[list[int]]
) -> None:
    """A prompt that extends an earlier output finds the keys that a tree verify had moved into place."""
    tree_server.generate_all(TEXTS, concurrency=5)
    info = tree_server.post("/tokenize", {"model": "default", "prompt": TEXTS[0]})
    for cut in (5, 11, 20):
        body = {
            "input_ids": [*info["tokens"], *plain_outputs[0][:cut]],
            "sampling_params": {"temperature": 0.0, "max_new_tokens": 32 - cut},
        }
        answer = tree_server.post("/generate", body)
        assert answer["meta_info"]["cached_tokens"] > len(info["tokens"])
        assert answer["output_ids"] == plain_outputs[0][cut:]


def test_a_request_may_run_into_the_context_limit(tree_server: TargetServer) -> None:
    tree_server.set_policy("tree", num_nodes=64)
    assert_the_context_limit_ends_a_request(tree_server)


def test_stop_strings_and_log_probabilities_survive_a_tree(tree_server: TargetServer) -> None:
    assert_stop_strings_and_log_probabilities_survive(tree_server, "tree")


def test_a_regular_expression_constrains_a_tree_as_it_does_plain_decoding(tree_server: TargetServer) -> None:
    text, pattern = chat_text("Give me a number."), r"[0-9]{3}-[0-9]{2}( and [a-z]+){2}"
    tree = tree_server.generate(text, regex=pattern)["text"]
    tree_server.set_policy("off")
    assert tree == tree_server.generate(text, regex=pattern)["text"]


@pytest.mark.parametrize("mode", ["off", "chain", "tree"])
def test_every_token_is_the_best_after_penalties(
    tree_server: TargetServer, model_folder: Path, mode: str
) -> None:
    """Requests with different penalties in one batch, drafted for as any other."""
    tree_server.set_policy(mode)
    assert_penalties_are_exact(tree_server, model_folder)


def test_logit_bias_is_that_of_plain_decoding(tree_server: TargetServer) -> None:
    settings: dict[str, Any] = {"logit_bias": {"284": -5.0, "260": 2.0}}
    trees = [tree_server.generate(text, **settings)["output_ids"] for text in TEXTS[:4]]
    tree_server.set_policy("off")
    assert trees == [tree_server.generate(text, **settings)["output_ids"] for text in TEXTS[:4]]


def test_a_custom_logit_processor_is_obeyed_and_does_not_touch_its_neighbours(
    tree_server: TargetServer, plain_outputs: list[list[int]]
) -> None:
    forbidden = plain_outputs[0][:3]
    body = {
        "text": TEXTS[0],
        "sampling_params": {
            "temperature": 0.0,
            "max_new_tokens": 24,
            "custom_params": {"token_ids": forbidden},
        },
        "custom_logit_processor": DisallowedTokensLogitsProcessor.to_str(),
    }
    tree_server.set_policy("off")
    expected = tree_server.post("/generate", body)["output_ids"]
    assert not set(expected) & set(forbidden)
    tree_server.set_policy("tree", num_nodes=16)
    with ThreadPoolExecutor(2) as pool:
        neighbour = pool.submit(tree_server.generate, TEXTS[1])
        assert tree_server.post("/generate", body)["output_ids"] == expected
        assert neighbour.result()["output_ids"] == plain_outputs[1]


@pytest.mark.parametrize(
    "law",
    [
        {"temperature": 3.0, "top_k": 3},
        {"temperature": 1.0, "top_p": 0.9},
        {"temperature": 1.5, "min_p": 0.1, "top_k": 20},
    ],
    ids=["top-k", "top-p", "min-p"],
)
def test_sampled_paths_follow_the_law_of_plain_decoding(
    tree_server: TargetServer, law: dict[str, float]
) -> None:
    """Three sampled tokens, trees against no drafting: one law, by chi-square."""
    # Few nodes: SGLang's sampler sorts the vocabulary at each of them.
    num_samples, sampling = 240, {**law, "max_new_tokens": 3, "ignore_eos": True}
    counts = []
    for policy in ({"mode": "tree", "num_nodes": 8}, {"mode": "off"}):
        tree_server.set_policy(**policy)
        outputs = tree_server.generate_all([TEXTS[7]] * num_samples, concurrency=24, **sampling)
        counts.append(Counter(tuple(output) for output in outputs))
    outcomes = sorted(set(counts[0]) | set(counts[1]))
    # Outcomes too rare for the test's approximation are pooled.
    common = [o for o in outcomes if counts[0][o] + counts[1][o] >= 10]
    rows = [[count[o] for o in common] + [num_samples - sum(count[o] for o in common)] for count in counts]
    table = [row if rows[0][-1] + rows[1][-1] else row[:-1] for row in rows]
    assert len(common) >= 3
    assert chi2_contingency(table).pvalue > 1e-4


def test_auto_changes_its_choice_by_itself_and_no_output(
    tree_server: TargetServer, plain_outputs: list[list[int]]
) -> None:
    """Enough steps at two batch sizes that several choices are tried; each is one of the exact policies."""
    version = tree_server.drafter()["version"]
    before = tree_server.histograms_by_policy(version)
    assert tree_server.set_policy("auto") == {
        "mode": "auto",
        "num_nodes": 64,
        "max_batch_size": None,
        "probe_interval": None,
    }
    for concurrency in (1, 5):
        assert tree_server.generate_all(TEXTS, concurrency) == plain_outputs
    after = tree_server.histograms_by_policy(version)
    used = {name for name, counts in after.items() if sum(counts) > sum(before.get(name, []))}
    assert len(used) >= 2
    auto = tree_server.info()["auto"]
    assert auto["drafter_version"] == version
    buckets = {entry["max_batch_size"]: entry for entry in auto["batch_sizes"]}
    assert {1, 8} <= set(buckets)
    names = ["off", "tree:4", "chain", "tree:8", "tree:16", "tree:32", "tree:64"]
    for entry in buckets.values():
        assert entry["policy"] in names
        assert entry["reason"].split(":")[0] in {"start", "kept", "faster", "best"}
        assert [choice["policy"] for choice in entry["choices"]] == names
    timed = [choice for choice in buckets[1]["choices"] if choice["step_ms"] is not None]
    assert len(timed) >= 2
    assert any(choice["tokens_per_second_per_request"] for choice in timed)
    metrics = tree_server.client.get("/metrics").text
    picks = re.findall(r'^dflash:auto_is_pick\{max_batch_size="1",policy="([^"]+)"\} 1', metrics, re.M)
    assert picks == [buckets[1]["policy"]]
    assert "dflash:auto_steps_total{" in metrics


def test_auto_obeys_the_batch_limit(tree_server: TargetServer, plain_outputs: list[list[int]]) -> None:
    version = tree_server.drafter()["version"]
    tree_server.set_policy("auto", num_nodes=4, max_batch_size=1)
    before = tree_server.histograms_by_policy(version)
    assert tree_server.generate_all(TEXTS * 2, 20)[:10] == plain_outputs
    # Only the tail of the batch, once one request was left, may have drafted.
    after = tree_server.histograms_by_policy(version)
    assert sum(map(sum, after.values())) - sum(map(sum, before.values())) < 64


def test_auto_refuses_a_tree_above_the_bound(tree_server: TargetServer) -> None:
    answer = tree_server.client.put("/dflash/policy", json={"mode": "auto", "num_nodes": 65})
    assert answer.status_code == 422
    assert answer.json()["error"]["field"] == "num_nodes"
    assert tree_server.info()["auto"] is None


def test_acceptance_is_reported_by_depth_and_rank(
    tree_server: TargetServer, plain_outputs: list[list[int]]
) -> None:
    tree_server.set_policy("tree", num_nodes=24)
    assert tree_server.generate_all(TEXTS, 5) == plain_outputs
    version = tree_server.drafter()["version"]
    (entry,) = (
        entry
        for entry in tree_server.client.get("/dflash/acceptance").json()["versions"]
        if (entry["drafter_version"], entry["policy"]) == (version, "tree:24")
    )
    accepted, offered = entry["accepted_by_depth_and_rank"], entry["offered_by_depth_and_rank"]
    # Drafts that only a tree offers were accepted, at whatever depth.
    assert any(sum(row[1:]) for row in accepted)
    # A draft of depth d was accepted by every step that accepted d or more.
    for depth, row in enumerate(accepted, start=1):
        assert sum(row) == sum(entry["histogram"][depth:])
    # A step that was cut before its first draft shows no miss.
    assert sum(accepted[0]) <= offered[0][0] <= entry["num_steps"]
    metrics = tree_server.client.get("/metrics").text
    label = f'depth="1",drafter_version="{version}",policy="tree:24",rank="0"'
    (count,) = re.findall(rf"^dflash:accepted_drafts_total\{{{label}\}} (\S+)", metrics, re.M)
    assert float(count) == accepted[0][0]


def test_a_request_for_what_verify_does_not_make_is_refused(tree_server: TargetServer) -> None:
    """Upstream admits it, and the scheduler dies of the first answer."""
    body = {"text": TEXTS[0], "sampling_params": {"temperature": 0.0}, "return_sampling_mask": True}
    answer = tree_server.client.post("/generate", json=body)
    assert answer.status_code == httpx.codes.BAD_REQUEST
    assert "return_sampling_mask is not supported by DFLASH_ONLINE" in answer.text
    assert tree_server.client.get("/health").status_code == httpx.codes.OK
