"""Fixtures of the integration tests: a target folder per session, a fake target and a service per module."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from fake_target import FakeTarget, write_target_folder
from trainer_process import TrainerProcess


@pytest.fixture(scope="session")
def target_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return write_target_folder(tmp_path_factory.mktemp("models") / "tiny-llama")


@pytest.fixture(scope="module")
def target(target_folder: Path) -> Iterator[FakeTarget]:
    fake = FakeTarget(target_folder)
    fake.start()
    yield fake
    fake.stop()


@pytest.fixture(scope="module")
def trainer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TrainerProcess]:
    service = TrainerProcess(tmp_path_factory.mktemp("trainer") / "runs")
    yield service
    service.close()
