"""What the drafts of every anchor of one record are worth, by every reading, a chunk of logits at a time.

    record, drafter, frozen head --read_record--> accepted drafts per anchor and reading, figures per slot

Readings, each under its own name because each gives another tau for the same drafter:
    chain              the drafter's best token per slot, as policy `chain` drafts
    ddtree_nodes_8     the best tree of 8 nodes besides the root, as policy `tree` with that budget
    top8_oracle        the label is among the 8 best of its slot: no tree of that width accepts more
Source: DFlash specification, section D.7.

Shape letters: A = anchors, C = anchors of a chunk, B = slots of a block, D = B-1 drafts, V = vocabulary, K
= kept candidates, N = nodes of a tree.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dflash_online.distill.objective import block_hidden
from dflash_online.distill.pack import PackedBatch, all_blocks
from dflash_online.drafter.model import DFlashDrafter
from dflash_online.errors import ConfigError
from dflash_online.target.frozen import FrozenHead
from dflash_online.tree.build import tree_of_candidates
from dflash_online.tree.candidates import Candidates, top_candidates
from dflash_online.tree.walk import walk
from dflash_online.wire.record import Record

CHAIN, ORACLE, ORACLE_WIDTH = "chain", "top8_oracle", 8
MAX_EVAL_NODES = 512
_CHUNK_VALUES = 32 << 20  # of float32 logits: 128 MiB
_CHUNK_ANCHORS = 256  # drafted in one pass; the context's keys are computed again for each pass


@dataclass(frozen=True, slots=True)
class RecordReadings:
    """One record. Slots that are not valid are False or 0."""

    accepted: dict[str, Tensor]
    """[A] int64 by reading: drafts that a round starting at the anchor would accept."""
    valid_AD: Tensor  # bool, slots 1 .. B-1 that hold a supervised token
    is_top1_AD: Tensor  # bool, the label has the largest logit; of equal ones the smaller token
    is_top8_AD: Tensor  # bool
    loss_AD: Tensor  # float32, cross-entropy on the label, nats
    confidence_AD: Tensor  # float32, probability of the drafter's best token


def tree_reading(num_nodes: int) -> str:
    """Name of the reading by a tree of that many nodes besides the root."""
    return f"ddtree_nodes_{num_nodes}"


def check_budgets(num_nodes: Sequence[int]) -> tuple[int, ...]:
    """Budgets in rising order, each once.

    Raises:
        ConfigError: one is out of bounds.
    """
    for budget in num_nodes:
        if not 1 <= budget <= MAX_EVAL_NODES:
            raise ConfigError("nodes", budget, f"in 1..{MAX_EVAL_NODES}")
    return tuple(sorted(set(num_nodes)))


@torch.no_grad()
def read_record(
    drafter: DFlashDrafter,
    frozen: FrozenHead,
    record: Record,
    anchor_A: Tensor,
    *,
    num_nodes: Sequence[int] = (),
) -> RecordReadings:
    """Draft at every anchor and compare with the record.

    Args:
        anchor_A: rising positions, of supervised tokens.
        num_nodes: budgets of the tree readings.

    Raises:
        ConfigError: a budget is out of bounds.
    """
    budgets = check_budgets(num_nodes)
    chunks = [
        chunk
        for part_A in torch.split(anchor_A, _CHUNK_ANCHORS)
        for chunk in _read_blocks(drafter, frozen, record, part_A, budgets)
    ]
    names = chunks[0].accepted
    return RecordReadings(
        {name: torch.cat([chunk.accepted[name] for chunk in chunks]) for name in names},
        *(torch.cat([getattr(chunk, field) for chunk in chunks]) for field in RecordReadings.__slots__[1:]),
    )


def _read_blocks(
    drafter: DFlashDrafter, frozen: FrozenHead, record: Record, anchor_A: Tensor, budgets: Sequence[int]
) -> Iterator[RecordReadings]:
    batch = all_blocks(record, anchor_A, drafter.config.block_size).to(frozen.weight_VH.device)
    hidden_ADH = block_hidden(drafter, frozen, batch)[:, 1:]
    for rows in _chunks(len(hidden_ADH), (batch.block_size - 1) * frozen.vocab_size):
        yield _read_chunk(hidden_ADH[rows], frozen, batch, rows, budgets)


def _chunks(num_anchors: int, values_per_anchor: int) -> Iterator[slice]:
    size = max(1, _CHUNK_VALUES // values_per_anchor)
    return (slice(start, start + size) for start in range(0, num_anchors, size))


def _read_chunk(
    hidden_CDH: Tensor, frozen: FrozenHead, batch: PackedBatch, rows: slice, budgets: Sequence[int]
) -> RecordReadings:
    logits_CDV = frozen.logits(hidden_CDH).float()
    label_CD, valid_CD = batch.label_AB[rows, 1:], batch.valid_AB[rows, 1:]
    candidates = top_candidates(logits_CDV, max(ORACLE_WIDTH, *budgets, 1))
    is_candidate_CDK = candidates.token_id_RDK == label_CD[:, :, None]
    is_top1_CD = is_candidate_CDK[:, :, 0] & valid_CD
    is_top8_CD = is_candidate_CDK[:, :, :ORACLE_WIDTH].any(dim=2) & valid_CD
    accepted = {CHAIN: _leading(is_top1_CD)}
    for budget in budgets:
        accepted[tree_reading(budget)] = _accepted_by_tree(
            batch.anchor_token_A[rows], candidates, budget, label_CD, valid_CD
        )
    accepted[ORACLE] = _leading(is_top8_CD)
    best_CD = logits_CDV.gather(2, candidates.token_id_RDK[:, :, :1])[:, :, 0]
    log_normalizer_CD = best_CD - candidates.log_prob_RDK[:, :, 0]
    loss_CD = log_normalizer_CD - logits_CDV.gather(2, label_CD[:, :, None])[:, :, 0]
    zero = loss_CD.new_zeros(())
    return RecordReadings(
        accepted,
        valid_CD,
        is_top1_CD,
        is_top8_CD,
        torch.where(valid_CD, loss_CD, zero),
        torch.where(valid_CD, candidates.log_prob_RDK[:, :, 0].exp(), zero),
    )


def _accepted_by_tree(
    anchor_C: Tensor, candidates: Candidates, budget: int, label_CD: Tensor, valid_CD: Tensor
) -> Tensor:
    """[C] int64: the production tree and the production walk, the record standing in for the target."""
    depth = slice(min(budget, label_CD.shape[1]))
    trees = tree_of_candidates(
        anchor_C,
        Candidates(candidates.token_id_RDK[:, depth, :budget], candidates.log_prob_RDK[:, depth, :budget]),
        budget,
    )
    # What the target says at a node is the record's token one deeper; -1, no token, where the record ends.
    said_CD = torch.where(valid_CD.cumprod(dim=1).bool(), label_CD, -1)
    said_CB = torch.nn.functional.pad(said_CD, (0, 1), value=-1)
    return walk(trees, said_CB.gather(1, trees.depth_RN)).num_accepted_R


def _leading(is_right_CD: Tensor) -> Tensor:
    """[C] int64: length of the leading run of True."""
    return is_right_CD.cumprod(dim=1).sum(dim=1)
