"""Plots of evaluations: tau by reading, accuracy by slot, calibration, loss by length and by value.

    drafter label -> EvaluationReport --write_plots--> DIR/*.png

matplotlib is optional: ConfigError says how to get it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from dflash_online.errors import ConfigError
from dflash_online.evaluate.harness import LOSS_EDGES, EvaluationReport

Reports = Mapping[str, EvaluationReport]


def require_matplotlib(folder: Path) -> None:
    """Fail now rather than after hours of measuring.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    try:
        import matplotlib.figure  # type: ignore[import-not-found, unused-ignore] # noqa: F401
    except ImportError as error:
        how = "left out, or used with matplotlib: pip install 'dflash-online[plots]'"
        raise ConfigError("--plots", str(folder), how) from error


def write_plots(reports: Reports, folder: Path) -> list[Path]:
    """Write every plot; returns the files.

    Raises:
        ConfigError: matplotlib is not installed, or the folder cannot be written.
    """
    require_matplotlib(folder)
    plots: tuple[tuple[str, Callable[[Any, Reports], None]], ...] = (
        ("tau.png", _tau),
        ("accuracy.png", _accuracy),
        ("calibration.png", _calibration),
        ("loss-by-length.png", _loss_by_length),
        ("loss-histogram.png", _loss_histogram),
    )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, draw in plots:
            _save(folder / name, draw, reports)
    except OSError as error:
        raise ConfigError("--plots", str(folder), f"a folder that can be written ({error})") from error
    return [folder / name for name, _ in plots]


def _save(path: Path, draw: Callable[[Any, Reports], None], reports: Reports) -> None:
    from matplotlib.figure import Figure  # type: ignore[import-not-found, unused-ignore]

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    draw(axes, reports)
    axes.grid(visible=True, alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=120)


def _tau(axes: Any, reports: Reports) -> None:
    for place, (label, report) in enumerate(reports.items()):
        names = list(report.histograms)
        taus, below, above = [report.tau(name) for name in names], [], []
        for name, tau in zip(names, taus, strict=True):
            interval = report.tau_interval(name)
            below.append(max(0.0, tau - interval.low) if interval else 0.0)
            above.append(max(0.0, interval.high - tau) if interval else 0.0)
        shifted = [index + 0.1 * place for index in range(len(names))]
        axes.errorbar(shifted, taus, yerr=[below, above], fmt="o", capsize=3, label=label)
        axes.set_xticks(range(len(names)), names, rotation=20)
    axes.set_ylabel("tau (tokens per verify step)")


def _accuracy(axes: Any, reports: Reports) -> None:
    for label, report in reports.items():
        slots = range(1, len(report.top1) + 1)
        axes.plot(slots, report.top1, "o-", label=f"{label}: top-1")
        axes.plot(slots, report.top8, "s--", label=f"{label}: top-8")
    axes.set(xlabel="slot", ylabel="accuracy, all anchors", ylim=(0, 1))


def _calibration(axes: Any, reports: Reports) -> None:
    axes.plot([0, 1], [0, 1], color="grey", linewidth=1)
    for label, report in reports.items():
        num_L, confidence_L, right_L = report.calibration_3L
        seen_L = num_L > 0
        x, y = (confidence_L / num_L)[seen_L].tolist(), (right_L / num_L)[seen_L].tolist()
        axes.plot(x, y, "o-", label=f"{label}: error {report.calibration_error:.3f}")
    axes.set(xlabel="probability of the drafter's best token", ylabel="share that was right")


def _loss_by_length(axes: Any, reports: Reports) -> None:
    for label, report in reports.items():
        buckets = report.loss_by_length
        means = [total / max(slots, 1) for total, slots, _ in buckets.values()]
        axes.plot(list(buckets), means, "o-", label=label)
    axes.set(xlabel="tokens of the record", ylabel="loss, nats per slot")


def _loss_histogram(axes: Any, reports: Reports) -> None:
    names = [f"{edge:g}.." for edge in LOSS_EDGES]
    for label, report in reports.items():
        total = max(sum(report.loss_histogram), 1)
        axes.plot(names, [count / total for count in report.loss_histogram], "o-", label=label)
    axes.set(xlabel="loss of a slot, nats", ylabel="share of slots")
