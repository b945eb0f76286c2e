"""Owner of every run's state: the only code that moves a run from one state to another.

    api --start, stop, pause, resume, publish, rollback--> [ RunController ] --> ActiveRun, runs table, events
    service start --recover-->                                    ^
    ActiveRun --ready, alarm, end---------------------------------+

One run is alive at a time. Actions run one after the other. Fails with RunStateError (409), the errors of
`trainer.runs.resolve`, and TargetError. Runs on the event loop.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from typing import Any

from dflash_online.errors import DflashOnlineError, TargetIdentityError
from trainer.errors import QueueFullError, RunStateError
from trainer.feed.prompts import split_added
from trainer.observe.instruments import Instruments
from trainer.rollout.identity import check_info
from trainer.runs.active import ActiveRun, RunSignals
from trainer.runs.config import RunConfig
from trainer.runs.resolve import RunInputs, load_inputs, resolve
from trainer.runs.state import TERMINAL, Desired, RunState, WorkerPhase, check_transition
from trainer.runs.supervisor import SupervisorConfig
from trainer.store.checkpoint_rows import CheckpointRow
from trainer.store.database import now
from trainer.store.event_rows import EventKind
from trainer.store.run_rows import RunRow
from trainer.store.store import Store

MAX_ADDED_PROMPTS = 1024
_END_OF_PHASE = {WorkerPhase.COMPLETED: RunState.COMPLETED, WorkerPhase.STOPPED: RunState.STOPPED}

logger = logging.getLogger(__name__)


class RunController:
    """Runs of one service."""

    def __init__(self, store: Store, instruments: Instruments, bounds: SupervisorConfig) -> None:
        self._store, self._instruments, self._bounds = store, instruments, bounds
        self._turn = asyncio.Lock()
        self._active: ActiveRun | None = None
        self._watcher: asyncio.Task[None] | None = None
        self._is_suspending = False

    @property
    def active(self) -> ActiveRun | None:
        """The run that is alive, if any."""
        return self._active

    def latest(self) -> RunRow | None:
        """The run that is alive, else the newest."""
        if self._active is not None:
            return self._store.runs.get(self._active.run_id)
        runs = self._store.runs.all()
        return runs[0] if runs else None

    async def start(self, config: RunConfig) -> RunRow:
        """Check everything, then begin a run. The worker loads after this returned."""
        async with self._turn:
            if self._active is not None:
                alive = self._store.runs.get(self._active.run_id)
                raise RunStateError(
                    "start a run", f"{alive.state} ({alive.run_id})", "stopped, completed or failed"
                )
            resolved, inputs = await resolve(config)
            run_id = f"run-{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"
            self._store.runs.add(run_id, config, resolved)
            prompts = inputs.prompts
            if prompts.num_skipped:
                self._store.events.add(
                    run_id, EventKind.PROMPTS_SKIPPED, count=prompts.num_skipped, lines=list(prompts.skipped)
                )
            self._move(run_id, RunState.STARTING, action="start")
            active = self._bring_to_life(self._store.runs.get(run_id), inputs)
            active.open()
            return self._store.runs.get(run_id)

    async def stop(self, *, publish: bool) -> RunRow:
        """Tell the run to write its last checkpoint and end; returns while it does."""
        async with self._turn:
            active = self._require_active("stop")
            self._move(active.run_id, RunState.STOPPING, action="stop")
            self._store.runs.request_publish(active.run_id, publish)
            active.end(Desired.STOP)
            return self._store.runs.get(active.run_id)

    async def pause(self) -> RunRow:
        """Stop capturing and stepping, keep the worker."""
        async with self._turn:
            active = self._require_active("pause")
            self._move(active.run_id, RunState.PAUSED, action="pause")
            active.pause()
            return self._store.runs.get(active.run_id)

    async def resume(self) -> RunRow:
        """Go on after a pause, or after an alarm when the target is the right one again."""
        async with self._turn:
            active = self._require_active("resume")
            run = self._store.runs.get(active.run_id)
            if run.state not in (RunState.PAUSED, RunState.ALARMED):
                raise RunStateError("resume", run.state.value, "paused or alarmed")
            for client in active.targets.clients:
                check_info(run.resolved, await client.info(), client.url)
            self._move(active.run_id, RunState.RUNNING, action="resume")
            active.open()
            return self._store.runs.get(active.run_id)

    async def publish(self) -> RunRow:
        """Ask the worker for a candidate; the gate and the swap follow by themselves."""
        return self._ask_worker("publish", lambda run_id: self._store.runs.request_publish(run_id, True))

    async def decay(self, num_steps: int) -> RunRow:
        """Let the learning rate fall over the next steps."""
        return self._ask_worker("decay", lambda run_id: self._store.runs.request_decay(run_id, num_steps))

    async def rollback(self) -> CheckpointRow:
        """Make the version before the live one live again; returns the one taken back."""
        active = self._require_active("roll back")
        return await active.publisher.rollback(reason="asked for by a user", by="user")

    def add_prompts(self, rows: list[Any]) -> dict[str, int]:
        """Queue prompts for the run that is alive."""
        active = self._require_active("add prompts")
        run = self._store.runs.get(active.run_id)
        queue, num_held_out = split_added(rows, run.config)
        size = self._store.added_prompts.count(run.run_id) + len(queue)
        if size > MAX_ADDED_PROMPTS:
            raise QueueFullError("added prompts", size, MAX_ADDED_PROMPTS)
        self._store.added_prompts.add(run.run_id, queue)
        self._store.runs.set_feed_done(run.run_id, False)
        self._store.events.add(run.run_id, EventKind.PROMPTS_ADDED, count=len(queue))
        return {"accepted": len(queue), "held_out": num_held_out, "queued": size, "bound": MAX_ADDED_PROMPTS}

    async def recover(self) -> None:
        """Bring the unfinished run of the last service back to life."""
        unfinished = [run for run in self._store.runs.all() if run.state not in TERMINAL]
        for run in unfinished[1:]:  # cannot be; but two must never run
            self._finish(run.run_id, RunState.FAILED, "another run was alive as well")
        if not unfinished:
            return
        run = unfinished[0]
        if run.state in (RunState.STOPPING, RunState.CREATED):
            # Its last complete checkpoint is kept; there is no worker left to write another.
            final = RunState.STOPPED if run.state is RunState.STOPPING else RunState.FAILED
            self._finish(run.run_id, final, f"the service ended while the run was {run.state}")
            return
        try:
            inputs = await load_inputs(run.config, run.resolved.folder)
        except DflashOnlineError as error:
            self._finish(run.run_id, RunState.FAILED, f"cannot resume: {error}")
            return
        active = self._bring_to_life(run, inputs)
        if run.state is RunState.PAUSED:
            active.pause()
        elif run.state is RunState.ALARMED:
            active.halt()
        else:
            active.open()

    async def shutdown(self, *, within_s: float) -> None:
        """Write a checkpoint and end the worker; the run's state stays, so that `recover` goes on with it."""
        self._is_suspending = True
        if self._active is None or self._watcher is None:
            return
        self._active.end(Desired.SUSPEND, within_s=within_s)
        await asyncio.wait([self._watcher])

    def _bring_to_life(self, run: RunRow, inputs: RunInputs) -> ActiveRun:
        signals = RunSignals(on_ready=self._on_ready, on_alarm=self._on_alarm)
        active = ActiveRun(self._store, run, inputs, self._instruments, self._bounds, signals)
        self._active = active
        self._watcher = asyncio.get_running_loop().create_task(self._watch(active), name=run.run_id)
        return active

    async def _watch(self, active: ActiveRun) -> None:
        """The outermost loop of a run: every error ends here, as the state `failed`."""
        try:
            phase = await active.run()
        except Exception as error:
            logger.error("run %s failed", active.run_id, exc_info=error)
            self._active = None
            self._finish(active.run_id, RunState.FAILED, _reason(error))
            return
        self._active = None
        run = self._store.runs.get(active.run_id)
        if phase is WorkerPhase.SUSPENDED or (self._is_suspending and run.state is not RunState.STOPPING):
            return  # state kept: `recover` goes on with it
        final = RunState.STOPPED if run.state is RunState.STOPPING else _END_OF_PHASE[phase]
        self._finish(active.run_id, final, "")

    def _on_ready(self) -> None:
        if self._active is not None and self._state() is RunState.STARTING:
            self._move(self._active.run_id, RunState.RUNNING, action="run")

    def _on_alarm(self, error: TargetIdentityError) -> None:
        if self._active is None or self._state() not in (
            RunState.STARTING,
            RunState.RUNNING,
            RunState.PAUSED,
        ):
            return  # alarmed already, or ending
        self._active.halt()
        self._store.events.add(
            self._active.run_id,
            EventKind.ALARM,
            field=error.field,
            expected=error.expected,
            found=error.found,
            message=str(error),
        )
        self._move(self._active.run_id, RunState.ALARMED, action="alarm", reason=str(error))

    def _state(self) -> RunState | None:
        return None if self._active is None else self._store.runs.get(self._active.run_id).state

    def _move(self, run_id: str, state: RunState, *, action: str, reason: str = "") -> None:
        before = self._store.runs.get(run_id).state
        check_transition(before, state, action=action)
        finished_at = now() if state in TERMINAL else None
        with self._store.db.transaction():
            self._store.runs.set_state(run_id, state, reason, finished_at=finished_at)
            self._store.events.add(
                run_id, EventKind.STATE, before=before.value, state=state.value, reason=reason
            )

    def _finish(self, run_id: str, state: RunState, reason: str) -> None:
        """End a run from any state; it first passes through the states that lead to the end."""
        run = self._store.runs.get(run_id)
        before = run.state
        if state is RunState.COMPLETED and before is RunState.ALARMED:
            state, reason = RunState.FAILED, run.reason  # the alarm came while the worker ended
        if state is RunState.COMPLETED and before is not RunState.RUNNING:
            self._move(run_id, RunState.RUNNING, action="run")
        if state is RunState.STOPPED and before is not RunState.STOPPING:
            self._move(run_id, RunState.STOPPING, action="stop")
        self._move(run_id, state, action="end", reason=reason)

    def _require_active(self, action: str) -> ActiveRun:
        if self._active is None:
            latest = self.latest()
            raise RunStateError(action, "absent" if latest is None else latest.state.value, "started first")
        return self._active

    def _ask_worker(self, action: str, ask: Any) -> RunRow:
        active = self._require_active(action)
        state = self._state()
        if state not in (RunState.STARTING, RunState.RUNNING, RunState.PAUSED):
            raise RunStateError(action, str(state), "starting, running or paused")
        ask(active.run_id)
        return self._store.runs.get(active.run_id)


def _reason(error: BaseException) -> str:
    """One line; of a group of errors the first."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return str(error) if isinstance(error, DflashOnlineError) else f"{type(error).__name__}: {error}"
