"""The launcher and what it starts: real processes, killed for real."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import httpx
import psutil
import pytest

import server_patches
from dflash_online.process.port import free_port, is_port_free
from server_patches.compat import PATCHED_NAMES
from server_patches.launch import SHARED_MEMORY, remove_stale_folders
from tests.e2e.target_server import TargetServer, target_command

RESOLVE = """
import importlib, sys
for name in sys.argv[1:]:
    parts = name.split(".")
    for cut in range(len(parts) - 1, 0, -1):
        try:
            value = importlib.import_module(".".join(parts[:cut]))
        except ModuleNotFoundError:
            continue
        break
    for part in parts[cut:]:
        value = getattr(value, part)
"""


def test_every_patched_name_exists_in_the_installed_sglang() -> None:
    """In a process of its own, with the stand-in kernels, as a server without a GPU has them."""
    stand_in = Path(server_patches.__file__).parent / "cpu" / "stand_in"
    environment = {**os.environ, "PYTHONPATH": str(stand_in), "SGLANG_USE_CPU_ENGINE": "1"}
    result = subprocess.run(
        [sys.executable, "-c", RESOLVE, *(patch.name for patch in PATCHED_NAMES)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert result.returncode == 0, result.stderr[-2000:]


def test_the_server_says_what_it_is(server: TargetServer) -> None:
    info = server.info()
    assert (info["sglang_version"], info["device"]) == ("0.5.23", "cpu")
    assert len(info["target"]["weight_checksum"]) == 32
    assert info["feature_width"] == len(info["layer_ids"]) * info["model"]["hidden_size"]
    assert info["capture"]["slots"] == 8
    for role in ("http", "scheduler"):
        assert psutil.pid_exists(info["processes"][role])


def wait_until_serving(url: str, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 300.0
    while time.monotonic() < deadline:
        assert process.poll() is None
        try:
            if httpx.get(f"{url}/dflash/info", timeout=5.0, trust_env=False).status_code == httpx.codes.OK:
                return
        except httpx.TransportError:
            pass
        time.sleep(1.0)
    pytest.fail("the server did not come up")


def wait_until_gone(processes: list[psutil.Process]) -> None:
    _, alive = psutil.wait_procs(processes, timeout=60.0)
    left = [p for p in alive if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]
    assert left == []


def test_a_killed_launcher_takes_the_whole_server_with_it(model_folder: Path, tmp_path: Path) -> None:
    """Without a drafter: the server makes one, and drafts nothing until it is told to."""
    port = free_port()
    command = target_command(model_folder, tmp_path, port)
    del command[command.index("--drafter") : command.index("--drafter") + 2]
    with (tmp_path / "log").open("wb") as log:
        launcher = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
    tree: list[psutil.Process] = []
    try:
        url = f"http://127.0.0.1:{port}"
        wait_until_serving(url, launcher)
        info = httpx.get(f"{url}/dflash/info", timeout=60.0, trust_env=False).json()
        assert info["policy"]["mode"] == "off"
        assert info["drafter"]["version"].startswith("0-")
        tree = psutil.Process(launcher.pid).children(recursive=True)
        assert len(tree) >= 3  # HTTP, scheduler, detokenizer
        os.kill(launcher.pid, signal.SIGKILL)
        launcher.wait()
        wait_until_gone(tree)
        assert is_port_free("127.0.0.1", port)
        # What a killed launcher could not remove, the next one does.
        folder = SHARED_MEMORY / f"dflash-{launcher.pid}"
        assert folder.is_dir()
        remove_stale_folders(SHARED_MEMORY)
        assert not folder.exists()
    finally:
        for process in tree:
            if process.is_running():
                process.kill()
        launcher.kill()
        launcher.wait()
