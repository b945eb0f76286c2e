"""One drafter on held-out records, by every reading, with intervals.

    records --read_record--> walks, figures per slot --Harness--> EvaluationReport --> JSON, plots

tau is what a server with that policy would show on the same greedy text: each reading is walked round by
round, the next round starting behind what was accepted. Pooled over rounds; intervals resample records.
Accuracy, loss and calibration are over all anchors (teacher-forced), which is easier than what rounds meet.
Records that cannot be read as features of this drafter are counted by reason and left out. Source: DFlash
specification, B.3 and D.7.

Shape letters: A = anchors, D = drafts per block, L = bins of calibration.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from dflash_online.distill.pack import valid_anchors
from dflash_online.drafter.model import DFlashDrafter
from dflash_online.errors import ShapeError
from dflash_online.evaluate.compare import PairedComparison, compare_paired
from dflash_online.evaluate.interval import Interval, pooled_tau_interval
from dflash_online.evaluate.readings import RecordReadings, check_budgets, read_record
from dflash_online.evaluate.tau import pooled, tau_of, walk_rounds
from dflash_online.target.frozen import FrozenHead
from dflash_online.wire.record import Record, TargetIdentity

NUM_BINS = 10
LENGTH_EDGES = (128, 256, 512, 1024, 2048, 4096)
LOSS_EDGES = (0.0, 0.5, 1.0, 2.0, 4.0, 6.0, 8.0, 10.0, 12.0)


@dataclass(slots=True)
class EvaluationReport:
    """Figures of one drafter. Record i of two reports on the same records is the same record."""

    record_ids: list[str] = field(default_factory=list)
    histograms: dict[str, list[tuple[int, ...]]] = field(default_factory=dict)
    """By reading and record: entry a counts rounds with a accepted drafts."""
    num_D: Tensor | None = None
    """Per draft slot: supervised slots seen, float64; the next three are sums over the same."""
    top1_D: Tensor | None = None
    top8_D: Tensor | None = None
    loss_D: Tensor | None = None
    calibration_3L: Tensor = field(default_factory=lambda: torch.zeros(3, NUM_BINS, dtype=torch.float64))
    """Per bin of confidence: slots, summed confidence, slots where the best token was right."""
    loss_by_length: dict[str, tuple[float, int, int]] = field(default_factory=dict)
    """By bucket of record length in tokens: summed loss, slots, records."""
    loss_histogram: list[int] = field(default_factory=lambda: [0] * len(LOSS_EDGES))
    """Slots by loss; bucket i begins at `LOSS_EDGES[i]` nats."""
    left_out: Counter[str] = field(default_factory=Counter)
    """Records that were not used, by reason."""

    def tau(self, reading: str) -> float:
        """Pooled over rounds, bonus token included."""
        return tau_of(pooled(self.histograms[reading]))

    def tau_interval(self, reading: str, *, seed: int = 0) -> Interval | None:
        """None with fewer than two records."""
        return pooled_tau_interval(self.histograms[reading], seed=seed)

    @property
    def top1(self) -> list[float]:
        """Per draft slot."""
        return self._mean(self.top1_D)

    @property
    def top8(self) -> list[float]:
        """Per draft slot: the label is among the 8 best."""
        return self._mean(self.top8_D)

    @property
    def loss(self) -> list[float]:
        """Per draft slot, nats."""
        return self._mean(self.loss_D)

    @property
    def calibration_error(self) -> float:
        """Mean distance of confidence and accuracy over slots, by bins."""
        num_L, confidence_L, right_L = self.calibration_3L
        return float((confidence_L - right_L).abs().sum() / num_L.sum().clamp(min=1))

    def _mean(self, sums_D: Tensor | None) -> list[float]:
        if sums_D is None or self.num_D is None:
            return []
        return (sums_D / self.num_D.clamp(min=1)).tolist()

    def to_json(self, *, seed: int = 0) -> dict[str, Any]:
        """Everything, as JSON values."""
        num_L, confidence_L, right_L = self.calibration_3L
        return {
            "num_records": len(self.record_ids),
            "left_out": dict(self.left_out),
            "tau": {name: self._tau_json(name, seed) for name in self.histograms},
            "top1_per_slot": self.top1,
            "top8_per_slot": self.top8,
            "loss_per_slot": self.loss,
            "calibration": {
                "error": self.calibration_error,
                "num_slots": [int(n) for n in num_L.tolist()],
                "confidence": (confidence_L / num_L.clamp(min=1)).tolist(),
                "accuracy": (right_L / num_L.clamp(min=1)).tolist(),
            },
            "loss_by_length": {
                bucket: {"loss": total / max(slots, 1), "num_slots": slots, "num_records": records}
                for bucket, (total, slots, records) in self.loss_by_length.items()
            },
            "loss_histogram": {"edges": list(LOSS_EDGES), "num_slots": self.loss_histogram},
        }

    def _tau_json(self, reading: str, seed: int) -> dict[str, Any]:
        histogram, interval = pooled(self.histograms[reading]), self.tau_interval(reading, seed=seed)
        return {
            "tau": tau_of(histogram),
            "ci_low": interval.low if interval else None,
            "ci_high": interval.high if interval else None,
            "num_rounds": sum(histogram),
            "histogram": list(histogram),
        }


class Harness:
    """Evaluates one drafter record by record. Usage: `add(record)` for each, then `report`."""

    def __init__(self, drafter: DFlashDrafter, frozen: FrozenHead, *, num_nodes: Sequence[int] = ()) -> None:
        self._drafter, self._frozen, self._num_nodes = drafter, frozen, check_budgets(num_nodes)
        self._target: TargetIdentity | None = None
        self.report = EvaluationReport()

    def add(self, record: Record) -> bool:
        """Walk one record.

        Returns:
            False when it was left out; the report counts why.
        """
        reason = self._why_unusable(record)
        if reason is not None:
            self.report.left_out[reason] += 1
            return False
        anchor_A = valid_anchors(record.loss_mask_T())
        readings = read_record(self._drafter, self._frozen, record, anchor_A, num_nodes=self._num_nodes)
        self._target = record.header.target
        report = self.report
        report.record_ids.append(record.header.record_id)
        block_size = self._drafter.config.block_size
        for name, accepted_A in readings.accepted.items():
            rounds = walk_rounds(record, anchor_A.tolist(), accepted_A.tolist(), block_size)
            report.histograms.setdefault(name, []).append(rounds.histogram)
        self._count_slots(readings, len(record.header.token_ids))
        return True

    def _why_unusable(self, record: Record) -> str | None:
        config, header = self._drafter.config, record.header
        if tuple(header.layer_ids) != config.target_layer_ids:
            return f"layers {list(header.layer_ids)}, the drafter reads {list(config.target_layer_ids)}"
        if header.row_width != config.feature_width:
            return f"features {header.row_width} wide, the drafter reads {config.feature_width}"
        if max(header.token_ids, default=0) >= self._frozen.vocab_size:
            return f"a token beyond the target's vocabulary of {self._frozen.vocab_size}"
        if self._target is not None and header.target.weight_checksum != self._target.weight_checksum:
            return f"of target {header.target.path}, not of {self._target.path} with the weights of the first"
        if not len(valid_anchors(record.loss_mask_T())):
            return "no two supervised tokens in a row"
        if not record.features_TF.isfinite().all():
            return "features that are not finite"
        return None

    def _count_slots(self, readings: RecordReadings, num_tokens: int) -> None:
        report, valid_AD = self.report, readings.valid_AD
        sums_4D = torch.stack(
            [
                part_AD.sum(dim=0).double()
                for part_AD in (valid_AD, readings.is_top1_AD, readings.is_top8_AD, readings.loss_AD.double())
            ]
        ).cpu()
        if report.num_D is None:
            report.num_D, report.top1_D, report.top8_D, report.loss_D = sums_4D
        else:
            assert report.top1_D is not None
            assert report.top8_D is not None
            assert report.loss_D is not None
            for total_D, part_D in zip(
                (report.num_D, report.top1_D, report.top8_D, report.loss_D), sums_4D, strict=True
            ):
                total_D += part_D
        loss_N = readings.loss_AD[valid_AD].double().cpu()
        confidence_N = readings.confidence_AD[valid_AD].double().cpu()
        is_right_N = readings.is_top1_AD[valid_AD].double().cpu()
        bin_N = (confidence_N * NUM_BINS).long().clamp(max=NUM_BINS - 1)
        report.calibration_3L.index_add_(
            1, bin_N, torch.stack([torch.ones_like(loss_N), confidence_N, is_right_N])
        )
        bucket_N = torch.bucketize(loss_N, torch.tensor(LOSS_EDGES, dtype=torch.float64), right=True) - 1
        counts = torch.bincount(bucket_N.clamp(min=0), minlength=len(LOSS_EDGES))
        report.loss_histogram = [a + b for a, b in zip(report.loss_histogram, counts.tolist(), strict=True)]
        bucket = _length_bucket(num_tokens)
        total, slots, records = report.loss_by_length.get(bucket, (0.0, 0, 0))
        report.loss_by_length[bucket] = (total + float(loss_N.sum()), slots + len(loss_N), records + 1)


def compare_reports(
    old: EvaluationReport, new: EvaluationReport, *, reading: str, seed: int = 0
) -> PairedComparison:
    """Tau per record of two drafters, new minus old.

    Raises:
        ShapeError: the two were not measured on the same records.
    """
    if old.record_ids != new.record_ids:
        sizes = f"{len(old.record_ids)} and {len(new.record_ids)}"
        raise ShapeError(f"reports on {sizes} records, not on the same ones")
    taus = [[tau_of(histogram) for histogram in report.histograms[reading]] for report in (old, new)]
    return compare_paired(*taus, seed=seed)


def _length_bucket(num_tokens: int) -> str:
    low = 1
    for edge in LENGTH_EDGES:
        if num_tokens < edge:
            return f"{low}..{edge - 1}"
        low = edge
    return f"{low}.."
