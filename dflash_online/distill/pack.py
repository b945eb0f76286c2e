"""From records to one packed batch: contexts end to end, anchors sampled, labels cut out.

    records --pack_records--> PackedBatch --> distill.objective

An anchor is a supervised token whose next token is supervised too. Each record gets anchors in proportion
to how many it has. Blocks cut by the end of an answer keep their valid slots, so the ends of answers and
short answers are trained as well. A record without any anchor is left out. Raises ConfigError, ShapeError.
Source: DFlash specification, sections C.2 to C.4.

Shape letters: A = anchors, B = slots of a block, S = packed context rows, F = feature width, T = tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dflash_online.drafter.attention import PADDING_DOCUMENT, BlockMask
from dflash_online.errors import ConfigError, ShapeError
from dflash_online.wire.record import Record


@dataclass(frozen=True, kw_only=True, slots=True)
class PackedBatch:
    """One training step's worth of blocks of one rank. Documents are contiguous, anchors sorted within them.

    A record of T tokens contributes T-1 context rows: the last token was never fed, and no block sees it.
    """

    features_SF: Tensor  # [S, F] bfloat16
    context_position_S: Tensor  # [S] int64, position within the document
    context_document_S: Tensor  # [S] int64, index of the record
    anchor_token_A: Tensor  # [A] int64
    anchor_position_A: Tensor  # [A] int64, position within the document
    document_A: Tensor  # [A] int64, PADDING_DOCUMENT on padded blocks
    label_AB: Tensor  # [A, B] int64, slot k is the token at anchor + k; 0 where there is none
    valid_AB: Tensor  # [A, B] bool, slots that teach: supervised, within the record, not the anchor

    @property
    def block_size(self) -> int:
        """B."""
        return self.label_AB.shape[1]

    @property
    def num_anchors(self) -> int:
        """Blocks that are not padding."""
        return int((self.document_A != PADDING_DOCUMENT).sum())

    @property
    def block_position_AB(self) -> Tensor:
        """[A, B] int64: positions of the slots within their documents."""
        return self.anchor_position_A[:, None] + torch.arange(self.block_size, device=self.document_A.device)

    @property
    def verifier_row_AB(self) -> Tensor:
        """[A, B] int64: context row from which the target predicts the slot; meaningless where not valid.

        The token at `anchor + k` was said after reading the one before it.
        """
        start_A = torch.searchsorted(self.context_document_S, self.document_A)
        slot_B = torch.arange(self.block_size, device=self.document_A.device)
        return (start_A + self.anchor_position_A - 1)[:, None] + slot_B

    def mask(self, sliding_window: int | None) -> BlockMask:
        """Who sees whom in this batch."""
        return BlockMask(
            block_size=self.block_size,
            anchor_position_A=self.anchor_position_A,
            document_A=self.document_A,
            context_position_S=self.context_position_S,
            context_document_S=self.context_document_S,
            sliding_window=sliding_window,
        )

    def to(self, device: torch.device | str) -> PackedBatch:
        """The batch on another device; copies from pinned memory do not block."""
        moved = {name: getattr(self, name).to(device, non_blocking=True) for name in self.__slots__}
        return replace(self, **moved)


def valid_anchors(loss_mask_T: Tensor) -> Tensor:
    """[n] int64, rising: positions that are supervised and followed by a supervised token."""
    return (loss_mask_T[:-1] & loss_mask_T[1:]).nonzero().flatten()


def pack_records(
    records: Sequence[Record],
    *,
    block_size: int,
    num_anchors: int,
    generator: torch.Generator,
    pad: bool = False,
) -> PackedBatch:
    """Sample anchors without replacement and pack the records that have any.

    Args:
        records: of one feature width.
        num_anchors: of all records together; all of them when there are fewer.
        generator: CPU generator; the same state samples the same anchors.
        pad: fill up to `num_anchors` with padded blocks, for steps of a fixed shape.

    Raises:
        ConfigError: block size or number of anchors out of bounds.
        ShapeError: the records' features differ in width, or no record has an anchor.
    """
    if block_size < 2:
        raise ConfigError("block_size", block_size, ">= 2 (anchor, one draft)")
    if num_anchors < 1:
        raise ConfigError("num_anchors", num_anchors, ">= 1")
    masks = [record.loss_mask_T() for record in records]
    usable = [
        (record, mask_T, anchors)
        for record, mask_T in zip(records, masks, strict=True)
        if len(anchors := valid_anchors(mask_T))
    ]
    if not usable:
        raise ShapeError(f"no anchor: none of {len(records)} records has two supervised tokens in a row")
    widths = {record.features_TF.shape[1] for record, _, _ in usable}
    if len(widths) != 1:
        raise ShapeError(f"features of one batch must have one width, got {sorted(widths)}")
    shares = share_out(num_anchors, [len(anchors) for _, _, anchors in usable])
    parts = []
    for document, ((record, mask_T, anchors), share) in enumerate(zip(usable, shares, strict=True)):
        chosen_A = anchors[torch.randperm(len(anchors), generator=generator)[:share]].sort().values
        parts.append(_blocks_of(record, mask_T, chosen_A, block_size, document))
    batch = _concatenate(parts)
    return _padded(batch, num_anchors) if pad else batch


def share_out(total: int, available: Sequence[int]) -> list[int]:
    """Split `total` in proportion to `available` by largest remainders, never above what is available."""
    everything = sum(available)
    if total >= everything:
        return list(available)
    shares = [total * count // everything for count in available]
    by_remainder = sorted(range(len(available)), key=lambda i: (-(total * available[i] % everything), i))
    for index in by_remainder[: total - sum(shares)]:
        shares[index] += 1
    return shares


def all_blocks(record: Record, anchor_A: Tensor, block_size: int) -> PackedBatch:
    """A batch of one record with exactly these anchors (rising positions), for evaluation."""
    return _blocks_of(record, record.loss_mask_T(), anchor_A, block_size, document=0)


def _blocks_of(
    record: Record, mask_T: Tensor, anchor_A: Tensor, block_size: int, document: int
) -> PackedBatch:
    token_T = torch.tensor(record.header.token_ids, dtype=torch.int64)
    num_tokens, num_rows = len(token_T), len(record.features_TF)
    position_AB = anchor_A[:, None] + torch.arange(block_size)
    inside_AB = position_AB < num_tokens
    clamped_AB = position_AB.clamp(max=num_tokens - 1)
    valid_AB = inside_AB & mask_T[clamped_AB]
    valid_AB[:, 0] = False
    return PackedBatch(
        features_SF=record.features_TF,
        context_position_S=torch.arange(num_rows),
        context_document_S=torch.full((num_rows,), document),
        anchor_token_A=token_T[anchor_A],
        anchor_position_A=anchor_A,
        document_A=torch.full_like(anchor_A, document),
        label_AB=torch.where(inside_AB, token_T[clamped_AB], 0),
        valid_AB=valid_AB,
    )


def _concatenate(parts: Sequence[PackedBatch]) -> PackedBatch:
    names = PackedBatch.__slots__
    return PackedBatch(**{name: torch.cat([getattr(part, name) for part in parts]) for name in names})


def _padded(batch: PackedBatch, num_anchors: int) -> PackedBatch:
    extra = num_anchors - len(batch.document_A)
    if extra <= 0:
        return batch

    def extend(tensor: Tensor, value: int) -> Tensor:
        return torch.cat([tensor, tensor.new_full((extra, *tensor.shape[1:]), value)])

    return replace(
        batch,
        anchor_token_A=extend(batch.anchor_token_A, 0),
        anchor_position_A=extend(batch.anchor_position_A, 0),
        document_A=extend(batch.document_A, PADDING_DOCUMENT),
        label_AB=extend(batch.label_AB, 0),
        valid_AB=extend(batch.valid_AB, False),
    )
