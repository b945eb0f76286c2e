"""One run as JSON: for GET /train/status, /runs/{id} and the dashboard.

    store, controller --> [ status ] --> JSON

Reads only. Every figure that belongs to a drafter names its version.
"""

from __future__ import annotations

import os
import time
from dataclasses import asdict
from typing import Any

import psutil

from dflash_online.target.client import VersionAcceptance
from trainer.runs.config import dump_run_config
from trainer.runs.controller import RunController
from trainer.store.checkpoint_rows import CheckpointRow
from trainer.store.event_rows import EventKind
from trainer.store.run_rows import RunRow
from trainer.store.store import Store

_NUM_EVENTS = 30


def run_status(store: Store, controller: RunController) -> dict[str, Any]:
    """What the service does now. Without any run: state `idle`."""
    run = controller.latest()
    if run is None:
        return {"state": "idle", "run_id": None}
    active = controller.active
    live = active.guard.live if active is not None else ()
    step = store.steps.latest(run.run_id)
    totals = store.records.totals(run.run_id)
    published = store.checkpoints.published(run.run_id)
    return run_summary(run) | {
        "step": 0 if step is None else step.step,
        "metrics": None if step is None else asdict(step),
        "records": asdict(totals) | {"dropped": _non_zero(store, run.run_id)},
        "buffer": {
            "bytes": totals.buffer_bytes,
            "bound_bytes": run.config.buffer_bytes,
            "reserved_bytes": active.feed.buffer.reserved_bytes if active else 0,
        },
        "feed": {
            "cursor": run.cursor,
            "in_flight": active.feed.num_in_flight if active else 0,
            "is_done": run.is_feed_done,
            "prompts_waiting": store.added_prompts.count(run.run_id),
            "unavailable_targets": sorted(active.targets.unavailable) if active else [],
        },
        "drafter_version": published[-1].version if published else run.resolved.served_version,
        "versions": _versions(run, store.checkpoints.all(run.run_id), live),
        "worker": _worker(store, run.run_id),
        "num_alarms": store.events.count(run.run_id, EventKind.ALARM),
        "events": [asdict(event) for event in store.events.latest(run.run_id, limit=_NUM_EVENTS)],
        "service": {"pid": os.getpid(), "rss_mb": round(psutil.Process().memory_info().rss / 2**20, 1)},
    }


def run_summary(run: RunRow) -> dict[str, Any]:
    """State and times."""
    return {
        "run_id": run.run_id,
        "state": run.state.value,
        "reason": run.reason,
        "created_at": run.created_at,
        "updated_at": run.updated_at,
        "finished_at": run.finished_at,
    }


def run_details(store: Store, run: RunRow) -> dict[str, Any]:
    """Config, target and every checkpoint."""
    step = store.steps.latest(run.run_id)
    return run_summary(run) | {
        "config": dump_run_config(run.config),
        "target": asdict(run.resolved),
        "step": 0 if step is None else step.step,
        "records": asdict(store.records.totals(run.run_id)) | {"dropped": _non_zero(store, run.run_id)},
        "checkpoints": [_checkpoint(row) for row in store.checkpoints.all(run.run_id)],
    }


def _checkpoint(row: CheckpointRow) -> dict[str, Any]:
    return asdict(row) | {"state": row.state.value}


def _versions(
    run: RunRow, rows: list[CheckpointRow], live: tuple[VersionAcceptance, ...]
) -> list[dict[str, Any]]:
    """Every version that was meant for the target, and the one it served before, with both kinds of tau."""
    known: dict[str, dict[str, Any]] = {run.resolved.served_version: {"state": "served_before", "step": None}}
    for row in rows:
        if row.state.value != "saved":
            known[row.version] = {
                "state": row.state.value,
                "step": row.step,
                "held_out_tau": row.held_out_tau,
                "gate": row.gate,
                "pause_ms": max(
                    (a["pause_ms"] for a in (row.swap or {}).values() if "pause_ms" in a), default=None
                ),
                "published_at": row.published_at,
            }
    taus: dict[str, dict[str, Any]] = {}
    for entry in live:
        figures = {"tau": round(entry.tau, 4), "num_steps": entry.num_steps, "histogram": entry.histogram}
        taus.setdefault(entry.drafter_version, {})[entry.policy] = figures
    return [
        {"version": version, **fields, "live": taus.get(version, {})} for version, fields in known.items()
    ]


def _non_zero(store: Store, run_id: str) -> dict[str, int]:
    return {reason.value: count for reason, count in store.records.dropped(run_id).items() if count}


def _worker(store: Store, run_id: str) -> dict[str, Any] | None:
    worker = store.runs.worker(run_id)
    if worker is None:
        return None
    return {
        "phase": worker.phase.value,
        "pids": list(worker.pids),
        "step": worker.step,
        "heartbeat_age_s": round(time.time() - worker.heartbeat, 2),
        "num_restarts": worker.num_restarts,
        "detail": worker.detail,
        "rss_mb": round(sum(_rss_bytes(pid) for pid in worker.pids) / 2**20, 1),
    }


def _rss_bytes(pid: int) -> int:
    try:
        return int(psutil.Process(pid).memory_info().rss)
    except psutil.Error:
        return 0
