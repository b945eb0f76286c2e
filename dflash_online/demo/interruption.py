"""Signals as exceptions, at moments when they do no harm.

    Ctrl-C, SIGTERM, SIGHUP --> Interruption --Interrupted--> the demo's context managers end what they hold

While a service is being started or ended the exception waits (`hold`): a service that runs but is not
yet held by a context manager, or an ending that is cut short, would leave processes behind. Main thread only.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, Self

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Interrupted(KeyboardInterrupt):
    """The user, or the system, asked for the end. A KeyboardInterrupt: asyncio swallows other kinds."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number

    @property
    def exit_code(self) -> int:
        """As shells count it: 130 for Ctrl-C."""
        return 128 + self.number


class Interruption:
    """A context manager: within it, signals raise Interrupted."""

    def __init__(self) -> None:
        self._num_holds = 0
        self._waiting: int | None = None
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Self:
        self._before = {number: signal.signal(number, self._on_signal) for number in _SIGNALS}
        return self

    def __exit__(self, *details: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self._num_holds:
            self._waiting = number
        else:
            raise Interrupted(number)

    @contextmanager
    def hold(self) -> Iterator[None]:
        """Let signals wait until the block is left."""
        self._num_holds += 1
        try:
            yield
        finally:
            self._num_holds -= 1
        if self._waiting is not None and not self._num_holds:
            number, self._waiting = self._waiting, None
            raise Interrupted(number)
