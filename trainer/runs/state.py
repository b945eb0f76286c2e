"""States of a run, and which may follow which.

                    +------------------------------+
    created --> starting --> running <--> paused   |          the service owns every transition;
                    |          |  ^          |     |          the worker only reports its phase
                    |          v  |          |     v
                    |        alarmed --------+--> stopping --> stopped
                    +--> failed <--+--> completed

Terminal: stopped, completed, failed. Knows neither store nor processes.
"""

from __future__ import annotations

import enum

from trainer.errors import RunStateError


class RunState(enum.StrEnum):
    """Where a run is."""

    CREATED = "created"
    """The row exists, nothing was started."""
    STARTING = "starting"
    """The worker loads; captures already arrive."""
    RUNNING = "running"
    PAUSED = "paused"
    """The worker is up and takes no step; nothing is captured."""
    STOPPING = "stopping"
    """The worker writes its last checkpoint."""
    STOPPED = "stopped"
    COMPLETED = "completed"
    """A bound of the config was reached: steps, minutes or epochs."""
    FAILED = "failed"
    ALARMED = "alarmed"
    """The target is not the one that the run started with: no capture, no step, no publish."""


class Desired(enum.StrEnum):
    """What the service wants the worker to do; the worker reads it before each step."""

    RUN = "run"
    PAUSE = "pause"
    STOP = "stop"
    """Write the last checkpoint and end for good."""
    SUSPEND = "suspend"
    """Write a checkpoint and end; the run goes on when the service is back."""


class WorkerPhase(enum.StrEnum):
    """What the worker says it is doing."""

    SPAWNED = "spawned"
    LOADING = "loading"
    TRAINING = "training"
    WAITING = "waiting"
    """For records."""
    PAUSED = "paused"
    SAVING = "saving"
    """Gate and checkpoint."""
    SUSPENDED = "suspended"
    STOPPED = "stopped"
    COMPLETED = "completed"
    FAILED = "failed"
    """An error that a restart may cure."""
    BROKEN = "broken"
    """An error that a restart cannot cure."""


TERMINAL = frozenset({RunState.STOPPED, RunState.COMPLETED, RunState.FAILED})

ALLOWED: dict[RunState, frozenset[RunState]] = {
    RunState.CREATED: frozenset({RunState.STARTING, RunState.FAILED}),
    RunState.STARTING: frozenset({RunState.RUNNING, RunState.STOPPING, RunState.FAILED, RunState.ALARMED}),
    RunState.RUNNING: frozenset(
        {RunState.PAUSED, RunState.STOPPING, RunState.COMPLETED, RunState.FAILED, RunState.ALARMED}
    ),
    RunState.PAUSED: frozenset({RunState.RUNNING, RunState.STOPPING, RunState.FAILED, RunState.ALARMED}),
    RunState.ALARMED: frozenset({RunState.RUNNING, RunState.STOPPING, RunState.FAILED}),
    RunState.STOPPING: frozenset({RunState.STOPPED, RunState.FAILED}),
    RunState.STOPPED: frozenset(),
    RunState.COMPLETED: frozenset(),
    RunState.FAILED: frozenset(),
}


def check_transition(state: RunState, following: RunState, *, action: str) -> None:
    """Refuse a transition that the table does not hold.

    Raises:
        RunStateError: names the action, the state, and the states from which it is allowed.
    """
    if following not in ALLOWED[state]:
        sources = sorted(source for source, targets in ALLOWED.items() if following in targets)
        raise RunStateError(action, state.value, " or ".join(sources))
