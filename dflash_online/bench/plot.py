"""Plots of a benchmark: tau and speedup over the number of draft nodes.

    BenchReport --write_plots--> DIR/tau.png, DIR/speedup.png

One line per mode, concurrency and temperature, with 95 % intervals as bars. Passes without a number of draft
nodes have no place on the axis and are left out; a plot without a point is not written. matplotlib is
optional: ConfigError says how to get it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from dflash_online.bench.policy import CURRENT_POLICY, OFF_POLICY, PolicyEntry
from dflash_online.bench.report import BenchReport, PassResult
from dflash_online.errors import ConfigError
from dflash_online.evaluate.interval import Interval
from dflash_online.evaluate.plot import require_matplotlib

Lines = Mapping[str, list[tuple[int, Interval]]]
PassFigure = Callable[[PassResult], Interval | None]
"""What a plot shows of a pass."""


def write_plots(report: BenchReport, folder: Path) -> list[Path]:
    """Write what can be plotted; returns the files written.

    Raises:
        ConfigError: matplotlib is not installed, or the folder cannot be written.
    """
    require_matplotlib(folder)
    plots: tuple[tuple[str, str, PassFigure], ...] = (
        ("tau.png", "tau (tokens per verify step)", lambda one: one.tau_interval),
        ("speedup.png", "speedup over off (TPOT)", report.speedup),
    )
    written = []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, label, figure_of in plots:
            lines = _lines(report, figure_of)
            if lines:
                _draw(folder / name, report.model, label, lines)
                written.append(folder / name)
    except OSError as error:
        raise ConfigError("--plots", str(folder), f"a folder that can be written ({error})") from error
    return written


def _lines(report: BenchReport, figure_of: PassFigure) -> Lines:
    """Points by label of the line, in order of the number of nodes."""
    lines: dict[str, list[tuple[int, Interval]]] = {}
    for one in report.passes:
        figure, mode = figure_of(one), PolicyEntry.parse(one.policy).mode
        if figure is not None and one.num_nodes and mode not in (OFF_POLICY, CURRENT_POLICY):
            label = f"{mode}, concurrency {one.concurrency}, temperature {one.temperature:g}"
            lines.setdefault(label, []).append((one.num_nodes, figure))
    return {label: sorted(points, key=lambda point: point[0]) for label, points in lines.items()}


def _draw(path: Path, title: str, label: str, lines: Lines) -> None:
    from matplotlib.figure import Figure  # type: ignore[import-not-found, unused-ignore]

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    for name, points in lines.items():
        nodes = [num_nodes for num_nodes, _ in points]
        values = [value.estimate for _, value in points]
        # A percentile interval may lie to one side of the estimate; bars have no negative length.
        below = [max(0.0, value.estimate - value.low) for _, value in points]
        above = [max(0.0, value.high - value.estimate) for _, value in points]
        axes.errorbar(nodes, values, yerr=[below, above], marker="o", capsize=3, label=name)
    axes.set(title=title, xlabel="draft nodes per verify step", ylabel=label)
    axes.grid(visible=True, alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=120)
