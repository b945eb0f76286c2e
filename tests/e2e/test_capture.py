"""Captured features are the target's own: against transformers on the same weights, in float32."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from dflash_online.wire.record import Record
from tests.e2e.target_server import PROMPTS, TargetServer, chat_text


@pytest.fixture(scope="module")
def reference(model_folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def tokenizer(model_folder: Path) -> Any:
    return AutoTokenizer.from_pretrained(model_folder)


@torch.no_grad()
def reference_features(reference: Any, record: Record) -> torch.Tensor:
    """[T-1, K*H] float32: outputs of the hooked layers, by transformers."""
    ids = torch.tensor([record.header.token_ids[:-1]])
    states = reference(ids, output_hidden_states=True).hidden_states
    return torch.cat([states[layer + 1][0] for layer in record.header.layer_ids], dim=-1)


def assert_equal_within_bf16(record: Record, wanted_TF: torch.Tensor) -> None:
    """Rounded to bf16 both are the same number, or neighbours when float32 noise crosses a rounding point."""
    rounded_TF = wanted_TF.to(torch.bfloat16)
    # A float32 difference of 1e-4 relative to the value moves about 2.5 % of the values to a neighbour.
    num_other = int((record.features_TF != rounded_TF).sum())
    assert num_other <= 0.025 * rounded_TF.numel()
    torch.testing.assert_close(record.features_TF.float(), rounded_TF.float(), rtol=2**-7, atol=2**-7)


@pytest.mark.parametrize("mode", ["off", "chain"])
def test_features_of_a_generated_response_equal_transformers(
    chain_server: TargetServer, reference: Any, mode: str
) -> None:
    chain_server.set_policy(mode)
    sampling = {"temperature": 0.0, "max_new_tokens": 24}
    record = chain_server.capture(text=chat_text(PROMPTS[0]), sampling_params=sampling, cursor=7)
    header = record.header
    assert (header.source, header.cursor, header.finish_reason) == ("prompt", 7, "length")
    assert header.num_rows == header.prompt_length + 24 - 1
    assert header.loss_spans == ((header.prompt_length, header.num_rows + 1),)
    assert sum(header.acceptance) == (23 if mode == "chain" else 0)  # a random drafter: every draft fails
    assert_equal_within_bf16(record, reference_features(reference, record))


def test_a_prompt_longer_than_one_chunk_has_all_its_rows(server: TargetServer, reference: Any) -> None:
    text = chat_text(" ".join(PROMPTS) * 2)
    record = server.capture(text=text, sampling_params={"temperature": 0.0, "max_new_tokens": 4})
    assert record.header.prompt_length > 2 * 64
    assert_equal_within_bf16(record, reference_features(reference, record))


def test_captures_in_flight_together_do_not_mix_their_rows(
    chain_server: TargetServer, reference: Any
) -> None:
    def capture(index: int) -> Record:
        sampling = {"temperature": 0.0, "max_new_tokens": 8 + 3 * index}
        return chain_server.capture(text=chat_text(PROMPTS[index]), sampling_params=sampling)

    with ThreadPoolExecutor(6) as pool:
        records = list(pool.map(capture, range(6)))
    for record in records:
        assert_equal_within_bf16(record, reference_features(reference, record))


def test_a_conversation_is_captured_by_prefill_with_its_answers_supervised(
    server: TargetServer, reference: Any, tokenizer: Any
) -> None:
    messages = [
        {"role": "user", "content": "Name a colour."},
        {"role": "assistant", "content": "Blue."},
        {"role": "user", "content": "And another one?"},
        {"role": "assistant", "content": "Red, I would say."},
    ]
    record = server.capture(mode="prefill", messages=messages)
    assert (record.header.source, record.header.finish_reason) == ("conversation", "prefill")
    answers = [
        tokenizer.decode(record.header.token_ids[start:end]) for start, end in record.header.loss_spans
    ]
    assert answers == ["Blue.<|im_end|>", "Red, I would say.<|im_end|>"]
    assert_equal_within_bf16(record, reference_features(reference, record))


def test_a_repeated_prompt_is_not_served_from_the_prefix_cache(server: TargetServer) -> None:
    text = chat_text("Tell me about rivers.")
    server.generate(text, max_new_tokens=4)
    sampling = {"temperature": 0.0, "max_new_tokens": 4}
    first = server.capture(text=text, sampling_params=sampling)
    second = server.capture(text=text, sampling_params=sampling)
    assert first.header.token_ids == second.header.token_ids
    assert torch.equal(first.features_TF, second.features_TF)


def test_a_stop_token_within_the_response_ends_the_record(server: TargetServer, tokenizer: Any) -> None:
    record = server.capture(
        text=chat_text("Say yes."), sampling_params={"temperature": 0.0, "max_new_tokens": 200}
    )
    assert record.header.finish_reason == "stop"
    assert record.header.token_ids[-1] == tokenizer.convert_tokens_to_ids("<|im_end|>")


def test_full_slots_shed_capture_and_not_requests(server: TargetServer) -> None:
    body = {"text": chat_text(PROMPTS[2]), "sampling_params": {"temperature": 0.0, "max_new_tokens": 40}}

    def capture(_: int) -> httpx.Response:
        return server.client.post("/dflash/capture", json=body)

    with ThreadPoolExecutor(14) as pool:
        plain = pool.submit(server.generate, chat_text(PROMPTS[3]))
        answers = list(pool.map(capture, range(12)))
        assert len(plain.result()["output_ids"]) == 32
    shed = [answer for answer in answers if answer.status_code == httpx.codes.SERVICE_UNAVAILABLE]
    assert 1 <= len(shed) <= 4
    assert float(shed[0].headers["retry-after"]) > 0
    assert shed[0].json()["error"]["type"] == "CaptureShedError"
    assert sum(answer.status_code == httpx.codes.OK for answer in answers) == 12 - len(shed)
    assert server.info()["capture"]["slots_free"] == 8


def test_a_client_that_goes_away_frees_its_slot(server: TargetServer) -> None:
    body = {"text": chat_text(PROMPTS[4]), "sampling_params": {"temperature": 0.0, "max_new_tokens": 400}}
    with pytest.raises(httpx.ReadTimeout):
        server.client.post("/dflash/capture", json=body, timeout=1.0)
    deadline = time.monotonic() + 30.0
    while server.info()["capture"]["slots_free"] < 8:
        assert time.monotonic() < deadline
        time.sleep(0.2)


@pytest.mark.parametrize(
    ("body", "field", "bound"),
    [
        ({"text": "a", "input_ids": [1]}, "body", "exactly one of input_ids, text, messages"),
        ({"input_ids": [49152]}, "input_ids", "in 0..49151"),
        ({"text": "a", "sampling_params": {"max_new_tokens": 600}}, "input_ids", "at most 512 tokens"),
        ({"mode": "prefill", "input_ids": [5]}, "input_ids", "at least 2 tokens"),
        ({"mode": "prefill", "input_ids": [5, 6], "loss_spans": [[1, 9]]}, "loss_spans", "within 0..2"),
        ({"text": "a", "colour": "red"}, "colour", "not permitted"),
        ({"text": "a", "sampling_params": {"temperature": -1}}, "sampling_params", "temperature"),
    ],
)
def test_a_wrong_capture_request_is_refused_by_field_and_bound(
    server: TargetServer, body: dict[str, Any], field: str, bound: str
) -> None:
    answer = server.client.post("/dflash/capture", json=body)
    assert answer.status_code == httpx.codes.UNPROCESSABLE_ENTITY
    error = answer.json()["error"]
    assert error["type"] == "ConfigError"
    assert error["field"] == field
    assert bound in error["bound"]
    assert server.info()["capture"]["slots_free"] == 8
