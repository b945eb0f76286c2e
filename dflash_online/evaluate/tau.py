"""tau of a drafter on held-out records, without a server.

    records + drafter + frozen head --> rounds as a server would take them --> histogram --> tau

A record holds the target's own continuation, so that the greedy verify step can be replayed from it: at
anchor a, the accepted drafts are the longest prefix of the block that equals the tokens a+1, a+2, ...; the
next round starts at a + accepted + 1. For greedy records this reproduces the server's rounds exactly; for
sampled ones it is an estimate. A round at the end of a record accepts at most what the record still holds.

Two ways that agree token for token (a test says so): `chain_walk` decodes round by round with the context
cache, as a server does; `evaluate_drafter` drafts every anchor of a record in one pass and walks over the
table, asking the head for slot k only where all slots before it were right. Live rounds start where drafts
failed, so tau over all anchors is a different, usually higher, figure: both are reported by name.
Source: DFlash specification, section D.7.

Shape letters: A = anchors, B = slots of a block, H = hidden size, N = slots that are still alive.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dflash_online.distill.objective import block_hidden
from dflash_online.distill.pack import PackedBatch, all_blocks, valid_anchors
from dflash_online.distill.statistics import SlotStatistics
from dflash_online.drafter.model import DFlashDrafter
from dflash_online.evaluate.compare import PairedComparison, compare_paired
from dflash_online.target.frozen import FrozenHead
from dflash_online.wire.record import Record

_CHUNK_ROWS = 256


@dataclass(frozen=True, slots=True)
class RecordRounds:
    """What the walk over one record found."""

    record_id: str
    histogram: tuple[int, ...]
    """[B]: entry a counts rounds with a accepted drafts."""
    anchor_histogram: tuple[int, ...]
    """The same over all anchors, whether or not a round would start there."""

    @property
    def tau(self) -> float:
        """1 + mean accepted drafts per round; 1 when the record allows no round."""
        return tau_of(self.histogram)


@dataclass(frozen=True, slots=True)
class EvaluationResult:
    """A drafter on held-out records."""

    records: tuple[RecordRounds, ...]
    stats: SlotStatistics | None
    """Teacher-forced accuracy per slot over all anchors; None when it was not asked for."""

    @property
    def histogram(self) -> tuple[int, ...]:
        """Accepted drafts per round, pooled over records."""
        return pooled([record.histogram for record in self.records])

    @property
    def tau(self) -> float:
        """Pooled over rounds, bonus token included."""
        return tau_of(self.histogram)

    @property
    def tau_all_anchors(self) -> float:
        """Pooled over every anchor: not what a server shows, but steadier on few records."""
        return tau_of(pooled([record.anchor_histogram for record in self.records]))

    @property
    def num_rounds(self) -> int:
        """Rounds behind `tau`."""
        return sum(self.histogram)


def tau_of(histogram: Sequence[int]) -> float:
    """`1 + sum(a * h[a]) / sum(h)`; 1 for an empty histogram."""
    rounds = sum(histogram)
    return 1.0 + sum(a * count for a, count in enumerate(histogram)) / rounds if rounds else 1.0


@torch.no_grad()
def chain_walk(drafter: DFlashDrafter, frozen: FrozenHead, record: Record) -> tuple[int, ...]:
    """Histogram of accepted drafts per round, decoded as a server does: one block at a time, growing context.

    Rounds start at the first token of each supervised span and end with it.
    """
    block_size, token_ids = drafter.config.block_size, record.header.token_ids
    histogram = [0] * block_size
    cache = drafter.new_cache()
    for first, end in _answers(record):
        anchor = first
        while anchor + 1 < end:
            known = slice(cache.num_rows, anchor)
            if known.start < anchor:
                positions = torch.arange(known.start, anchor, device=drafter.fc.weight.device)
                with frozen.autocast():
                    drafter.extend_context(cache, record.features_TF[known].to(positions.device), positions)
            block = [token_ids[anchor]] + [drafter.config.mask_token_id] * (block_size - 1)
            embeds_BH = frozen.embed(torch.tensor(block, device=frozen.embedding_VH.device))
            with frozen.autocast():
                hidden_BH = drafter.draft_block(embeds_BH, anchor, cache)
            drafts = frozen.logits(hidden_BH[1:]).argmax(-1).tolist()
            accepted = _num_equal(drafts, token_ids[anchor + 1 : end])
            histogram[accepted] += 1
            anchor += accepted + 1
    return tuple(histogram)


@torch.no_grad()
def evaluate_drafter(
    drafter: DFlashDrafter, frozen: FrozenHead, records: Iterable[Record], *, with_slots: bool = True
) -> EvaluationResult:
    """Walk every record that has an anchor.

    Args:
        with_slots: also count accuracy per slot over all anchors. Costs the head at every slot; without it
            the head sees only slots that a walk could reach.
    """
    rounds, stats = [], SlotStatistics.zeros(drafter.config.block_size)
    for record in records:
        anchor_A = valid_anchors(record.loss_mask_T())
        if not len(anchor_A):
            continue
        batch = all_blocks(record, anchor_A, drafter.config.block_size).to(frozen.weight_VH.device)
        hidden_ABH = block_hidden(drafter, frozen, batch)
        if with_slots:
            is_right_AB = _right_slots(hidden_ABH, frozen, batch)
            stats += _count(is_right_AB, batch)
            num_accepted_A = is_right_AB[:, 1:].cumprod(dim=1).sum(dim=1)
        else:
            num_accepted_A = _accepted(hidden_ABH, frozen, batch)
        rounds.append(walk_rounds(record, anchor_A.tolist(), num_accepted_A.tolist(), batch.block_size))
    return EvaluationResult(tuple(rounds), stats if with_slots else None)


def compare(old: EvaluationResult, new: EvaluationResult, *, seed: int) -> PairedComparison:
    """Paired comparison of tau per record. Both results come from the same records, in the same order."""
    return compare_paired([r.tau for r in old.records], [r.tau for r in new.records], seed=seed)


def _right_slots(hidden_ABH: Tensor, frozen: FrozenHead, batch: PackedBatch) -> Tensor:
    """[A, B] bool: valid slots whose draft equals the label."""
    is_right_AB = torch.zeros_like(batch.valid_AB)
    index_N = batch.valid_AB.flatten().nonzero().flatten()
    draft_N = _drafts(hidden_ABH.flatten(0, 1)[index_N], frozen)
    is_right_AB.view(-1)[index_N] = draft_N == batch.label_AB.flatten()[index_N]
    return is_right_AB


def _accepted(hidden_ABH: Tensor, frozen: FrozenHead, batch: PackedBatch) -> Tensor:
    """[A] int64: length of the right prefix of each block, slot by slot over the blocks still alive."""
    num_accepted_A = torch.zeros(len(hidden_ABH), dtype=torch.int64, device=hidden_ABH.device)
    alive_N = torch.arange(len(hidden_ABH), device=hidden_ABH.device)
    for slot in range(1, batch.block_size):
        alive_N = alive_N[batch.valid_AB[alive_N, slot]]
        draft_N = _drafts(hidden_ABH[alive_N, slot], frozen)
        alive_N = alive_N[draft_N == batch.label_AB[alive_N, slot]]
        num_accepted_A[alive_N] += 1
    return num_accepted_A


def _drafts(hidden_NH: Tensor, frozen: FrozenHead) -> Tensor:
    """[N] int64: greedy drafts, a chunk of logits at a time."""
    parts = [frozen.logits(chunk).argmax(-1) for chunk in torch.split(hidden_NH, _CHUNK_ROWS)]
    return torch.cat(parts)


def _count(is_right_AB: Tensor, batch: PackedBatch) -> SlotStatistics:
    index_N = batch.valid_AB.flatten().nonzero().flatten()
    is_right_N = is_right_AB.flatten()[index_N]
    no_loss_N = torch.zeros(len(index_N), device=is_right_N.device)
    return SlotStatistics.count(index_N % batch.block_size, is_right_N, no_loss_N, batch.block_size)


def walk_rounds(
    record: Record, anchors: Sequence[int], num_accepted: Sequence[int], block_size: int
) -> RecordRounds:
    """The rounds of a server that accepts `num_accepted[i]` drafts at `anchors[i]`, over one record.

    Args:
        anchors: every anchor of the record.
    """
    accepted_at = dict(zip(anchors, num_accepted, strict=True))
    histogram, anchor_histogram = [0] * block_size, [0] * block_size
    for accepted in num_accepted:
        anchor_histogram[accepted] += 1
    for first, end in _answers(record):
        anchor = first
        while anchor + 1 < end:
            histogram[accepted_at[anchor]] += 1
            anchor += accepted_at[anchor] + 1
    return RecordRounds(record.header.record_id, tuple(histogram), tuple(anchor_histogram))


def _answers(record: Record) -> list[tuple[int, int]]:
    """Maximal runs of supervised tokens: spans that touch are one answer."""
    answers: list[tuple[int, int]] = []
    for start, end in record.header.loss_spans:
        if answers and answers[-1][1] == start:
            answers[-1] = (answers[-1][0], end)
        else:
            answers.append((start, end))
    return answers


def _num_equal(drafts: Sequence[int], tokens: Sequence[int]) -> int:
    """Length of the common prefix."""
    # Blocks reach beyond the end of a record and records beyond a block: the shorter one ends the count.
    pairs = enumerate(zip(drafts, tokens, strict=False))
    return next((index for index, (draft, token) in pairs if draft != token), min(len(drafts), len(tokens)))


def pooled(histograms: Iterable[tuple[int, ...]]) -> tuple[int, ...]:
    """Sum of histograms of one length."""
    columns = list(zip(*histograms, strict=True))
    return tuple(sum(column) for column in columns)
