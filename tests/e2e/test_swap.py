"""The drafter changes under load; outputs, requests and the target do not."""

from __future__ import annotations

import json
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from dflash_online.drafter.checkpoint import load_checkpoint
from dflash_online.drafter.config import DrafterConfig
from dflash_online.drafter.model import DFlashDrafter
from dflash_online.evaluate.harness import Harness
from dflash_online.evaluate.tau import chain_walk, tau_of
from dflash_online.target.frozen import FrozenHead
from tests.e2e.conftest import load_drafter
from tests.e2e.target_server import PROMPTS, TargetServer, chat_text

NUM_SWAPS = 50


def test_fifty_swaps_under_load_fail_no_request_and_change_no_output(
    chain_server: TargetServer, drafters: list[Path]
) -> None:
    texts = [chat_text(prompt) for prompt in PROMPTS]
    chain_server.set_policy("off")
    wanted = chain_server.generate_all(texts, concurrency=1)
    chain_server.set_policy("chain")
    checksum = chain_server.info()["target"]["weight_checksum"]
    is_over = threading.Event()
    outputs: list[list[list[int]]] = []

    def load() -> None:
        while not is_over.is_set():
            outputs.append(chain_server.generate_all(texts, concurrency=4))

    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(load)
        replies = [chain_server.swap(drafters[1 + i % 2]) for i in range(NUM_SWAPS)]
        is_over.set()
        running.result()
    assert all(output == wanted for output in outputs)
    versions = [str(load_checkpoint(folder).version) for folder in drafters]
    for index, reply in enumerate(replies):
        assert reply["version"] == versions[1 + index % 2]
        assert reply["checksum"].startswith(reply["version"].split("-")[1])
        assert reply["is_read_back"] is True
        assert reply["target_checksum"] == checksum
    assert max(reply["pause_ms"] for reply in replies) < 5000.0
    assert chain_server.drafter()["num_swaps"] >= NUM_SWAPS


def test_roll_back_brings_the_previous_drafter_once(chain_server: TargetServer, drafters: list[Path]) -> None:
    first = chain_server.drafter()["version"]
    chain_server.swap(drafters[2])
    assert chain_server.post("/dflash/drafter/rollback")["version"] == first
    again = chain_server.client.post("/dflash/drafter/rollback", json={})
    assert again.status_code == httpx.codes.CONFLICT
    assert chain_server.drafter()["version"] == first


