"""Keeps one worker alive: starts it, restarts it, ends it.

    [ Supervisor ] --pipe--> keeper --> torchrun --> ranks (trainer.loop)
          ^                                             |
          +---------- phase, heartbeat, detail ---------+  (store)

Lost      a worker that dies, or is silent for too long, starts again from its last checkpoint, after a
          growing wait, at most `max_restarts` times within `restart_window_s`; then WorkerLostError.
Fatal     phase `broken`: a fault that a restart cannot cure; WorkerLostError at once.
Leftovers none: the keeper ends the whole tree when the service dies, even by SIGKILL.
Runs on the event loop, waits for processes without blocking it.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from dflash_online.process.keeper import keeper_command
from trainer.errors import WorkerLostError
from trainer.runs.config import RunConfig
from trainer.runs.state import WorkerPhase
from trainer.store.event_rows import EventKind
from trainer.store.store import Store

_POLL_S = 0.1
_KEEPER_GRACE_S = 2.0
_LONGEST_WAIT_S = 30.0
_ENDED = frozenset({WorkerPhase.STOPPED, WorkerPhase.SUSPENDED, WorkerPhase.COMPLETED})
_READY = frozenset({WorkerPhase.TRAINING, WorkerPhase.WAITING, WorkerPhase.PAUSED, WorkerPhase.SAVING})


@dataclass(frozen=True, kw_only=True, slots=True)
class SupervisorConfig:
    """Bounds of patience, in seconds."""

    max_restarts: int = 5
    restart_window_s: float = 600.0
    first_wait_s: float = 1.0
    silence_s: float = 1800.0
    """A worker whose heartbeat is older is killed; above the time that a gate may take."""
    stop_s: float = 120.0
    """Time to end after a stop; then the worker is killed."""


class Supervisor:
    """One run's worker."""

    def __init__(
        self,
        store: Store,
        run_id: str,
        config: RunConfig,
        bounds: SupervisorConfig,
        on_ready: Callable[[], None],
    ) -> None:
        self._store, self._run_id, self._config = store, run_id, config
        self._bounds, self._on_ready = bounds, on_ready
        self._keeper: asyncio.subprocess.Process | None = None
        self._restarts: deque[float] = deque()
        self._kill_at: float | None = None

    async def run(self) -> WorkerPhase:
        """Keep a worker until it ends in order.

        Returns:
            The phase in which it ended; `stopped` as well when it had to be killed after `end_within`.

        Raises:
            WorkerLostError: it ended too often, or for good.
        """
        try:
            while True:
                code = await self._attempt(is_restart=bool(self._restarts))
                phase = self._phase()
                if phase in _ENDED:
                    return phase
                if self._kill_at is not None:
                    return WorkerPhase.STOPPED
                await self._before_restart(code, phase)
                if self._kill_at is not None:
                    return WorkerPhase.STOPPED
        finally:
            await self._kill()

    def end_within(self, bound_s: float | None = None) -> None:
        """The run was told to end: kill the worker when it has not done so in time, and never restart it."""
        self._kill_at = time.monotonic() + (self._bounds.stop_s if bound_s is None else bound_s)

    async def _attempt(self, *, is_restart: bool) -> int:
        folder = self._store.folder(self._run_id)
        with folder.worker_log.open("ab") as log:
            self._keeper = await asyncio.create_subprocess_exec(
                *self._command(folder.path.parent),
                stdin=asyncio.subprocess.PIPE,  # never written: its end tells the keeper that we died
                stdout=log,
                stderr=log,
                env=self._environment(),
                start_new_session=True,
            )
        self._store.runs.worker_spawned(self._run_id, self._keeper.pid, is_restart=is_restart)
        started, is_ready = time.monotonic(), False
        while self._keeper.returncode is None:
            await asyncio.sleep(_POLL_S)
            phase = self._phase()
            if not is_ready and phase in _READY:
                is_ready = True
                self._on_ready()
            # A worker that still imports torch has nothing to save.
            is_unborn = phase is WorkerPhase.SPAWNED and self._kill_at is not None
            is_late = self._kill_at is not None and time.monotonic() >= self._kill_at
            # Its last word is said and its files are complete: torchrun's own way out takes seconds.
            is_over = phase in _ENDED
            if is_over or is_unborn or is_late or self._is_silent(started):
                await self._kill()
        return self._keeper.returncode

    def _is_silent(self, started: float) -> bool:
        worker = self._store.runs.worker(self._run_id)
        quiet_s = time.time() - worker.heartbeat if worker else time.monotonic() - started
        return quiet_s > self._bounds.silence_s

    async def _before_restart(self, code: int, phase: WorkerPhase) -> None:
        now = time.monotonic()
        while self._restarts and now - self._restarts[0] > self._bounds.restart_window_s:
            self._restarts.popleft()
        detail = self._detail()
        worker = self._store.runs.worker(self._run_id)
        if phase not in (WorkerPhase.FAILED, WorkerPhase.BROKEN):  # killed: it had no last word
            step = worker.step if worker else 0
            self._store.runs.worker_says(self._run_id, WorkerPhase.FAILED, step=step, detail=detail)
        self._store.events.add(
            self._run_id,
            EventKind.WORKER_LOST,
            exit_code=code,
            detail=detail,
            num_restarts=len(self._restarts),
        )
        if phase is WorkerPhase.BROKEN or len(self._restarts) >= self._bounds.max_restarts:
            raise WorkerLostError(code, len(self._restarts), self._bounds.restart_window_s, detail)
        wait_s = min(_LONGEST_WAIT_S, self._bounds.first_wait_s * 2 ** len(self._restarts))
        self._restarts.append(now)
        deadline = time.monotonic() + wait_s
        while time.monotonic() < deadline and self._kill_at is None:
            await asyncio.sleep(_POLL_S)

    def _phase(self) -> WorkerPhase:
        worker = self._store.runs.worker(self._run_id)
        return WorkerPhase.SPAWNED if worker is None else worker.phase

    def _detail(self) -> str:
        """The worker's own words, else the last lines of its log."""
        worker = self._store.runs.worker(self._run_id)
        if worker is not None and worker.detail:
            return worker.detail
        log = self._store.folder(self._run_id).worker_log
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines() if log.exists() else []
        return " | ".join(lines[-3:])[-500:] or "it left no message"

    def _command(self, runs_dir: Path) -> list[str]:
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        torchrun += ["--nproc-per-node", str(self._config.num_ranks), "-m", "trainer.loop"]
        torchrun += ["--runs-dir", str(runs_dir), "--run-id", self._run_id]
        return keeper_command(torchrun, _KEEPER_GRACE_S)

    def _environment(self) -> dict[str, str]:
        environment = dict(os.environ)
        if self._config.worker_threads:
            environment["OMP_NUM_THREADS"] = str(self._config.worker_threads)
        # Packed batches differ in shape at each step; oneDNN keeps compiled code for every shape it has seen,
        # by default 1024 of them. Measured on CPU: 0.3 GB less after 90 steps, no slower.
        environment.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "64")
        return environment

    async def _kill(self) -> None:
        """End the whole tree; returns when it is gone."""
        if self._keeper is None or self._keeper.returncode is not None:
            return
        self._keeper.terminate()
        try:
            await asyncio.wait_for(self._keeper.wait(), timeout=_KEEPER_GRACE_S + 15.0)
        except TimeoutError:
            self._keeper.kill()
            await self._keeper.wait()
