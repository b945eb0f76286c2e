"""Shared-memory slots: where the scheduler leaves feature rows for the HTTP process.

    HTTP: SlotPool.acquire -> CaptureKey (rides in the request's cache key) -> scheduler: open_slot -> rows

One file per slot in a folder of shared memory, sized once; a slot serves one capture at a time. Full pool:
`acquire` returns None and capture is shed, requests are not. The folder belongs to one server and is removed
by its launcher. Row p of a slot belongs to position p of the sequence.
"""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass
from pathlib import Path

import torch

CAPTURE_DIR_ENV = "DFLASH_CAPTURE_DIR"
_KEY_PREFIX = "dflash-capture"


@dataclass(frozen=True, slots=True)
class CaptureKey:
    """Names one capture. Its text form is the request's cache key, so no prefix is ever shared with it.

    Example: `dflash-capture:3:9f2c...` is capture 9f2c... in slot 3.
    """

    slot: int
    capture_id: str

    def __str__(self) -> str:
        return f"{_KEY_PREFIX}:{self.slot}:{self.capture_id}"

    @classmethod
    def parse(cls, extra_key: str | None) -> CaptureKey | None:
        """The capture a request belongs to; None for an ordinary request."""
        if not extra_key or not extra_key.startswith(_KEY_PREFIX + ":"):
            return None
        _, slot, capture_id = extra_key.split(":", 2)
        return cls(int(slot), capture_id)


def slot_path(slot: int) -> Path:
    """File of a slot, in the folder that the launcher named in the environment."""
    return Path(os.environ[CAPTURE_DIR_ENV]) / f"slot-{slot:04d}"


def open_slot(slot: int, row_width: int) -> torch.Tensor:
    """Map a slot as [rows, row_width] bfloat16, shared with the other process."""
    path = slot_path(slot)
    num_rows = path.stat().st_size // (2 * row_width)
    flat = torch.from_file(str(path), shared=True, size=num_rows * row_width, dtype=torch.bfloat16)
    return flat.view(num_rows, row_width)


class SlotPool:
    """All slots of a server. Used from the HTTP event loop; the lock guards generator finalisers."""

    def __init__(self, num_slots: int, slot_bytes: int) -> None:
        self.num_slots, self.slot_bytes = num_slots, slot_bytes
        self._free = list(range(num_slots))
        self._lock = threading.Lock()
        for slot in range(num_slots):
            with open(slot_path(slot), "wb") as file:
                file.truncate(slot_bytes)

    @property
    def num_free(self) -> int:
        return len(self._free)

    def acquire(self) -> int | None:
        """A free slot, or None: capture must be shed now."""
        with self._lock:
            return self._free.pop(0) if self._free else None

    def release(self, slot: int) -> None:
        """Give a slot back. Its pages go back to the system, so that idle capture costs no memory."""
        os.truncate(slot_path(slot), 0)
        os.truncate(slot_path(slot), self.slot_bytes)
        with self._lock:
            self._free.append(slot)
