"""Room for record files: bounded by bytes, freed by use.

    intake --reserve, write--> [ Buffer: <run>/buffer/*.rec ] <--read-- worker
                                     |
                                     +-- evicts records that were used `max_uses` times, oldest first

Full    `reserve` waits until the worker has used records up; what arrived is never dropped for want of room.
Fails   OSError from `write` (disk full): the caller waits and writes again.
Held-out records lie in their own folder, are few by config, and take no room here.
Runs on the event loop, save `write`, which blocks and is called in a thread.
"""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

from dflash_online.wire.codec import encode_record
from dflash_online.wire.record import Record
from trainer.store.store import Store

_POLL_S = 0.1


class Buffer:
    """The bound on one run's train records."""

    def __init__(self, store: Store, run_id: str, *, bound_bytes: int, max_uses: int) -> None:
        self._store, self._run_id = store, run_id
        self.bound_bytes, self._max_uses = bound_bytes, max_uses
        self._reserved_bytes = 0
        self._turn = asyncio.Lock()  # waiters are served in order, and one of them polls

    @property
    def reserved_bytes(self) -> int:
        """Promised to captures in flight."""
        return self._reserved_bytes

    async def reserve(self, num_bytes: int) -> None:
        """Wait until that many bytes fit; `num_bytes` must not exceed the bound."""
        assert num_bytes <= self.bound_bytes
        async with self._turn:
            while not self._make_room(num_bytes):
                await asyncio.sleep(_POLL_S)
            self._reserved_bytes += num_bytes

    def release(self, num_bytes: int) -> None:
        """Give a reservation back: the record is stored now, or will not come."""
        self._reserved_bytes -= num_bytes

    def _make_room(self, num_bytes: int) -> bool:
        used_bytes = self._store.records.totals(self._run_id).buffer_bytes + self._reserved_bytes
        missing = used_bytes + num_bytes - self.bound_bytes
        if missing <= 0:
            return True
        for record, record_bytes in self._store.records.evictable(self._run_id, self._max_uses):
            # Row first: a file without a row is a leftover, a row without a file would be an error.
            self._store.records.evict(record.seq)
            Path(record.path).unlink(missing_ok=True)
            missing -= record_bytes
            if missing <= 0:
                return True
        return False


def record_file_name(record_id: str) -> str:
    """`run/0/12` -> `0-12.rec`; ids are made by us and hold no other separators."""
    return record_id.split("/", 1)[1].replace("/", "-") + ".rec"


def write_record(record: Record, folder: Path) -> Path:
    """Write one record file, whole or not at all. Blocks.

    Raises:
        OSError: disk full or folder gone; no partial file stays.
    """
    path = folder / record_file_name(record.header.record_id)
    temporary = path.with_suffix(".part")
    try:
        # Not synced: after a power cut the checksum tells a torn file, and the record is dropped.
        with temporary.open("wb") as file:
            for part in encode_record(record):
                file.write(part)
        os.replace(temporary, path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    return path


def remove_leftovers(folder: Path, known: set[str]) -> None:
    """Delete files that no row names: written by a service that was killed before the row was stored."""
    for path in folder.iterdir():
        if str(path) not in known:
            path.unlink(missing_ok=True)
