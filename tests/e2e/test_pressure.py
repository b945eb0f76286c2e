"""Drafting under everything a busy server does, and nothing of the text changes.

A second server, made tight on purpose: steps overlap, the cache holds a few requests only, so that running
ones are retracted and resume, prompts are prefilled in small chunks, and chunks share a batch with requests
that are decoding.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.conftest import serving
from tests.e2e.penalty_oracle import assert_penalties_are_exact
from tests.e2e.target_server import FORCED_RETRACTION, PROMPTS, TargetServer, chat_text

# A second server, and retractions that depend on how fast the machine is: asked for, not part of every run.
pytestmark = pytest.mark.skipif(
    "DFLASH_PRESSURE" not in os.environ, reason="set DFLASH_PRESSURE=1 to test drafting under memory pressure"
)

# About 90 tokens each, without a shared prefix: three chunks, and no request finds another's cache.
LONG_TEXTS = [chat_text(f"{q} Say it in your own words. " + f"{q[::-1]} " * 2) for q in PROMPTS[:6]]
NUM_TOKENS = 80
POOL_TOKENS = 600


@pytest.fixture(scope="module")
def tight_server(
    model_folder: Path, trained_drafter: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[TargetServer]:
    log = tmp_path_factory.mktemp("tight") / "target.log"
    flags = ["--chunked-prefill-size", "32", "--enable-mixed-chunk", "--context-length", "512"]
    flags += ["--max-total-tokens", str(POOL_TOKENS), "--max-running-requests", "12"]
    # Admits requests as if they would stay short and finds out later that the cache is too small. Without the
    # environment the first retraction would make it cautious for good.
    flags += ["--schedule-conservativeness", "0.05"]
    environment = {"SGLANG_NEW_TOKEN_RATIO_DECAY_STEPS": "1", "SGLANG_RETRACT_DECODE_STEPS": "1"}
    # Whether the cache runs full depends on who is admitted when; SGLang's own switch retracts in any case.
    environment |= FORCED_RETRACTION
    own = ["--max-nodes", "16", "--overlap"]
    with serving(model_folder, trained_drafter, log, own, flags, environment) as target:
        yield target


@pytest.fixture(scope="module")
def plain_outputs(tight_server: TargetServer) -> list[list[int]]:
    tight_server.set_policy("off")
    return tight_server.generate_all(LONG_TEXTS, 1, max_new_tokens=NUM_TOKENS, ignore_eos=True)


@pytest.mark.parametrize("mode", ["chain", "tree"])
def test_text_survives_retraction_in_chunks_and_mixed_batches(
    tight_server: TargetServer, plain_outputs: list[list[int]], mode: str
) -> None:
    tight_server.set_policy(mode)
    before = tight_server.num_retractions()
    found = tight_server.generate_all(LONG_TEXTS, 6, max_new_tokens=NUM_TOKENS, ignore_eos=True)
    assert found == plain_outputs
    assert tight_server.num_retractions() > before


def test_requests_that_join_and_leave_disturb_no_other(
    tight_server: TargetServer, plain_outputs: list[list[int]]
) -> None:
    tight_server.set_policy("tree")

    def late(index: int) -> list[int]:
        time.sleep(0.15 * index)
        length = 3 + 9 * index % NUM_TOKENS
        answer = tight_server.generate(LONG_TEXTS[index], max_new_tokens=length, ignore_eos=True)
        ids: list[int] = answer["output_ids"]
        assert len(ids) == length
        return ids

    with ThreadPoolExecutor(len(LONG_TEXTS)) as pool:
        for found, plain in zip(pool.map(late, range(len(LONG_TEXTS))), plain_outputs, strict=True):
            assert found == plain[: len(found)]


def test_the_pieces_of_a_stream_are_the_whole_text(tight_server: TargetServer) -> None:
    sampling = {"temperature": 0.0, "max_new_tokens": NUM_TOKENS, "ignore_eos": True}
    tight_server.set_policy("off")
    plain = tight_server.post("/generate", {"text": LONG_TEXTS[3], "sampling_params": sampling})["text"]
    tight_server.set_policy("tree")
    body = {"model": "default", "prompt": LONG_TEXTS[3], "stream": True, "max_tokens": NUM_TOKENS}
    pieces = []
    options = {"temperature": 0.0, "ignore_eos": True}
    with tight_server.client.stream("POST", "/v1/completions", json=body | options) as answer:
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                pieces += [choice["text"] for choice in json.loads(line[6:])["choices"]]
    assert "".join(pieces) == plain
    assert len(pieces) > 2


def test_penalties_survive_retraction_and_overlap(
    tight_server: TargetServer, model_folder: Path, plain_outputs: list[list[int]]
) -> None:
    """In the crowd of requests without penalties, whose text stays as it was."""
    tight_server.set_policy("tree")
    before = tight_server.num_retractions()
    sampling: dict[str, Any] = {"max_new_tokens": NUM_TOKENS, "ignore_eos": True}
    with ThreadPoolExecutor(1) as pool:
        crowd = pool.submit(tight_server.generate_all, LONG_TEXTS, 6, **sampling)
        assert_penalties_are_exact(tight_server, model_folder)
        assert crowd.result() == plain_outputs
    assert tight_server.num_retractions() > before


def start_endless(server: TargetServer, rid: str, finish_reasons: dict[str, Any]) -> threading.Thread:
    """A request that would run for long; its finish reason is filed under its id."""

    def run() -> None:
        sampling = {"temperature": 0.0, "max_new_tokens": 300, "ignore_eos": True}
        body = {"text": LONG_TEXTS[int(rid[-1])], "sampling_params": sampling, "rid": rid}
        finish_reasons[rid] = server.post("/generate", body)["meta_info"]["finish_reason"]["type"]

    thread = threading.Thread(target=run)
    thread.start()
    return thread


def wait_until_only_the_cache_is_left(server: TargetServer) -> None:
    """Waits for idleness, empties the prefix cache, and checks that no slot is lost."""
    deadline = time.monotonic() + 60.0
    while server.client.post("/flush_cache").status_code != httpx.codes.OK:
        assert time.monotonic() < deadline
        time.sleep(0.2)
    while server.num_used_tokens():
        assert time.monotonic() < deadline, server.num_used_tokens()
        time.sleep(0.2)


def test_an_abort_gives_every_slot_back_and_leaves_others_alone(
    tight_server: TargetServer, plain_outputs: list[list[int]]
) -> None:
    tight_server.set_policy("tree")
    wait_until_only_the_cache_is_left(tight_server)
    reasons: dict[str, Any] = {}
    threads = [start_endless(tight_server, f"endless-{i}", reasons) for i in range(2)]
    with ThreadPoolExecutor(1) as pool:
        beside = pool.submit(tight_server.generate, LONG_TEXTS[5], max_new_tokens=NUM_TOKENS, ignore_eos=True)
        time.sleep(1.5)
        for rid in ("endless-0", "endless-1"):
            assert tight_server.client.post("/abort_request", json={"rid": rid}).status_code == 200
        for thread in threads:
            thread.join()
        assert beside.result()["output_ids"] == plain_outputs[5]
    assert set(reasons.values()) == {"abort"}
    wait_until_only_the_cache_is_left(tight_server)
    # A client that hangs up in the middle of its stream.
    sampling = {"temperature": 0.0, "max_new_tokens": 300, "ignore_eos": True}
    body = {"text": LONG_TEXTS[2], "sampling_params": sampling, "stream": True}
    with tight_server.client.stream("POST", "/generate", json=body) as answer:
        assert next(answer.iter_lines()).startswith("data:")
    wait_until_only_the_cache_is_left(tight_server)
    found = tight_server.generate_all(LONG_TEXTS[:4], 4, max_new_tokens=NUM_TOKENS, ignore_eos=True)
    assert found == plain_outputs[:4]
