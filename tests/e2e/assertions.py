"""Checks that hold for every policy, shared by the tests of chains and of trees."""

from __future__ import annotations

import httpx
import pytest

from tests.e2e.target_server import CONTEXT_LENGTH, PROMPTS, TargetServer, chat_text


def assert_the_context_limit_ends_a_request(server: TargetServer) -> None:
    """A request that starts just below the limit ends there, and the server lives on."""
    # SGLang keeps a few tokens of the context for itself.
    input_ids = [500 + i % 40 for i in range(CONTEXT_LENGTH - 12)]
    body = {"input_ids": input_ids, "sampling_params": {"temperature": 0.0, "ignore_eos": True}}
    answer = server.post("/generate", body)
    assert answer["meta_info"]["finish_reason"]["type"] == "length"
    assert 5 <= len(answer["output_ids"]) <= 12
    assert server.client.get("/health").status_code == httpx.codes.OK


def assert_stop_strings_and_log_probabilities_survive(server: TargetServer, mode: str) -> None:
    """Text, tokens and their log-probabilities of the mode are those of plain decoding."""
    sampling = {"temperature": 0.0, "max_new_tokens": 24, "stop": ["."]}
    body = {"text": chat_text(PROMPTS[1]), "sampling_params": sampling, "return_logprob": True}
    server.set_policy("off")
    plain = server.post("/generate", body)
    server.set_policy(mode)
    drafted = server.post("/generate", body)
    assert drafted["text"] == plain["text"]
    pairs = zip(
        drafted["meta_info"]["output_token_logprobs"],
        plain["meta_info"]["output_token_logprobs"],
        strict=True,
    )
    for (found, token, _), (wanted, wanted_token, _) in pairs:
        assert token == wanted_token
        assert found == pytest.approx(wanted, abs=1e-3)
