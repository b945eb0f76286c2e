"""What a person sees while the demo runs: steps, then one live view of the loop.

    run --step, show--> [ screen ] --> terminal: one live panel | elsewhere: a plain line now and then

Knows nothing of services; it draws what it is given.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

_PLAIN_PERIOD_S = 15.0


@dataclass(frozen=True, kw_only=True, slots=True)
class LoopView:
    """One look at the loop: GET /train/status and GET /dflash/info, with the time that is left."""

    status: Mapping[str, Any]
    info: Mapping[str, Any]
    elapsed_s: float
    total_s: float
    tok_per_s: float
    """Tokens that captures brought in, per second, over the last while."""

    @property
    def loss(self) -> float | None:
        return (self.status.get("metrics") or {}).get("loss")

    @property
    def live_version(self) -> str:
        return str(self.info["drafter"]["version"])

    def tau_of(self, version: Mapping[str, Any]) -> float | None:
        """Live tau under the policy with the most verify steps."""
        figures = list(version.get("live", {}).values())
        return max(figures, key=lambda one: one["num_steps"])["tau"] if figures else None

    def tau_now(self) -> float | None:
        """Live tau of the version that serves."""
        live = [one for one in self.status["versions"] if one["version"] == self.live_version]
        return self.tau_of(live[0]) if live else None

    def num_published(self) -> int:
        return sum(one.get("published_at") is not None for one in self.status["versions"])

    def line(self) -> str:
        """All of it on one line."""
        records = self.status["records"]
        return (
            f"{self.elapsed_s:.0f} of {self.total_s:.0f} s: {self.status['state']}, "
            f"tau {_number(self.tau_now())} ({self.live_version}), "
            f"step {self.status['step']}, loss {_number(self.loss)}, records {records['num_total']}, "
            f"queue {self.status['buffer']['bytes'] / 2**20:.0f} MiB, published {self.num_published()}, "
            f"{self.tok_per_s:.0f} tok/s captured"
        )


class DemoScreen:
    """A context manager: within it the terminal is the demo's."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._live = Live(console=console, refresh_per_second=4, transient=True)
        self._step = ""
        self._started = time.monotonic()
        self._last_line_at = float("-inf")

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(self, *details: object) -> None:
        if self._console.is_terminal:
            self._live.stop()

    def step(self, text: str) -> None:
        """A new step begins; it stays on the screen."""
        self._step = text
        minutes, seconds = divmod(int(time.monotonic() - self._started), 60)
        self._console.print(f"[{minutes:02}:{seconds:02}] {text}", markup=False)
        self._draw(lambda: Text("..."))

    def waiting(self, text: str) -> None:
        """The step goes on; terminals only."""
        self._draw(lambda: Text(f"    {self._step}: {text}"))

    def show(self, view: LoopView) -> None:
        """The loop as it is now."""
        self._draw(lambda: view_panel(view))
        now = time.monotonic()
        if not self._console.is_terminal and now - self._last_line_at >= _PLAIN_PERIOD_S:
            self._last_line_at = now
            self._console.print(f"    {view.line()}", markup=False)

    def _draw(self, make: Callable[[], RenderableType]) -> None:
        if self._console.is_terminal:
            self._live.update(make())


def view_panel(view: LoopView) -> Panel:
    """The live view: figures on the left of each row, versions below."""
    status, records = view.status, view.status["records"]
    figures = Table.grid(padding=(0, 3))
    figures.add_row(
        "tau now", _number(view.tau_now()), "loss", _number(view.loss), "step", str(status["step"])
    )
    figures.add_row(
        "records",
        str(records["num_total"]),
        "queue",
        f"{status['buffer']['bytes'] / 2**20:.0f} MiB, {records['num_unused']} unused",
        "captured",
        f"{view.tok_per_s:.0f} tok/s",
    )
    figures.add_row(
        "swaps",
        str(view.info["drafter"]["num_swaps"]),
        "longest pause",
        f"{view.info['drafter']['max_pause_ms'] or 0:.1f} ms",
        "worker",
        str((status.get("worker") or {}).get("phase", "-")),
    )
    versions = Table(box=None, pad_edge=False)
    for name in ("version", "state", "step", "tau held-out", "tau live", "verify steps"):
        versions.add_column(name, justify="left" if name in ("version", "state") else "right")
    for one in status["versions"][-8:]:
        live = list(one.get("live", {}).values())
        mark = "live" if one["version"] == view.live_version else str(one["state"])
        versions.add_row(
            one["version"],
            mark,
            str(one.get("step") or "-"),
            _number(one.get("held_out_tau")),
            _number(view.tau_of(one)),
            str(sum(figure["num_steps"] for figure in live)),
        )
    share = min(1.0, view.elapsed_s / view.total_s)
    bar = Text(f"[{'=' * round(40 * share):<40}] {view.elapsed_s:.0f} of {view.total_s:.0f} s")
    return Panel(Group(bar, Text(), figures, Text(), versions), title=f"DFlash Online: {status['state']}")


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"
