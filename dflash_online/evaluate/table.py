"""Tables of evaluations, for people: one column per drafter. Long names are folded, never cut."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.table import Table

from dflash_online.evaluate.compare import PairedComparison
from dflash_online.evaluate.harness import EvaluationReport

Reports = Mapping[str, EvaluationReport]


def tau_table(reports: Reports) -> Table:
    """tau by reading, with 95 % intervals over records."""
    table = _table("reading", [f"tau of {label}" for label in reports], "tokens per verify step")
    for reading in next(iter(reports.values())).histograms:
        cells = []
        for report in reports.values():
            interval = report.tau_interval(reading)
            bounds = f" ({interval.low:.3f}..{interval.high:.3f})" if interval else ""
            cells.append(f"{report.tau(reading):.3f}{bounds}")
        table.add_row(reading, *cells)
    return table


def slot_table(reports: Reports) -> Table:
    """Top-1, top-8 and loss of each slot, over all anchors."""
    table = _table("slot", list(reports), "all anchors: top-1, top-8, loss in nats")
    # Drafters of unequal block sizes can be compared: the shorter one has no figure for late slots.
    for index in range(max(len(report.top1) for report in reports.values())):
        cells = [
            f"{report.top1[index]:.3f} {report.top8[index]:.3f} {report.loss[index]:.2f}"
            if index < len(report.top1)
            else "-"
            for report in reports.values()
        ]
        table.add_row(str(index + 1), *cells)
    return table


def length_table(reports: Reports) -> Table:
    """Loss by length of the record: equal rows of short and long records are a symptom (recipes v3, v4)."""
    table = _table("tokens", list(reports), "loss by length of the record, nats per slot")
    buckets = next(iter(reports.values())).loss_by_length
    for bucket in sorted(buckets, key=lambda name: int(name.partition("..")[0])):
        cells = []
        for report in reports.values():
            total, slots, records = report.loss_by_length[bucket]
            cells.append(f"{total / max(slots, 1):.3f} ({records} records)")
        table.add_row(bucket, *cells)
    return table


def _table(first: str, names: Sequence[str], title: str) -> Table:
    table = Table(first, title=title)
    for name in names:
        table.add_column(name, justify="right", overflow="fold")
    return table


def paired_table(pairs: Mapping[str, PairedComparison]) -> Table:
    """Differences of tau per record, the second drafter minus the first."""
    table = Table("reading", "difference", "95 % interval", "win rate", title="the same records, one by one")
    for reading, pair in pairs.items():
        interval = f"{pair.ci_low:+.3f}..{pair.ci_high:+.3f}"
        table.add_row(reading, f"{pair.mean_difference:+.3f}", interval, f"{pair.win_rate:.0%}")
    return table
