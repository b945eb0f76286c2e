"""When a checkpoint or a publish is due, and when the run has reached a bound of its config.

    Progress, Control, RunConfig --> [ Due ] --> worker loop

Counts training time and steps, not wall time: a pause makes nothing due. Knows neither store nor drafter.
"""

from __future__ import annotations

import time

from trainer.loop.state_files import Progress
from trainer.runs.config import RunConfig
from trainer.runs.state import Desired, WorkerPhase
from trainer.store.run_rows import Control

_SAVE_RETRY_S = 10.0


class Due:
    """The clocks of one worker."""

    def __init__(self, config: RunConfig, progress: Progress) -> None:
        self._config = config
        self._saved_at_s = self._published_at_s = progress.trained_s
        self._published_at_step = progress.step
        self._not_before = 0.0
        self.is_publish_due = False
        """A publish was asked for, or its interval is over; stays true until one was saved."""

    def ending(self, control: Control, progress: Progress) -> WorkerPhase | None:
        """Why the loop should end now, if it should. A paused run reaches no bound."""
        config = self._config
        if control.desired is Desired.STOP:
            return WorkerPhase.STOPPED
        if control.desired is Desired.SUSPEND:
            return WorkerPhase.SUSPENDED
        if control.desired is Desired.PAUSE:
            return None
        if config.max_steps is not None and progress.step >= config.max_steps:
            return WorkerPhase.COMPLETED
        if config.max_minutes is not None and progress.trained_s >= 60 * config.max_minutes:
            return WorkerPhase.COMPLETED
        return None

    def publishes_at_end(self, ending: WorkerPhase) -> bool:
        """Whether the last checkpoint shall be published."""
        config = self._config
        by_itself = config.publish_every_s is not None or config.publish_every_steps is not None
        if ending is WorkerPhase.COMPLETED and config.publish_final and by_itself:
            return True
        return self.is_publish_due and ending is not WorkerPhase.SUSPENDED

    def look(self, progress: Progress) -> bool:
        """Update `is_publish_due`; returns whether a checkpoint is due by itself."""
        config = self._config
        if progress.step > self._published_at_step:
            by_time, by_steps = config.publish_every_s, config.publish_every_steps
            self.is_publish_due |= (
                by_time is not None and progress.trained_s - self._published_at_s >= by_time
            )
            self.is_publish_due |= (
                by_steps is not None and progress.step - self._published_at_step >= by_steps
            )
        return progress.trained_s - self._saved_at_s >= config.checkpoint_every_s

    @property
    def may_save(self) -> bool:
        """False for a while after a checkpoint could not be written."""
        return time.monotonic() >= self._not_before

    def saved(self, progress: Progress, *, published: bool) -> None:
        """A checkpoint was written."""
        self._saved_at_s = progress.trained_s
        if published:
            self.is_publish_due = False
            self._published_at_s, self._published_at_step = progress.trained_s, progress.step

    def failed(self, progress: Progress) -> None:
        """A checkpoint could not be written: try again after a while."""
        self._saved_at_s = progress.trained_s
        self._not_before = time.monotonic() + _SAVE_RETRY_S
