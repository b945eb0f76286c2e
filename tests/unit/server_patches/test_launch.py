"""The launcher refuses before it starts anything, and ends a server whose plugin is not everywhere."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import torch
from tiny_models import HIDDEN, VOCAB, tiny_config, tiny_drafter, write_target_folder

from dflash_online.drafter.checkpoint import TrainingInfo, export_tensors, save_checkpoint
from dflash_online.drafter.config import DrafterConfig
from dflash_online.errors import ConfigError, PluginError
from server_patches.compat import MAX_NODES_ENV, POLICY_ENV
from server_patches.launch import LaunchConfig, make_command, make_environment
from server_patches.ready_watch import ReadyWatch


@pytest.fixture
def target(tmp_path: Path) -> Path:
    table = torch.zeros(VOCAB, HIDDEN)
    tensors = {
        "model.embed_tokens.weight": table,
        "lm_head.weight": table.clone(),
        "model.norm.weight": torch.ones(HIDDEN),
    }
    return write_target_folder(tmp_path / "target", tensors)


def save(folder: Path, config: DrafterConfig) -> Path:
    tensors = export_tensors(tiny_drafter(config), config)
    save_checkpoint(folder, config, tensors, training=TrainingInfo(number=1))
    return folder


def serve(model: Path, drafter: Path, *more: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """The real launcher as a real process."""
    return subprocess.run(
        [sys.executable, "-m", "server_patches", "--model", str(model), "--drafter", str(drafter), *more],
        env={**os.environ, "COLUMNS": "300", **environment},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.fixture
def taken_port() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield int(server.getsockname()[1])


def test_a_plugin_list_that_leaves_ours_out_is_refused(target: Path, tmp_path: Path) -> None:
    drafter = save(tmp_path / "d", tiny_config())
    result = serve(target, drafter, SGLANG_PLUGINS="other_plugin")
    assert result.returncode == 2
    assert "SGLANG_PLUGINS must contain dflash_online, got 'other_plugin'" in result.stderr


def test_a_taken_port_is_refused(target: Path, tmp_path: Path, taken_port: int) -> None:
    drafter = save(tmp_path / "d", tiny_config())
    result = serve(target, drafter, "--port", str(taken_port))
    assert result.returncode == 2
    assert str(taken_port) in result.stderr


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": 32}, "hidden_size"),
        ({"num_target_layers": 40, "target_layer_ids": (1, 30)}, "target_layer_ids"),
        ({"vocab_size": 99, "mask_token_id": 98}, "mask_token_id"),
    ],
)
def test_a_drafter_of_another_target_is_refused_by_field(
    target: Path, tmp_path: Path, changes: dict[str, object], message: str
) -> None:
    drafter = save(tmp_path / "d", tiny_config(**changes))
    result = serve(target, drafter)
    assert result.returncode == 2
    assert message in result.stderr


def config(**changes: object) -> LaunchConfig:
    return replace(LaunchConfig(model=Path("m"), drafter=Path("d")), **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"port": 0}, "port"),
        ({"capture_slots": 0}, "capture_slots"),
        ({"capture_tokens": 1}, "capture_tokens"),
        ({"cpu_threads": 0}, "cpu_threads"),
        ({"max_nodes": -1}, "max_nodes"),
        ({"max_nodes": 257}, "max_nodes"),
        ({"verify_widths": (1, 0)}, "verify_widths"),
        ({"verify_widths": (258,)}, "verify_widths"),
        ({"ready_timeout_s": 0.0}, "ready_timeout_s"),
        ({"flags": ("--speculative-algorithm", "DFLASH")}, "SGLang flag"),
        ({"flags": ("--port=1",)}, "SGLang flag"),
        ({"flags": ("--disable-overlap-schedule",)}, "SGLang flag"),
    ],
)
def test_a_value_out_of_bounds_is_named(changes: dict[str, object], field: str) -> None:
    with pytest.raises(ConfigError) as caught:
        config(**changes)
    assert caught.value.field == field


def test_upstreams_worker_cannot_be_chosen_so_no_temperature_is_ignored() -> None:
    command = make_command(config(), on_gpu=False)
    assert command[command.index("--speculative-algorithm") + 1] == "DFLASH_ONLINE"


def test_cpu_support_is_added_only_without_a_gpu(tmp_path: Path) -> None:
    on_gpu = make_environment(config(), tmp_path, 1000, on_gpu=True)
    assert "SGLANG_USE_CPU_ENGINE" not in on_gpu
    assert "stand_in" not in on_gpu.get("PYTHONPATH", "")
    assert "--device" not in make_command(config(), on_gpu=True)
    on_cpu = make_environment(config(cpu_threads=1), tmp_path, 1000, on_gpu=False)
    assert on_cpu["SGLANG_USE_CPU_ENGINE"] == "1"
    assert on_cpu["OMP_NUM_THREADS"] == "1"
    assert on_cpu["PYTHONPATH"].split(os.pathsep)[0].endswith("stand_in")


@pytest.mark.parametrize("on_gpu", [False, True])
@pytest.mark.parametrize("asked", [None, False, True])
def test_steps_overlap_when_asked_to_and_else_only_with_a_gpu(asked: bool | None, on_gpu: bool) -> None:
    command = make_command(config(is_overlapped=asked), on_gpu=on_gpu)
    assert ("--disable-overlap-schedule" not in command) is (on_gpu if asked is None else asked)


def test_trees_are_on_by_default_only_where_they_are_proved(tmp_path: Path) -> None:
    def max_nodes(given: int | None, *, on_gpu: bool) -> str:
        return make_environment(config(max_nodes=given), tmp_path, 1000, on_gpu=on_gpu)[MAX_NODES_ENV]

    assert (max_nodes(None, on_gpu=False), max_nodes(None, on_gpu=True), max_nodes(7, on_gpu=False)) == (
        "32",
        "0",
        "7",
    )


def test_the_policy_at_the_start_may_be_auto(tmp_path: Path) -> None:
    def policy(given: str | None) -> str:
        return make_environment(config(policy=given), tmp_path, 1000, on_gpu=False)[POLICY_ENV]

    assert (policy("auto"), policy(None)) == ("auto", "chain")
    with pytest.raises(ConfigError) as refused:
        config(policy="fastest")
    assert refused.value.field == "policy"


def test_a_real_kernel_package_is_never_shadowed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A real distribution folder on the module path stands for an installed kernel package."""
    folder = tmp_path / "sgl_kernel-0.3.0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: sgl-kernel\nVersion: 0.3.0\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    environment = make_environment(config(), tmp_path, 1000, on_gpu=False)
    assert "stand_in" not in environment.get("PYTHONPATH", "")


def test_a_process_without_the_plugin_is_named(tmp_path: Path) -> None:
    """A real child process that carries a scheduler's title but announced nothing."""
    (tmp_path / "announce").mkdir()
    child = subprocess.Popen(
        ["bash", "-c", 'exec -a "sglang::scheduler" sleep 60'], stdout=subprocess.DEVNULL
    )
    try:
        while "sglang::" not in " ".join(psutil.Process(child.pid).cmdline()[:1]):
            time.sleep(0.01)  # bash has not taken its new name yet
        watch = ReadyWatch("http://unused", tmp_path / "announce", tmp_path, timeout_s=1.0)
        with pytest.raises(PluginError, match=rf"not active in these processes: .*{child.pid}"):
            watch.require_active_everywhere()
        (tmp_path / "announce" / f"{child.pid}.active").touch()
        watch.require_active_everywhere()
    finally:
        child.kill()
        child.wait()
