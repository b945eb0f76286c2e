"""One run that is alive: its feed, its rollout and its worker, as tasks that live and end together.

    controller --pause, resume, stop, suspend--> [ ActiveRun ] --ends--> RunEnd --> controller

The worker's end is the run's end. A fault in any task ends all of them. Runs on the event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from dflash_online.errors import TargetIdentityError
from trainer.feed.buffer import remove_leftovers
from trainer.feed.intake import Feed
from trainer.feed.prompts import PromptStream
from trainer.feed.targets import TargetPool
from trainer.observe.instruments import Instruments
from trainer.rollout.guard import Guard
from trainer.rollout.publish import Publisher
from trainer.runs.resolve import RunInputs
from trainer.runs.state import Desired, WorkerPhase
from trainer.runs.supervisor import Supervisor, SupervisorConfig
from trainer.store.run_rows import RunRow
from trainer.store.store import Store

_DRAIN_S = 60.0


@dataclass(frozen=True, slots=True)
class RunSignals:
    """How a living run talks to the owner of its state."""

    on_ready: Callable[[], None]
    on_alarm: Callable[[TargetIdentityError], None]


class ActiveRun:
    """Everything that moves while a run is alive."""

    def __init__(
        self,
        store: Store,
        run: RunRow,
        inputs: RunInputs,
        instruments: Instruments,
        bounds: SupervisorConfig,
        signals: RunSignals,
    ) -> None:
        self._store, self.run_id = store, run.run_id
        folder = store.folder(run.run_id)
        folder.create()
        for records in (folder.buffer, folder.held_out):
            remove_leftovers(records, store.records.paths(run.run_id))
        self.targets = TargetPool(store, run.run_id, run.config)
        stream = PromptStream(store, run, inputs.prompts)
        self.feed = Feed(store, run, stream, self.targets, inputs.tokenizer, instruments, signals.on_alarm)
        self.publisher = Publisher(store, run, self.targets, signals.on_alarm)
        self.guard = Guard(store, run, self.targets, self.publisher, signals.on_alarm)
        self.supervisor = Supervisor(store, run.run_id, run.config, bounds, signals.on_ready)

    async def run(self) -> WorkerPhase:
        """Live until the worker has ended for good; returns the phase in which it did.

        Raises:
            WorkerLostError: the worker cannot be kept alive.
            ExceptionGroup: a task failed; the worker is gone.
        """
        try:
            async with asyncio.TaskGroup() as group:
                parts = (self.feed.run(), self.publisher.run(), self.guard.run())
                background = [group.create_task(part) for part in parts]
                phase = await self.supervisor.run()
                self.feed.pause()
                if phase is not WorkerPhase.SUSPENDED:
                    await self.publisher.drain(_DRAIN_S)
                for task in background:
                    task.cancel()
        finally:
            await self.targets.aclose()
        return phase

    def open(self) -> None:
        """Capture, train, publish."""
        self._store.runs.set_desired(self.run_id, Desired.RUN)
        self.feed.resume()
        self.publisher.resume()

    def pause(self) -> None:
        """No capture, no step. What was asked to be published still is."""
        self._store.runs.set_desired(self.run_id, Desired.PAUSE)
        self.feed.pause()
        self.publisher.resume()

    def halt(self) -> None:
        """An alarm: no capture, no step, no publish."""
        self._store.runs.set_desired(self.run_id, Desired.PAUSE)
        self.feed.pause()
        self.publisher.pause()

    def end(self, desired: Desired, *, within_s: float | None = None) -> None:
        """Tell the worker to write its last checkpoint and end."""
        self._store.runs.set_desired(self.run_id, desired)
        self.feed.pause()
        self.supervisor.end_within(within_s)
