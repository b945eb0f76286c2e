"""Speculation changes speed only: greedy outputs are the target's own, samples follow its distribution."""

from __future__ import annotations

from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from scipy.stats import chisquare
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.e2e.assertions import (
    assert_stop_strings_and_log_probabilities_survive,
    assert_the_context_limit_ends_a_request,
)
from tests.e2e.target_server import PROMPTS, TargetServer, chat_text

TEXTS = [chat_text(prompt) for prompt in PROMPTS]


@pytest.fixture(scope="module")
def plain_outputs(server: TargetServer) -> list[list[int]]:
    """What the server answers when it drafts nothing, one request at a time."""
    server.set_policy("off")
    return server.generate_all(TEXTS, concurrency=1)


def test_without_drafting_the_server_answers_as_transformers_does(
    model_folder: Path, plain_outputs: list[list[int]]
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32).eval()
    for text, output in list(zip(TEXTS, plain_outputs, strict=True))[:4]:
        ids = tokenizer(text, add_special_tokens=False, return_tensors="pt").input_ids
        with torch.no_grad():
            logits = model(torch.cat([ids, torch.tensor([output])], dim=1)).logits[0, ids.shape[1] - 1 : -1]
        assert logits.argmax(-1).tolist() == output


@pytest.mark.parametrize(("concurrency", "num_nodes"), [(1, 7), (4, 4), (10, 7), (10, 1)])
def test_greedy_output_of_a_chain_equals_plain_decoding(
    chain_server: TargetServer, plain_outputs: list[list[int]], concurrency: int, num_nodes: int
) -> None:
    chain_server.set_policy("chain", num_nodes=num_nodes)
    assert chain_server.generate_all(TEXTS, concurrency) == plain_outputs


def test_the_policy_may_change_while_requests_run(
    chain_server: TargetServer, plain_outputs: list[list[int]]
) -> None:
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(chain_server.generate_all, TEXTS, 5)
        while not running.done():
            for policy in ({"mode": "off"}, {"mode": "chain", "num_nodes": 3}, {"mode": "chain"}):
                chain_server.set_policy(**policy)
        assert running.result() == plain_outputs


def test_above_the_largest_batch_size_nothing_is_drafted(chain_server: TargetServer) -> None:
    chain_server.set_policy("chain", max_batch_size=1)
    before = chain_server.histograms()
    chain_server.generate_all([chat_text(PROMPTS[5])] * 4, concurrency=4, max_new_tokens=24)
    after = chain_server.histograms()
    version = chain_server.drafter()["version"]
    # Only the first and the last step or so ran alone.
    assert sum(after.get(version, [])) - sum(before.get(version, [])) < 4 * 23


@pytest.mark.parametrize("mode", ["off", "chain"])
def test_a_request_may_run_into_the_context_limit(chain_server: TargetServer, mode: str) -> None:
    chain_server.set_policy(mode)
    assert_the_context_limit_ends_a_request(chain_server)


def test_stop_strings_and_log_probabilities_survive_a_chain(chain_server: TargetServer) -> None:
    assert_stop_strings_and_log_probabilities_survive(chain_server, "chain")


def test_a_regular_expression_constrains_the_output_of_a_chain(chain_server: TargetServer) -> None:
    answer = chain_server.generate(chat_text("Give me a number."), regex=r"[0-9]{3}-[0-9]{2}")
    digits = answer["text"]
    assert len(digits) == 6
    assert digits[3] == "-"
    assert digits.replace("-", "").isdigit()


def test_sampled_tokens_follow_the_targets_distribution(
    chain_server: TargetServer, model_folder: Path
) -> None:
    """Two tokens at temperature 0.8, top 3 each: 9 outcomes against their exact probabilities."""
    num_samples, temperature, top_k = 360, 0.8, 3
    text = chat_text("Pick a word.")
    ids = AutoTokenizer.from_pretrained(model_folder)(text, add_special_tokens=False).input_ids
    sampling = {"temperature": temperature, "top_k": top_k, "max_new_tokens": 2, "ignore_eos": True}
    outputs = chain_server.generate_all([text] * num_samples, concurrency=24, **sampling)
    found = Counter(tuple(output) for output in outputs)
    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32).eval()
    wanted: dict[tuple[int, int], float] = {}
    for first, first_prob in _top_probs(model, ids, temperature, top_k).items():
        for second, second_prob in _top_probs(model, [*ids, first], temperature, top_k).items():
            wanted[first, second] = first_prob * second_prob
    assert set(found) <= set(wanted)
    outcomes = sorted(wanted)
    result = chisquare(
        [found[outcome] for outcome in outcomes], [num_samples * wanted[outcome] for outcome in outcomes]
    )
    assert result.pvalue > 1e-4


@torch.no_grad()
def _top_probs(model: Any, ids: list[int], temperature: float, top_k: int) -> dict[int, float]:
    probs = torch.softmax(model(torch.tensor([ids])).logits[0, -1] / temperature, dim=-1)
    values, tokens = probs.topk(top_k)
    return dict(zip(tokens.tolist(), (values / values.sum()).tolist(), strict=True))


@pytest.mark.parametrize(
    ("body", "field", "bound"),
    [
        ({"mode": "chain", "num_nodes": 8}, "num_nodes", "at most 7"),
        ({"mode": "chain", "num_nodes": 0}, "num_nodes", ">= 1"),
        ({"mode": "off", "num_nodes": 2}, "num_nodes", "0 when mode is off"),
        ({"mode": "bush"}, "mode", "'off', 'chain', 'tree' or 'auto'"),
        ({"mode": "tree", "num_nodes": 65}, "num_nodes", "at most 64"),
        ({"mode": "tree", "num_nodes": 0}, "num_nodes", ">= 1"),
        ({"mode": "chain", "max_batch_size": 0}, "max_batch_size", "greater than or equal to 1"),
    ],
)
def test_a_wrong_policy_is_refused_and_the_old_one_stays(
    chain_server: TargetServer, body: dict[str, Any], field: str, bound: str
) -> None:
    before = chain_server.set_policy("chain", num_nodes=5)
    answer = chain_server.client.put("/dflash/policy", json=body)
    assert answer.status_code == httpx.codes.UNPROCESSABLE_ENTITY
    assert answer.json()["error"]["field"] == field
    assert bound in answer.json()["error"]["bound"]
    assert chain_server.info()["policy"] == before
