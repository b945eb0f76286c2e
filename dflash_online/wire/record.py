"""The record: one sequence with the target's features, as it travels from target to trainer.

    server_patches/capture --encode--> HTTP --decode--> trainer/feed --file--> trainer/loop

Wire format v1. Knows neither transport nor files; bytes are made and read by `wire.codec`.

Shape letters: T = tokens of the sequence, F = K*H = feature width.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

import torch

from dflash_online.errors import CorruptRecordError

FORMAT_VERSION = 1


class RecordSource(enum.StrEnum):
    """Where a sequence came from."""

    PROMPT = "prompt"
    """The target generated the response while it was captured."""
    CONVERSATION = "conversation"
    """A finished conversation, captured by prefill only."""
    TRAFFIC = "traffic"
    """A live request of a user."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TargetIdentity:
    """Which target computed the features."""

    path: str
    """Folder or name that the server loaded."""
    revision: str
    """Revision given to the server; empty when there is none."""
    weight_checksum: str
    """Hex digest over the weights in the server's memory. Equal on two servers only when model,
    dtype and quantization are equal."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RecordHeader:
    """All of a record but its features.

    Example: a prompt of 3 tokens answered by 2 has `num_tokens = 5`, `num_rows = 4` (the last sampled
    token was never fed), `prompt_length = 3`, `loss_spans = ((3, 5),)`.
    """

    record_id: str
    """Unique name; a second record of the same id is a duplicate."""
    source: RecordSource
    cursor: int | None
    """Place in the prompt stream that the client gave; None when it gave none."""
    target: TargetIdentity
    drafter_version: str
    """`<number>-<12 hex>` of the drafter that served while the features were computed (the last, if it was
    swapped meanwhile); `none` without a drafter."""
    layer_ids: tuple[int, ...]
    """Hooked decoder layers in order of concatenation; id i is the output of layer i."""
    dtype: str
    """Always `bfloat16` in format version 1."""
    num_rows: int
    """Feature rows: positions `0 .. num_rows-1`; equals `len(token_ids) - 1`."""
    row_width: int
    """F: values per row."""
    token_ids: tuple[int, ...]
    prompt_length: int
    loss_spans: tuple[tuple[int, int], ...]
    """Half-open spans `[start, end)` of supervised token positions, rising, not overlapping."""
    sampling: dict[str, float | int | str | bool] = field(default_factory=dict)
    finish_reason: str
    """`stop`, `length`, or `prefill` for a finished conversation."""
    acceptance: tuple[int, ...] = ()
    """Histogram of this request: entry a counts verify steps with a accepted drafts."""

    def __post_init__(self) -> None:
        num_tokens = len(self.token_ids)
        if num_tokens < 2:
            raise CorruptRecordError("token_ids", num_tokens, "at least 2 tokens long")
        if self.num_rows != num_tokens - 1:
            raise CorruptRecordError("num_rows", self.num_rows, f"len(token_ids) - 1 = {num_tokens - 1}")
        if self.row_width < 1 or not self.layer_ids or self.row_width % len(self.layer_ids):
            raise CorruptRecordError(
                "row_width", self.row_width, f"a multiple of {len(self.layer_ids)} layers"
            )
        if self.dtype != "bfloat16":
            raise CorruptRecordError("dtype", self.dtype, "'bfloat16'")
        if not 1 <= self.prompt_length <= num_tokens:
            raise CorruptRecordError("prompt_length", self.prompt_length, f"in 1..{num_tokens}")
        last_end = 0
        for start, end in self.loss_spans:
            if not last_end <= start < end <= num_tokens:
                raise CorruptRecordError("loss_spans", (start, end), f"rising spans within 0..{num_tokens}")
            last_end = end

    @property
    def num_bytes(self) -> int:
        """Bytes of the features."""
        return self.num_rows * self.row_width * 2


@dataclass(frozen=True, slots=True)
class Record:
    """A header with its features."""

    header: RecordHeader
    features_TF: torch.Tensor  # [T-1, F] bfloat16, row p belongs to position p

    def loss_mask_T(self) -> torch.Tensor:
        """[T] bool: True on supervised tokens."""
        mask_T = torch.zeros(len(self.header.token_ids), dtype=torch.bool)
        for start, end in self.header.loss_spans:
            mask_T[start:end] = True
        return mask_T
