"""Rows, stores and plans for the trainer's unit tests."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from trainer.runs.config import RunConfig, parse_run_config
from trainer.store.record_rows import NewRecord, RecordKind
from trainer.store.run_rows import ResolvedTarget, RunRow
from trainer.store.store import Store

RUN = "run-1"


def make_config(**fields: Any) -> RunConfig:
    return parse_run_config(json.dumps({"target_urls": ["http://t"]} | fields))


def make_resolved(**changes: Any) -> ResolvedTarget:
    fields: dict[str, Any] = {
        "path": "tiny",
        "revision": "",
        "weight_checksum": "f00d",
        "layer_ids": (1, 5),
        "hidden_size": 24,
        "folder": "/tiny",
        "block_size": 4,
        "mask_token_id": 36,
        "first_number": 1,
        "num_held_out": 2,
        "served_version": "none",
        "served_path": None,
    }
    return ResolvedTarget(**fields | changes)


def make_store(tmp_path: Path, **fields: Any) -> tuple[Store, RunRow]:
    """A store with one run."""
    store = Store(tmp_path)
    store.runs.add(RUN, make_config(**fields), make_resolved())
    store.folder(RUN).create()
    return store, store.runs.get(RUN)


def add_record(
    store: Store, number: int, *, kind: RecordKind = RecordKind.TRAIN, num_bytes: int = 10
) -> Path:
    """A row with a small file."""
    path = store.folder(RUN).buffer / f"{number}.rec"
    path.write_bytes(bytes(num_bytes))
    row = NewRecord(
        record_id=f"{RUN}/0/{number}",
        kind=kind,
        position=number if kind is RecordKind.TRAIN else None,
        path=str(path),
        num_bytes=num_bytes,
        num_tokens=5,
        num_supervised=3,
        drafter_version="none",
    )
    assert store.records.admit(RUN, row)
    return path
