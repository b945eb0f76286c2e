"""The demo's own folder: emptied at the start, used by one demo at a time.

    workdir/.dflash-demo   marks the folder as ours, and is locked while a demo runs
            drafter-v1/ runs/ logs/ result.json

Only a folder that carries the mark is emptied. Raises ConfigError and ProcessError.
"""

from __future__ import annotations

import fcntl
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from dflash_online.errors import ConfigError, ProcessError

_MARK = ".dflash-demo"


@contextmanager
def own_workdir(path: Path) -> Iterator[Path]:
    """The folder, empty and ours, as an absolute path.

    Raises:
        ConfigError: it holds something that no demo put there, or cannot be made.
        ProcessError: another demo runs in it.
    """
    path = path.resolve()
    mark = path / _MARK
    try:
        path.mkdir(parents=True, exist_ok=True)
        if not mark.exists() and any(path.iterdir()):
            raise ConfigError(
                "--workdir", str(path), "a folder that is new, empty, or left by an earlier demo"
            )
        lock = mark.open("a")
    except OSError as error:
        raise ConfigError("--workdir", str(path), f"a folder that can be written ({error})") from error
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise ProcessError(
                "demo", f"another demo runs in {path}; end it, or give another --workdir"
            ) from error
        for child in path.iterdir():
            if child.is_dir():
                shutil.rmtree(child)
            elif child != mark:
                child.unlink()
        yield path
