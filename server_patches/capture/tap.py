"""The capture tap: copies committed feature rows of captured requests into their slots.

    worker.begin_step(batch) ... worker.take(rows)  -->  slot rows, keyed by position

Runs inside the scheduler's step, on TP rank 0 only; an ordinary request costs one dictionary lookup. Rows
are keyed by position, so a prefill that runs again after a retraction writes the same rows again. On a GPU
a step with captured requests waits for its commit lengths once; steps without them never wait. Knows
neither HTTP nor records.

Shape letters: R = requests, W = rows per request in a verify step, F = feature width.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any

import torch

from server_patches.capture.slots import CaptureKey, open_slot

MAX_OPEN_CAPTURES = 4096
"""More than slots can exist: a bound against leaks, should a front end die without dropping its captures."""


@dataclass(slots=True)
class OpenCapture:
    """One capture in progress. Written by the tap, read once at its end."""

    rows_TF: torch.Tensor  # the slot, [rows, F] bfloat16
    has_row_T: torch.Tensor  # [rows] bool: True where the row has arrived
    drafter_versions: list[str] = field(default_factory=list)
    """Versions that served while rows arrived, oldest first."""
    num_overflow: int = 0
    """Rows beyond the slot, not stored."""
    histogram: list[int] = field(default_factory=list)

    def write(self, position: int, rows: torch.Tensor, drafter_version: str) -> None:
        fits = max(0, min(int(rows.shape[0]), int(self.rows_TF.shape[0]) - position))
        self.num_overflow += int(rows.shape[0]) - fits
        if fits:
            self.rows_TF[position : position + fits] = rows[:fits].to(device="cpu", dtype=torch.bfloat16)
            self.has_row_T[position : position + fits] = True
        if not self.drafter_versions or self.drafter_versions[-1] != drafter_version:
            self.drafter_versions.append(drafter_version)


class CaptureTap:
    """All captures of this rank. Single-threaded: the scheduler's loop."""

    def __init__(self, *, is_writer: bool) -> None:
        self._is_writer = is_writer
        self._open: OrderedDict[str, OpenCapture] = OrderedDict()
        self._dropped: OrderedDict[str, None] = OrderedDict()
        self._batch: Any = None
        self._drafter_version = "none"

    def begin_step(self, batch: Any, drafter_version: str) -> None:
        """Remember whose rows the next `take` brings."""
        self._batch, self._drafter_version = batch, drafter_version

    def take(self, features: torch.Tensor, commit_lens: torch.Tensor | None) -> None:
        """Store the rows of captured requests.

        Args:
            features: prefill: [sum of extend lengths, F] in request order. Verify: [R*W, F].
            commit_lens: None in prefill; [R] valid rows of each request in a verify step.
        """
        batch = self._batch
        if not self._is_writer or batch is None or features is None:
            return
        captured = [
            (index, key)
            for index, request in enumerate(batch.reqs)
            if (key := CaptureKey.parse(request.extra_key)) is not None
        ]
        if not captured:
            return
        if commit_lens is None:
            self._take_prefill(batch, captured, features)
        else:
            self._take_verify(batch, captured, features, commit_lens)

    def _take_prefill(
        self, batch: Any, captured: list[tuple[int, CaptureKey]], features: torch.Tensor
    ) -> None:
        starts, first = [], 0
        for count in batch.extend_lens:
            starts.append(first)
            first += count
        for index, key in captured:
            count = batch.extend_lens[index]
            rows = features[starts[index] : starts[index] + count]
            self._write(key, batch.prefix_lens[index], rows)

    def _take_verify(
        self,
        batch: Any,
        captured: list[tuple[int, CaptureKey]],
        features: torch.Tensor,
        commit_lens: torch.Tensor,
    ) -> None:
        width = features.shape[0] // commit_lens.shape[0]
        counts, positions = commit_lens.tolist(), batch.seq_lens.tolist()
        for index, key in captured:
            rows = features[index * width : index * width + counts[index]]
            self._write(key, positions[index], rows)

    def _write(self, key: CaptureKey, position: int, rows: torch.Tensor) -> None:
        capture = self._capture(key, int(rows.shape[-1]))
        if capture is not None:
            capture.write(position, rows, self._drafter_version)

    def _capture(self, key: CaptureKey, row_width: int) -> OpenCapture | None:
        if key.capture_id in self._dropped:
            return None
        capture = self._open.get(key.capture_id)
        if capture is None:
            rows_TF = open_slot(key.slot, row_width)
            capture = OpenCapture(rows_TF, torch.zeros(rows_TF.shape[0], dtype=torch.bool))
            self._open[key.capture_id] = capture
            if len(self._open) > MAX_OPEN_CAPTURES:
                self._open.popitem(last=False)
        return capture

    def count_accepted(self, extra_key: str | None, num_accepted: int) -> None:
        """Add one verify step to the histogram of a captured request."""
        key = CaptureKey.parse(extra_key)
        capture = self._open.get(key.capture_id) if key else None
        if capture is not None:
            capture.histogram.extend([0] * (num_accepted + 1 - len(capture.histogram)))
            capture.histogram[num_accepted] += 1

    def finish(self, capture_id: str, num_rows: int) -> dict[str, Any]:
        """End a capture: later rows of it are ignored.

        Returns:
            `num_missing` of the first `num_rows` rows, `drafter_versions`, `histogram`, `row_width` and
            `num_overflow`.
        """
        capture = self._open.pop(capture_id, None)
        # An overlapped step may still bring rows of a request that has ended; the slot may then be another's.
        self._dropped[capture_id] = None
        if len(self._dropped) > MAX_OPEN_CAPTURES:
            self._dropped.popitem(last=False)
        if capture is None:
            return {"num_missing": num_rows, "drafter_versions": [], "histogram": [], "row_width": 0}
        num_present = int(capture.has_row_T[:num_rows].sum())
        return {
            "num_missing": num_rows - num_present,
            "drafter_versions": capture.drafter_versions,
            "histogram": capture.histogram,
            "row_width": int(capture.rows_TF.shape[1]),
            "num_overflow": capture.num_overflow,
        }
