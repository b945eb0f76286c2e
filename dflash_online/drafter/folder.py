"""A folder that appears whole or not at all: how checkpoints and optimizer states are written.

    with new_folder(path) as scratch:   # files go into scratch, beside the final name
        ...                             # every file is synced, then scratch is renamed

A writer that is killed at any point leaves a hidden scratch folder and nothing under the final name. A disk
that is full, read-only or gone leaves nothing at all. Knows nothing of what is inside. Raises
CheckpointError.
"""

from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from dflash_online.errors import CheckpointError


@contextmanager
def new_folder(path: Path, *, replace: bool = False, what: str = "") -> Iterator[Path]:
    """Give a scratch folder that becomes `path` when the block ends without an error.

    Args:
        path: the folder to make; its parent is made when missing.
        replace: take the place of a folder of that name, and away the scratch folders of killed writers.
            Only for a path that has one writer.
        what: the subject of the error message, such as "optimizer state "; empty for the folder itself.

    Raises:
        CheckpointError: the folder exists and `replace` is off, or the disk refused.
    """
    scratch = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.tmp")
    try:
        if not replace:
            refuse_existing(path)
        else:
            for leftover in path.parent.glob(f".{path.name}.*.tmp"):
                shutil.rmtree(leftover, ignore_errors=True)
        scratch.mkdir(parents=True)
        yield scratch
        for file in sorted(scratch.iterdir()):
            _sync(file)
        _sync(scratch)
        if replace:
            shutil.rmtree(path, ignore_errors=True)
        scratch.rename(path)
        _sync(path.parent)
    except (OSError, SafetensorError) as exc:
        raise CheckpointError(str(path), f"{what}cannot be written: {exc}") from exc
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def refuse_existing(path: Path) -> None:
    """Raise CheckpointError when there is something at `path`: worth asking before long work."""
    if path.exists():
        raise CheckpointError(str(path), "exists already; checkpoints are never overwritten")


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
