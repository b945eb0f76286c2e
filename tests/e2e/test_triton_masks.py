"""Trees through the attention that GPUs use: SGLang's own Triton backend, run by Triton's interpreter.

The masks, index lists and kernels are those of a GPU. What differs is that no CUDA graph is captured.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from dflash_online.evaluate.tau import tau_of
from tests.e2e.conftest import serving
from tests.e2e.target_server import TargetServer
from tests.e2e.tiny_target import TinyTarget, generate_all_ids, make_tiny_target


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> TinyTarget:
    return make_tiny_target(tmp_path_factory.mktemp("tiny"), num_prompts=3)


@pytest.fixture(scope="module")
def triton_server(tiny: TinyTarget, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TargetServer]:
    log = tmp_path_factory.mktemp("triton") / "target.log"
    own = ["--max-nodes", "16", "--cpu-threads", "1", "--verify-widths", "1,8,17", "--overlap"]
    flags = ["--skip-tokenizer-init", "--attention-backend", "triton", "--context-length", "128"]
    flags += ["--max-total-tokens", "2048"]
    with serving(tiny.model, tiny.drafter, log, own, flags, {"TRITON_INTERPRET": "1"}) as target:
        yield target


def test_masks_of_a_gpu_backend_make_trees_exact(triton_server: TargetServer, tiny: TinyTarget) -> None:
    assert triton_server.info()["verify"] == {"attention_backend": "TritonAttnBackend", "widths": [1, 8, 17]}
    triton_server.set_policy("off")
    plain = generate_all_ids(triton_server, tiny.prompts, concurrency=1)
    version = triton_server.drafter()["version"]
    for mode, num_nodes in (("chain", 7), ("tree", 7), ("tree", 12)):
        triton_server.set_policy(mode, num_nodes=num_nodes)
        assert generate_all_ids(triton_server, tiny.prompts, concurrency=3) == plain
    histograms = triton_server.histograms_by_policy(version)
    assert tau_of(histograms["tree:12"]) >= tau_of(histograms["chain"]) > 1.5
    # Deep paths: what a node sees of its tree was right over several generations.
    assert sum(histograms["tree:12"][3:]) > 0
