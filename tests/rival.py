"""Other implementations of what we do, beside our path and never on it: some tests compare with them.

    tests/rivals/NAME.txt --make rivals--> .venv/rivals/NAME --DFLASH_RIVALS--> [ Rival ] --> its own process

A rival is installed without its dependencies, into a folder that only its own process has on its path: what
it imports, patches and warns of stays out of the tests' process. Usage:

    @pytest.mark.rival("speculators")
    def test_something(rival):
        rival.run(script, folder)
"""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

_REQUIREMENTS = Path(__file__).parent / "rivals"


@dataclass(frozen=True, slots=True)
class Rival:
    """One other implementation, in the version that `tests/rivals/NAME.txt` pins in its first line."""

    name: str
    version: str
    folder: Path | None  # None where DFLASH_RIVALS is not set

    @classmethod
    def named(cls, name: str) -> Rival:
        """Look a rival up. FileNotFoundError for a name without requirements."""
        first = (_REQUIREMENTS / f"{name}.txt").read_text(encoding="ascii").splitlines()[0]
        root = os.environ.get("DFLASH_RIVALS")
        return cls(name, first.partition("==")[2], Path(root).absolute() / name if root else None)

    @property
    def is_installed(self) -> bool:
        """Whether this very version is there."""
        return self.folder is not None and (self.folder / f"{self.name}-{self.version}.dist-info").is_dir()

    def __str__(self) -> str:
        return f"{self.name} {self.version}"

    def run(self, script: str, *arguments: object, timeout_s: float = 300) -> str:
        """Run Python source with the rival on the path; gives its standard output.

        Raises:
            AssertionError: it ended with another code than 0; holds what it said.
        """
        path = os.pathsep.join(filter(None, (str(self.folder), os.environ.get("PYTHONPATH"))))
        run = subprocess.run(
            [sys.executable, "-c", script, *map(str, arguments)],
            # One thread: on small tensors, threads that wait for each other take longer.
            env=os.environ | {"PYTHONPATH": path, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )
        assert run.returncode == 0, f"{self} ended with {run.returncode}:\n{run.stdout}{run.stderr}"
        return run.stdout
