"""The plugin names what it touches, finds it upstream, and refuses any other SGLang."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from server_patches.compat import PATCHED_NAMES, SGLANG_VERSION


def test_every_patched_name_states_how_and_why() -> None:
    for patch in PATCHED_NAMES:
        assert patch.how
        assert patch.reason
        assert patch.obsolete_when
    names = [patch.name for patch in PATCHED_NAMES]
    assert len(set(names)) == len(names)


def run_python(code: str, path: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": str(path), **environment},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_another_sglang_is_refused_by_version(tmp_path: Path) -> None:
    """A real distribution folder of another version, found first on the module path."""
    folder = tmp_path / "sglang-0.5.22.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: sglang\nVersion: 0.5.22\n")
    code = "from server_patches.compat import require_supported_version; require_supported_version()"
    result = run_python(code, tmp_path)
    assert result.returncode == 1
    assert f"sglang must be version {SGLANG_VERSION}, got 0.5.22" in result.stderr


def test_activation_announces_its_failure_to_the_launcher(tmp_path: Path) -> None:
    folder = tmp_path / "sglang-0.5.22.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: sglang\nVersion: 0.5.22\n")
    announced = tmp_path / "announce"
    announced.mkdir()
    code = "from server_patches.plugin import activate; activate()"
    result = run_python(code, tmp_path, DFLASH_ANNOUNCE_DIR=str(announced))
    assert result.returncode == 1
    (file,) = announced.iterdir()
    assert file.suffix == ".error"
    assert "0.5.22" in file.read_text()


def test_the_list_of_patches_is_printed() -> None:
    result = subprocess.run(
        [sys.executable, "-m", "server_patches", "--list-patches"],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    for patch in PATCHED_NAMES:
        assert patch.name.rsplit(".", 1)[1] in result.stdout.replace("\n", "")
