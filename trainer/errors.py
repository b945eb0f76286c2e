"""Errors of the trainer service alone; those of the library are in dflash_online.errors.

    DflashOnlineError
    +-- TrainerError
        +-- RunStateError       the run's state does not allow the action      HTTP 409
        +-- RunNotFoundError    no run of that id                              HTTP 404
        +-- QueueFullError      a bounded queue holds all it may               HTTP 503, Retry-After
        +-- StoreError          the SQLite file cannot be read or written      HTTP 507
        +-- StartError          the service cannot start: port, folder, flag   exit code 2
        +-- WorkerLostError     the worker ended too often                     run state `failed`

To add one, also give it a row in `trainer.api.errors`, which holds the HTTP answers.
"""

from __future__ import annotations

from dflash_online.errors import DflashOnlineError


class TrainerError(DflashOnlineError):
    """Base of the service's own errors."""


class RunStateError(TrainerError):
    """The run's state does not allow the action."""

    def __init__(self, action: str, state: str, allowed: str) -> None:
        super().__init__(action, state, allowed)
        self.action, self.state, self.allowed = action, state, allowed

    def __str__(self) -> str:
        return f"cannot {self.action}: the run is {self.state}, must be {self.allowed}"


class RunNotFoundError(TrainerError):
    """No run of that id."""

    def __init__(self, run_id: str) -> None:
        super().__init__(run_id)
        self.run_id = run_id

    def __str__(self) -> str:
        return f"there is no run {self.run_id!r}"


class QueueFullError(TrainerError):
    """A bounded queue holds all it may; try again when it has drained."""

    def __init__(self, queue: str, size: int, bound: int) -> None:
        super().__init__(queue, size, bound)
        self.queue, self.size, self.bound = queue, size, bound

    def __str__(self) -> str:
        return f"{self.queue} must hold at most {self.bound}, would hold {self.size}"


class StoreError(TrainerError):
    """The SQLite file cannot be read or written: disk full, locked, of another version."""

    def __init__(self, path: str, reason: str) -> None:
        super().__init__(path, reason)
        self.path, self.reason = path, reason

    def __str__(self) -> str:
        return f"store {self.path}: {self.reason}"


class StartError(TrainerError):
    """The service cannot start. The message says what to change."""


class WorkerLostError(TrainerError):
    """The worker ended too often, or for a reason that a restart cannot cure."""

    def __init__(self, exit_code: int, num_restarts: int, window_s: float, detail: str) -> None:
        super().__init__(exit_code, num_restarts, window_s, detail)
        self.exit_code, self.num_restarts, self.window_s, self.detail = (
            exit_code,
            num_restarts,
            window_s,
            detail,
        )

    def __str__(self) -> str:
        restarts = f"{self.num_restarts} restarts in {self.window_s:g} s"
        return f"the worker ended with exit code {self.exit_code} after {restarts}: {self.detail}"
