"""The real SGLang with the real SmolLM2-135M, once for this folder, in float32, where outputs compare.

The model folder comes from the environment variable DFLASH_MODEL, which `make test` sets after fetching it.
Without it these tests are skipped by name. One server, small on purpose: prefill chunks of 64 tokens, a
context of 512, 8 capture slots, so that chunks, limits and shedding are reached by short texts.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
import torch

from dflash_online.distill.objective import block_objective
from dflash_online.distill.pack import pack_records
from dflash_online.distill.recipe import ZLAB
from dflash_online.drafter.checkpoint import TrainingInfo, export_tensors, save_checkpoint
from dflash_online.drafter.config import DrafterConfig
from dflash_online.drafter.init import initialize, new_drafter_config
from dflash_online.drafter.model import DFlashDrafter
from dflash_online.process.port import free_port
from dflash_online.process.service import Service
from dflash_online.target.frozen import FrozenHead
from dflash_online.target.model_info import TargetModelInfo
from dflash_online.wire.record import Record
from tests.e2e.target_server import CONTEXT_LENGTH, PROMPTS, TargetServer, chat_text, target_command

MAX_NODES = 64


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.e2e)


@pytest.fixture(scope="session")
def model_folder() -> Path:
    folder = os.environ.get("DFLASH_MODEL")
    if not folder:
        pytest.skip("DFLASH_MODEL names no model folder; `make test` fetches one and sets it")
    return Path(folder)


@pytest.fixture(scope="session")
def drafter_config(model_folder: Path) -> DrafterConfig:
    target = TargetModelInfo.from_folder(model_folder)
    return replace(new_drafter_config(target, num_layers=2, block_size=8), dtype="float32")


@pytest.fixture(scope="session")
def drafters(drafter_config: DrafterConfig, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Three checkpoints of equal shape and different random weights, versions 1 to 3."""
    root = tmp_path_factory.mktemp("drafters")
    folders = []
    for number in (1, 2, 3):
        drafter = initialize(drafter_config, seed=number)
        folder = root / f"v{number}"
        tensors = export_tensors(drafter, drafter_config)
        save_checkpoint(folder, drafter_config, tensors, training=TrainingInfo(number=number))
        folders.append(folder)
    return folders


@pytest.fixture(scope="session")
def frozen(model_folder: Path) -> FrozenHead:
    return FrozenHead.from_folder(model_folder, dtype=torch.float32)


@contextmanager
def serving(
    model: Path,
    drafter: Path,
    log: Path,
    own_flags: list[str],
    sglang_flags: list[str],
    environment: dict[str, str] | None = None,
) -> Iterator[TargetServer]:
    """A server of our own, up and answering; fails when it has ended by the time it is given back."""
    port = free_port()
    command = target_command(model, drafter, port, *own_flags, "--", *sglang_flags)
    with Service("target", command, log, environment=environment) as service:
        url = f"http://127.0.0.1:{port}"
        service.wait_ready(f"{url}/dflash/info", timeout_s=300.0, on_wait=lambda _: None)
        with httpx.Client(base_url=url, timeout=180.0, trust_env=False) as client:
            _wait_until_serving(client)
            yield TargetServer(client, log)
        service.require_running()


@pytest.fixture(scope="package")
def server(
    model_folder: Path, drafters: list[Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[TargetServer]:
    log = tmp_path_factory.mktemp("server") / "target.log"
    own = ["--capture-slots", "8", "--capture-tokens", "600", "--max-nodes", str(MAX_NODES)]
    # As with CUDA graphs, trees of up to 19 nodes and chains are verified in wider windows; larger trees fit
    # no width and are not.
    own += ["--verify-widths", "1,9,20"]
    flags = ["--chunked-prefill-size", "64", "--context-length", str(CONTEXT_LENGTH)]
    flags += ["--enable-custom-logit-processor"]
    with serving(model_folder, drafters[0], log, own, flags) as target:
        yield target


@pytest.fixture(scope="package")
def trained_drafter(
    server: TargetServer,
    drafter_config: DrafterConfig,
    frozen: FrozenHead,
    tmp_path_factory: pytest.TempPathFactory,
) -> Path:
    """Version 4: trained for some seconds on the very answers that the tests ask for, so that drafts are
    accepted and real paths of several nodes are walked, moved and committed."""
    records = [
        server.capture(text=chat_text(prompt), sampling_params={"temperature": 0.0, "max_new_tokens": 32})
        for prompt in PROMPTS
    ]
    drafter = overfit(drafter_config, frozen, records, steps=80)
    folder = tmp_path_factory.mktemp("trained") / "v4"
    tensors = export_tensors(drafter, drafter_config)
    save_checkpoint(folder, drafter_config, tensors, training=TrainingInfo(number=4))
    return folder


@pytest.fixture
def tree_server(server: TargetServer, trained_drafter: Path) -> TargetServer:
    """The server, drafting trees, with the trained drafter live."""
    server.set_policy("tree")
    if not server.drafter()["version"].startswith("4-"):
        server.swap(trained_drafter)
    return server


def _wait_until_serving(client: httpx.Client) -> None:
    deadline = time.monotonic() + 120.0
    while client.get("/health").status_code != httpx.codes.OK:
        assert time.monotonic() < deadline
        time.sleep(0.5)


@pytest.fixture
def chain_server(server: TargetServer, drafters: list[Path]) -> TargetServer:
    """The server, drafting chains, with the first drafter live."""
    server.set_policy("chain")
    if not server.drafter()["version"].startswith("1-"):
        server.swap(drafters[0])
    return server


def load_drafter(config: DrafterConfig, tensors: dict[str, torch.Tensor]) -> DFlashDrafter:
    drafter = DFlashDrafter(config)
    drafter.load_state_dict(tensors)
    return drafter.eval()


def overfit(config: DrafterConfig, frozen: FrozenHead, records: list[Record], steps: int) -> DFlashDrafter:
    """A drafter that knows these records, so that real drafts are accepted in a test of seconds."""
    drafter, generator = initialize(config, seed=4), torch.Generator().manual_seed(4)
    optimizer = torch.optim.AdamW(drafter.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.0)
    for _ in range(steps):
        batch = pack_records(records, block_size=config.block_size, num_anchors=48, generator=generator)
        result = block_objective(drafter, frozen, batch, ZLAB)
        optimizer.zero_grad()
        (result.loss_sum / result.denominator).backward()
        torch.nn.utils.clip_grad_norm_(drafter.parameters(), 1.0)
        optimizer.step()
    return drafter.eval()
