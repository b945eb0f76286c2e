"""What servers on GPUs run, as far as a CPU can: two ranks, and SGLang's own Triton attention.

Triton's interpreter runs the kernels; masks, index lists and collectives are those of GPUs. What differs is
that no CUDA graph is captured. Running requests are retracted every few steps. Every rank has to grow and
walk the same trees, and every node has to see its own path and nothing else.
"""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest
import torch

from dflash_online.evaluate.tau import tau_of
from dflash_online.target.inprocess import InProcessTarget
from tests.e2e.conftest import serving
from tests.e2e.target_server import FORCED_RETRACTION, TargetServer
from tests.e2e.tiny_target import LAYER_IDS, TinyTarget, generate_all_ids, generate_ids, make_tiny_target


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> TinyTarget:
    return make_tiny_target(tmp_path_factory.mktemp("tiny"), num_prompts=3)


@pytest.fixture(scope="module")
def gpu_like(tiny: TinyTarget, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TargetServer]:
    log = tmp_path_factory.mktemp("gpu_like") / "target.log"
    own = ["--max-nodes", "16", "--verify-widths", "1,8,17", "--overlap", "--cpu-threads", "1"]
    own += ["--capture-slots", "2", "--capture-tokens", "256"]
    flags = ["--skip-tokenizer-init", "--context-length", "128", "--max-total-tokens", "2048"]
    flags += ["--attention-backend", "triton", "--tp-size", "2"]
    environment = {"TRITON_INTERPRET": "1", "SGLANG_CPU_OMP_THREADS_BIND": "0|1"} | FORCED_RETRACTION
    with serving(tiny.model, tiny.drafter, log, own, flags, environment) as target:
        yield target


def test_ranks_agree_on_every_tree_across_a_swap(gpu_like: TargetServer, tiny: TinyTarget) -> None:
    assert gpu_like.info()["verify"] == {"attention_backend": "TritonAttnBackend", "widths": [1, 8, 17]}
    gpu_like.set_policy("off")
    plain = generate_all_ids(gpu_like, tiny.prompts, concurrency=1)
    version = gpu_like.drafter()["version"]
    for mode, num_nodes in (("chain", 7), ("tree", 12)):
        gpu_like.set_policy(mode, num_nodes=num_nodes)
        before = gpu_like.num_retractions()
        assert generate_all_ids(gpu_like, tiny.prompts, concurrency=3) == plain
        assert gpu_like.num_retractions() > before
    histograms = gpu_like.histograms_by_policy(version)
    assert tau_of(histograms["tree:12"]) >= tau_of(histograms["chain"]) > 1.5
    # Deep paths: what a node sees of its tree was right over several generations.
    assert sum(histograms["tree:12"][3:]) > 0

    swapped = gpu_like.swap(tiny.other_drafter)["version"]
    assert generate_all_ids(gpu_like, tiny.prompts[:1], concurrency=1) == plain[:1]
    assert 1.0 <= tau_of(gpu_like.histograms_by_policy(swapped)["tree:12"]) < tau_of(histograms["tree:12"])
    gpu_like.swap(tiny.drafter)


def test_sampled_paths_leave_the_same_cache_on_all_ranks(gpu_like: TargetServer, tiny: TinyTarget) -> None:
    gpu_like.set_policy("tree", num_nodes=16)
    prompt = tiny.prompts[0]
    prompt = prompt + generate_ids(gpu_like, prompt, temperature=1.0, top_p=0.9)
    # What goes on from here reads the keys of the sampled paths; the oracle computes them anew.
    oracle = InProcessTarget.from_folder(tiny.model, LAYER_IDS)
    expected = oracle.capture(prompt, record_id="x", max_new_tokens=8).header.token_ids
    assert prompt + generate_ids(gpu_like, prompt, max_new_tokens=8) == list(expected)


def test_features_equal_those_of_the_whole_model(gpu_like: TargetServer, tiny: TinyTarget) -> None:
    sampling = {"temperature": 0.0, "max_new_tokens": 12, "ignore_eos": True}
    record = gpu_like.capture(input_ids=tiny.prompts[0], sampling_params=sampling)
    oracle = InProcessTarget.from_folder(tiny.model, LAYER_IDS)
    expected = oracle.capture(tiny.prompts[0], record_id="x", max_new_tokens=12)
    assert record.header.token_ids == expected.header.token_ids
    # Both are rounded to bfloat16 at the end.
    found_TF, expected_TF = record.features_TF.float(), expected.features_TF.float()
    torch.testing.assert_close(found_TF, expected_TF, atol=1e-4, rtol=2**-7)


def test_auto_is_refused_because_ranks_measure_for_themselves(gpu_like: TargetServer) -> None:
    answer = gpu_like.client.put("/dflash/policy", json={"mode": "auto"})
    assert answer.status_code == httpx.codes.UNPROCESSABLE_ENTITY
    assert "tensor parallelism" in answer.text
