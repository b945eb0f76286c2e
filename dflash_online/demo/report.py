"""What a demo found: the table for people and the JSON line for scripts.

    DemoResult --> rich table, JSON line

The keys of the JSON line are a promise to scripts: more may be added, none is renamed. Knows neither services
nor clock.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rich.table import Table

from dflash_online.bench.report import BenchReport, OutputComparison, PassResult, compare_outputs


@dataclass(frozen=True, kw_only=True, slots=True)
class DemoResult:
    """Everything that the demo measured."""

    first: BenchReport
    """Passes `off` and `chain` with the untrained version."""
    last: BenchReport
    """Passes `chain` and `tree` with the last version, same prompts."""
    speed: BenchReport
    """Passes `off`, `chain` and `tree` with the last version, one request at a time."""
    info: Mapping[str, Any]
    """GET /dflash/info at the end."""
    status: Mapping[str, Any]
    """GET /train/status at the end."""
    peak_rss_mb: Mapping[str, float]
    minutes: float
    wall_s: float
    steps_s: Mapping[str, float]
    """Seconds that each step of the demo took."""
    num_leftover_processes: int
    are_ports_free: bool

    def comparison(self) -> OutputComparison:
        """All greedy outputs against plain decoding."""
        result = self.first.comparison() + self.speed.comparison()
        plain = _pass(self.first, "off")
        for one in self.last.passes:
            result += compare_outputs(plain, one)
        return result

    def to_json(self) -> dict[str, Any]:
        comparison = self.comparison()
        passes = [one for report in (self.first, self.last, self.speed) for one in report.passes]
        drafter, records = self.info["drafter"], self.status["records"]
        off, on, tree = (_pass(self.speed, policy) for policy in ("off", "chain", "tree"))
        return {
            "tau_first": _rounded(_pass(self.first, "chain").tau),
            "tau_last": _rounded(_pass(self.last, "chain").tau),
            "tau_last_tree": _rounded(_pass(self.last, "tree").tau),
            "outputs_compared": comparison.num_compared,
            "outputs_identical": comparison.num_identical,
            "first_difference": comparison.first_difference,
            "requests_sent": sum(one.num_requests for one in passes),
            "requests_failed": sum(sum(one.errors.values()) for one in passes),
            "swaps": drafter["num_swaps"],
            "swap_pause_max_ms": drafter["max_pause_ms"],
            "tok_per_s_off": _rounded(off.tok_per_s),
            "tok_per_s_on": _rounded(on.tok_per_s),
            "tok_per_s_tree": _rounded(tree.tok_per_s),
            "tok_per_s_concurrency": on.concurrency,
            "drafter_version_last": drafter["version"],
            "versions_published": sum(one.get("published_at") is not None for one in self.status["versions"]),
            "train_steps": self.status["step"],
            "records_captured": records["num_total"] + records["num_held_out"],
            "records_dropped": sum(records["dropped"].values()),
            "minutes": self.minutes,
            "peak_rss_mb": dict(self.peak_rss_mb),
            "wall_s": round(self.wall_s, 1),
            "steps_s": {name: round(value, 1) for name, value in self.steps_s.items()},
            "leftover_processes": self.num_leftover_processes,
            "ports_free": self.are_ports_free,
            "passes": {
                name: [_brief(one) for one in report.passes]
                for name, report in (("first", self.first), ("last", self.last), ("speed", self.speed))
            },
            "sglang_version": self.info.get("sglang_version"),
            "device": self.info.get("device"),
        }

    def table(self) -> Table:
        """One row per pass."""
        table = Table(title=f"held-out prompts, live; last version {self.info['drafter']['version']}")
        for name in (
            "version",
            "policy",
            "concurrency",
            "tau",
            "tok/s",
            "TTFT ms",
            "TPOT ms",
            "p99",
            "failed",
        ):
            table.add_column(name, justify="left" if name in ("version", "policy") else "right")
        for label, report in (("first", self.first), ("last", self.last), ("last", self.speed)):
            for one in report.passes:
                figures = _brief(one)
                ttft, tpot = figures["ttft_ms"] or {}, figures["tpot_ms"] or {}
                cells = (one.tau, one.tok_per_s, ttft.get("median"), tpot.get("median"), tpot.get("p99"))
                failed = str(figures["requests_failed"])
                table.add_row(
                    "-" if one.policy == "off" else label,
                    one.policy,
                    str(one.concurrency),
                    *(_cell(cell) for cell in cells),
                    failed,
                )
        return table


def _pass(report: BenchReport, policy: str) -> PassResult:
    found = report.find(policy)
    assert found is not None, f"the demo runs a pass with policy {policy}"
    return found


def _brief(one: PassResult) -> dict[str, Any]:
    keys = (
        "policy",
        "concurrency",
        "tau",
        "tok_per_s",
        "ttft_ms",
        "tpot_ms",
        "output_tokens",
        "requests_failed",
    )
    figures = one.to_json()
    return {key: figures[key] for key in keys}


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 4)


def _cell(value: float | None) -> str:
    return "n/a" if value is None else f"{value:.3f}" if value < 10 else f"{value:.1f}"