@torch.no_grad()
def reference_block(
    drafter: DFlashDrafter, frozen: FrozenHead, features_CF: torch.Tensor, block_id_B: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Block output [B, H] and rotated context keys [L, C, K, E] by our own drafter, as training computes."""
    cache = drafter.new_cache()
    drafter.extend_context(cache, features_CF, torch.arange(len(features_CF)))
    hidden_BH = drafter.draft_block(frozen.embed(block_id_B), len(features_CF), cache)
    keys = torch.stack([cache.layer(i)[0] for i in range(drafter.config.num_layers)])
    return hidden_BH, keys


@torch.no_grad()
def target_features(model_folder: Path, ids: list[int], layer_ids: tuple[int, ...]) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32).eval()
    states = model(torch.tensor([ids]), output_hidden_states=True).hidden_states
    return torch.cat([states[layer + 1][0] for layer in layer_ids], dim=-1)


def test_what_trains_is_what_serves_before_and_after_a_swap(
    chain_server: TargetServer,
    drafters: list[Path],
    drafter_config: DrafterConfig,
    frozen: FrozenHead,
    model_folder: Path,
) -> None:
    """Logits and context keys of the served drafter equal our own forward pass to 1e-4, in float32."""
    ids = [int(i) for i in torch.randint(100, 40000, (90,), generator=torch.Generator().manual_seed(3))]
    features_CF = target_features(model_folder, ids, drafter_config.target_layer_ids)
    # The same text is probed before and after each swap: nothing of the old drafter's context may remain.
    for folder in (drafters[0], drafters[1], drafters[2], drafters[0]):
        if str(load_checkpoint(folder).version) != chain_server.drafter()["version"]:
            chain_server.swap(folder)
        served = chain_server.probe(ids)
        drafter = load_drafter(drafter_config, load_checkpoint(folder).tensors)
        hidden_BH, keys = reference_block(drafter, frozen, features_CF, served["block_id_B"])
        torch.testing.assert_close(served["context_key_LCKE"], keys, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(
            frozen.logits(served["hidden_BH"]), frozen.logits(hidden_BH), rtol=1e-4, atol=1e-4
        )


def test_accepted_drafts_agree_with_the_offline_walk_and_keep_the_output(
    chain_server: TargetServer, trained_drafter: Path, drafter_config: DrafterConfig, frozen: FrozenHead
) -> None:
    """Trained weights, real acceptance: server and offline walk count the same drafts on the same text."""
    sampling = {"temperature": 0.0, "max_new_tokens": 40}
    texts = [chat_text(prompt) for prompt in PROMPTS[:6]]
    chain_server.set_policy("off")
    records = [chain_server.capture(text=text, sampling_params=sampling) for text in texts]
    drafter = load_drafter(drafter_config, load_checkpoint(trained_drafter).tensors)
    chain_server.swap(trained_drafter)
    chain_server.set_policy("chain")
    version = chain_server.drafter()["version"]
    # Other tests may have drafted trees with this version: policies are counted apart.
    before = _padded(chain_server.histograms_by_policy(version).get("chain", []))
    again = [chain_server.capture(text=text, sampling_params=sampling) for text in texts]
    assert [r.header.token_ids for r in again] == [r.header.token_ids for r in records]
    pooled = [0] * 8
    for record in again:
        online = _padded(record.header.acceptance)
        assert online == list(chain_walk(drafter, frozen, record))
        pooled = [total + count for total, count in zip(pooled, online, strict=True)]
    # The harness, too: tau of chain and of trees, on the same greedy text.
    harness = Harness(drafter, frozen, num_nodes=[16])
    assert all([harness.add(record) for record in again])
    assert harness.report.tau("chain") == tau_of(pooled)
    assert sum(pooled[1:]) > 0.2 * sum(pooled)
    # The three counts of the server agree: per request, per version, and as a Prometheus series.
    after = _padded(chain_server.histograms_by_policy(version)["chain"])
    assert [a - b for a, b in zip(after, before, strict=True)] == pooled
    series = _series(chain_server, version, "chain")
    assert [series.get(a, 0) for a in range(8)] == after
    # Rows committed from accepted drafts are rows of the target as well.
    for old, new in zip(records, again, strict=True):
        torch.testing.assert_close(old.features_TF.float(), new.features_TF.float(), rtol=2**-7, atol=2**-7)


def _padded(histogram: Any) -> list[int]:
    return [*histogram, *[0] * (8 - len(histogram))]


def _series(server: TargetServer, version: str, policy: str) -> dict[int, int]:
    """Accepted drafts -> steps, from /metrics."""
    counts: dict[int, int] = {}
    for line in server.client.get("/metrics").text.splitlines():
        labels_wanted = f'drafter_version="{version}"', f'policy="{policy}"'
        if line.startswith("dflash:verify_steps_total") and all(one in line for one in labels_wanted):
            labels, value = line.rsplit(" ", 1)
            counts[int(labels.split('accepted="')[1].split('"')[0])] = int(float(value))
    return counts


def copy_of(folder: Path, to: Path) -> Path:
    shutil.copytree(folder, to)
    return to


def test_a_drafter_that_does_not_fit_is_refused_before_a_byte_is_written(
    chain_server: TargetServer, drafters: list[Path], tmp_path: Path
) -> None:
    live = chain_server.drafter()
    missing = {"path": str(tmp_path / "nowhere")}
    unfinished = copy_of(drafters[1], tmp_path / "unfinished")
    (unfinished / "COMPLETE").unlink()
    misnamed = copy_of(drafters[1], tmp_path / "misnamed")
    tensors = load_file(misnamed / "model.safetensors")
    tensors["fc.wait"] = tensors.pop("fc.weight")
    save_file(tensors, misnamed / "model.safetensors")
    not_finite = copy_of(drafters[1], tmp_path / "not_finite")
    tensors = load_file(not_finite / "model.safetensors")
    tensors["norm.weight"][3] = float("nan")
    save_file(tensors, not_finite / "model.safetensors")
    other_block = copy_of(drafters[1], tmp_path / "other_block")
    config = json.loads((other_block / "config.json").read_text())
    config["block_size"] = config["dflash_config"]["block_size"] = 16
    (other_block / "config.json").write_text(json.dumps(config))
    refusals = {
        str(tmp_path / "nowhere"): "CheckpointError",
        str(unfinished): "IncompleteCheckpointError",
        str(misnamed): "TensorMismatchError",
        str(not_finite): "TensorMismatchError",
        str(other_block): "ConfigError",
    }
    assert missing["path"] in refusals
    for path, kind in refusals.items():
        answer = chain_server.client.post("/dflash/drafter/stage", json={"path": path})
        assert answer.status_code == httpx.codes.UNPROCESSABLE_ENTITY, path
        error = answer.json()["error"]
        assert error["type"] == kind or (kind == "CheckpointError" and error["type"].endswith(kind)), error
    commit = chain_server.client.post("/dflash/drafter/commit", json={"version": "2-000000000000"})
    assert commit.status_code == httpx.codes.CONFLICT
    assert chain_server.drafter() == live


def test_a_staged_drafter_is_committed_only_under_its_own_version(
    chain_server: TargetServer, drafters: list[Path]
) -> None:
    staged = chain_server.post("/dflash/drafter/stage", {"path": str(drafters[1])})["staged"]
    answer = chain_server.client.post("/dflash/drafter/commit", json={"version": "8-abcdefabcdef"})
    assert answer.status_code == httpx.codes.CONFLICT
    assert staged in answer.json()["error"]["message"]
    assert chain_server.post("/dflash/drafter/commit", {"version": staged})["version"] == staged
