"""The training part of the demo: start a run, watch it for its minutes, stop it with a last publish.

    run config --POST /train/start--> trainer --GET /train/status, /dflash/info--> LoopView --> screen

Raises ProcessError when a service or the run ends by itself, TrainerServiceError when the trainer refuses.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from dflash_online.demo.screen import LoopView
from dflash_online.demo.services import Running
from dflash_online.errors import ProcessError, TargetUnavailableError
from dflash_online.trainer_client import TrainerClient

_POLL_S = 1.0
_RATE_WINDOW = 30
_ENDED_WELL = ("stopped", "completed")

AskInfo = Callable[[], dict[str, Any]]
"""GET /dflash/info of the target."""


def train_for(
    trainer: Running,
    target: Running,
    run_config: Mapping[str, Any],
    *,
    train_s: float,
    stop_timeout_s: float,
    ask_info: AskInfo,
    show: Callable[[LoopView], None],
) -> dict[str, Any]:
    """Train for so many seconds and publish what came out of it.

    Returns:
        GET /train/status at the end.
    """
    client = TrainerClient(trainer.url)
    client.start(run_config)
    watch = _Watch(client, (trainer, target), ask_info, show, time.monotonic(), train_s)
    while watch.elapsed_s < train_s:
        status = watch.look()
        _require_alive(status, trainer)
        if status["state"] in _ENDED_WELL:
            return status
        time.sleep(_POLL_S)
    client.act("stop", {"publish": True})
    deadline = time.monotonic() + stop_timeout_s
    while time.monotonic() < deadline:
        status = watch.look()
        _require_alive(status, trainer)
        if status["state"] in _ENDED_WELL:
            return status
        time.sleep(_POLL_S)
    raise ProcessError(
        "trainer", f"the run did not end within {stop_timeout_s:g} s; {trainer.service.log_tail()}"
    )


class _Watch:
    """Looks at both services and shows what it saw."""

    def __init__(
        self,
        client: TrainerClient,
        services: tuple[Running, ...],
        ask_info: AskInfo,
        show: Callable[[LoopView], None],
        started: float,
        total_s: float,
    ) -> None:
        self._client, self._services, self._ask_info, self._show = client, services, ask_info, show
        self._started, self._total_s = started, total_s
        self._info: dict[str, Any] | None = None
        self._tokens: deque[tuple[float, int]] = deque(maxlen=_RATE_WINDOW)

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self._started

    def look(self) -> dict[str, Any]:
        for running in self._services:
            running.service.require_running()
        status = self._client.status()
        self._tokens.append((time.monotonic(), status["records"]["num_tokens"]))
        (first_time, first), (last_time, last) = self._tokens[0], self._tokens[-1]
        rate = (last - first) / (last_time - first_time) if last_time > first_time else 0.0
        try:
            self._info = self._ask_info()
        except TargetUnavailableError:
            # Two busy cores may leave a question unanswered for a while; a dead target is noticed above.
            pass
        if self._info is not None:
            self._show(
                LoopView(
                    status=status,
                    info=self._info,
                    elapsed_s=self.elapsed_s,
                    total_s=self._total_s,
                    tok_per_s=rate,
                )
            )
        return status


def _require_alive(status: Mapping[str, Any], trainer: Running) -> None:
    if status["state"] in ("failed", "alarmed"):
        raise ProcessError(
            "trainer", f"the run is {status['state']}: {status.get('reason')}; {trainer.service.log_tail()}"
        )
