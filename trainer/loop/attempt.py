"""One attempt of one rank: join the others, load, loop, report how it ended.

    trainer.loop (process) --> [ run_attempt ] --phase, detail--> store --> supervisor

The outermost loop of the process, so every error is caught, stored and turned into an exit code.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from pathlib import Path

import torch

from dflash_online.errors import CheckpointError, ConfigError
from trainer.loop.parallel import Ranks
from trainer.loop.setup import choose_device, prepare
from trainer.loop.worker import WorkerLoop
from trainer.runs.state import WorkerPhase
from trainer.store.store import Store

logger = logging.getLogger(__name__)


def run_attempt(runs_dir: Path, run_id: str, environment: Mapping[str, str]) -> int:
    """Train until the loop ends; returns the process's exit code."""
    is_first = environment.get("RANK", "0") == "0"
    store = Store(runs_dir)
    try:
        phase = _loop(store, run_id, environment)
    except (ConfigError, CheckpointError) as exc:
        return _fail(store, run_id, exc, WorkerPhase.BROKEN)
    except Exception as exc:  # noqa: BLE001 (outermost loop)
        return _fail(store, run_id, exc, WorkerPhase.FAILED)
    if is_first:
        worker = store.runs.worker(run_id)
        store.runs.worker_says(run_id, phase, step=worker.step if worker else 0)
    store.close()
    return 0


def _loop(store: Store, run_id: str, environment: Mapping[str, str]) -> WorkerPhase:
    run = store.runs.get(run_id)
    if run.config.worker_threads:
        torch.set_num_threads(run.config.worker_threads)
    device = choose_device(run.config, int(environment.get("LOCAL_RANK", "0")))
    ranks = Ranks.join(environment, device) if "RANK" in environment else Ranks.alone(device)
    pids = ranks.gather(os.getpid())
    if ranks.is_first:
        store.runs.worker_pids(run_id, (os.getppid(), *pids))
        store.runs.worker_says(run_id, WorkerPhase.LOADING, step=0)
    training = prepare(store, run, device)
    phase = WorkerLoop(store, run, training, ranks).run()
    ranks.leave()
    return phase


def _fail(store: Store, run_id: str, error: Exception, phase: WorkerPhase) -> int:
    """Any rank may report; the supervisor takes the last word as the reason."""
    logger.error("worker ends: %s", phase.value, exc_info=error)
    worker = store.runs.worker(run_id)
    if worker is not None and worker.phase is WorkerPhase.BROKEN:
        return 1  # another rank named the cause; this one only lost its connection
    detail = f"{type(error).__name__}: {error}"
    store.runs.worker_says(run_id, phase, step=worker.step if worker else 0, detail=detail)
    return 1
