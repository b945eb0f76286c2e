"""Who sees whom inside the drafter, and attention that follows it without a dense mask over all blocks.

    distill/pack --BlockMask--> [ plan_attention ] --AttentionPlan--> model, once per layer

The rule stands once, in `sees_context` and `sees_block`. `BlockMask.dense` spells it out for every query and
key of a packed batch: slow, obvious, the oracle of the tests. `attend` is the fast form: a few neighbouring
anchors of one document form a group, whose queries attend to that document's rows before its last anchor
and to the group's own blocks. Its cost does not grow with the number of documents or of other blocks.

Knows neither weights nor tokens. Raises ShapeError when the parts of a mask disagree.
Source: DFlash specification, sections A.3 (inference), C.3 (training).

Shape letters: A = anchors, B = slots of a block, S = packed context rows, G = queries of a group,
Q = queries, J = keys, N = heads, M = key/value heads, d = head size, n = anchors of a group.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from dflash_online.drafter.config import SLIDING_ATTENTION
from dflash_online.errors import ShapeError

PADDING_DOCUMENT = -1


def sees_context(
    query_position: Tensor, anchor_position: Tensor, key_position: Tensor, window: int | None
) -> Tensor:
    """Whether a slot sees a context row: strictly before its anchor, within a sliding layer's window.

    The anchor's own feature is not known at inference, hence strictly. The current token counts as one of
    the `window` tokens. Arguments broadcast; returns bool.
    """
    visible = key_position < anchor_position
    return visible if window is None else visible & (query_position - key_position < window)


def sees_block(query_slot: Tensor, key_slot: Tensor, window: int | None) -> Tensor:
    """Whether a slot sees a slot of its own block: all, or causally within a sliding layer's window."""
    distance = query_slot - key_slot
    if window is None:
        return torch.ones_like(distance, dtype=torch.bool)
    return (distance >= 0) & (distance < window)


def layer_window(layer_type: str, sliding_window: int | None) -> int | None:
    """The window that `sees_context` and `sees_block` take for a layer: None for full attention."""
    return sliding_window if layer_type == SLIDING_ATTENTION else None


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockMask:
    """Visibility of one packed batch of blocks: documents, anchors and padding.

    Two documents of 3 and 2 rows with one anchor each and one padded block:
    context_document_S = [0, 0, 0, 1, 1], context_position_S = [0, 1, 2, 0, 1], document_A = [0, 1, -1].
    """

    block_size: int
    anchor_position_A: Tensor  # [A] int64, position of slot 0 within its document
    document_A: Tensor  # [A] int64, PADDING_DOCUMENT for a padded block: it sees and teaches nothing
    context_position_S: Tensor  # [S] int64, position within the document
    context_document_S: Tensor  # [S] int64, documents contiguous; PADDING_DOCUMENT for padded rows
    sliding_window: int | None = None  # W of the sliding layers

    def __post_init__(self) -> None:
        if self.anchor_position_A.shape != self.document_A.shape or self.document_A.ndim != 1:
            raise ShapeError(f"anchors {tuple(self.anchor_position_A.shape)}, {tuple(self.document_A.shape)}")
        if (
            self.context_position_S.shape != self.context_document_S.shape
            or self.context_document_S.ndim != 1
        ):
            raise ShapeError(
                f"context {tuple(self.context_position_S.shape)}, {tuple(self.context_document_S.shape)}"
            )

    @property
    def keep_A(self) -> Tensor:
        """[A] bool: False on padded blocks."""
        return self.document_A != PADDING_DOCUMENT

    def dense(self, layer_type: str) -> Tensor:
        """[A*B, S + A*B] bool, every query against every key: the oracle of `attend`.

        A padded block sees itself only, so that no softmax row is empty; its weight is 0.
        """
        num_anchors, block_size = len(self.document_A), self.block_size
        window = layer_window(layer_type, self.sliding_window)
        slot_Q = torch.arange(block_size, device=self.document_A.device).repeat(num_anchors)
        block_Q = torch.arange(num_anchors, device=self.document_A.device).repeat_interleave(block_size)
        anchor_Q1 = self.anchor_position_A[block_Q, None]
        context_QS = sees_context(anchor_Q1 + slot_Q[:, None], anchor_Q1, self.context_position_S, window)
        context_QS &= (self.document_A[block_Q, None] == self.context_document_S) & self.keep_A[block_Q, None]
        own_QQ = (block_Q[:, None] == block_Q) & sees_block(slot_Q[:, None], slot_Q, window)
        own_QQ |= torch.eye(len(slot_Q), dtype=torch.bool, device=own_QQ.device)
        return torch.cat([context_QS, own_QQ], dim=1)


@dataclass(frozen=True, slots=True)
class AttentionGroup:
    """Neighbouring anchors of one document, and how much of its context any of them sees."""

    num_anchors: int
    piece: int  # which of the plan's context pieces
    num_rows: int  # the first rows of that piece; 0 for padded blocks and for anchors at position 0
    mask_GJ: Tensor  # [G, num_rows + G] bool


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """A packed batch cut up: the context by document, the anchors into groups; both in order."""

    piece_rows: tuple[int, ...]  # adds up to S
    groups: tuple[AttentionGroup, ...]  # their anchors add up to A


def plan_attention(mask: BlockMask, layer_type: str, *, queries_per_group: int = 64) -> AttentionPlan:
    """Cut a packed batch into groups. Done once per batch and layer type, used by every layer of that type.

    Args:
        queries_per_group: a group's own blocks cost G*G scores, so that small groups waste less and large
            ones call fewer kernels.
    """
    window = layer_window(layer_type, mask.sliding_window)
    documents, positions = mask.document_A.tolist(), mask.anchor_position_A.tolist()
    context_documents = mask.context_document_S.tolist()
    pieces = _runs(context_documents, len(context_documents))
    piece_of = {context_documents[first]: piece for piece, (first, _) in enumerate(pieces)}
    groups = []
    for first, end in _runs(documents, max(1, queries_per_group // mask.block_size)):
        piece, start, num_rows = 0, 0, 0
        if documents[first] != PADDING_DOCUMENT and documents[first] in piece_of:
            piece = piece_of[documents[first]]
            start, stop = pieces[piece]
            # Rows of a document are its positions 0, 1, ...: the last anchor sees at most that many.
            num_rows = min(stop - start, max(positions[first:end]))
        mask_GJ = _group_mask(mask, slice(first, end), slice(start, start + num_rows), window)
        groups.append(AttentionGroup(end - first, piece, num_rows, mask_GJ))
    return AttentionPlan(tuple(end - first for first, end in pieces), tuple(groups))


def _group_mask(mask: BlockMask, anchors: slice, context: slice, window: int | None) -> Tensor:
    """[G, rows + G] bool: the rule of `BlockMask.dense` for one group, within its document."""
    anchor_n = mask.anchor_position_A[anchors]
    slot_G = torch.arange(mask.block_size, device=anchor_n.device).repeat(len(anchor_n))
    block_G = torch.arange(len(anchor_n), device=anchor_n.device).repeat_interleave(mask.block_size)
    anchor_G1 = anchor_n[block_G, None]
    position_rows = mask.context_position_S[context]
    context_GJ = sees_context(anchor_G1 + slot_G[:, None], anchor_G1, position_rows, window)
    own_GG = (block_G[:, None] == block_G) & sees_block(slot_G[:, None], slot_G, window)
    return torch.cat([context_GJ, own_GG], dim=1)


def attend(
    query_QNd: Tensor,
    context_key_SMd: Tensor,
    context_value_SMd: Tensor,
    block_key_QMd: Tensor,
    block_value_QMd: Tensor,
    plan: AttentionPlan,
    block_size: int,
) -> Tensor:
    """Attention of all blocks, group by group. Q = A*B, in the order of the anchors; scale d^-0.5.

    Returns:
        [Q, N, d], equal to dense attention under `BlockMask.dense`.
    """
    # Cut once by split, not by slices: the gradient of each slice would be a zero tensor of full length.
    sizes = [group.num_anchors * block_size for group in plan.groups]
    queries = torch.split(query_QNd, sizes)
    keys, values = torch.split(block_key_QMd, sizes), torch.split(block_value_QMd, sizes)
    context_keys = torch.split(context_key_SMd, list(plan.piece_rows))
    context_values = torch.split(context_value_SMd, list(plan.piece_rows))
    outputs = []
    for group, query_GNd, key_GMd, value_GMd in zip(plan.groups, queries, keys, values, strict=True):
        if group.num_rows:
            key_GMd = torch.cat([context_keys[group.piece][: group.num_rows], key_GMd])
            value_GMd = torch.cat([context_values[group.piece][: group.num_rows], value_GMd])
        outputs.append(attend_masked(query_GNd, key_GMd, value_GMd, group.mask_GJ))
    return torch.cat(outputs)


def attend_masked(query_GNd: Tensor, key_JMd: Tensor, value_JMd: Tensor, mask_GJ: Tensor | None) -> Tensor:
    """Grouped-query attention of one set of queries; a mask of None lets every query see every key."""
    output_1NGd = F.scaled_dot_product_attention(
        query_GNd.transpose(0, 1)[None],
        key_JMd.transpose(0, 1)[None],
        value_JMd.transpose(0, 1)[None],
        attn_mask=mask_GJ,
        enable_gqa=query_GNd.shape[1] != key_JMd.shape[1],
    )
    return output_1NGd[0].transpose(0, 1)


def _runs(values: Sequence[int], longest: int) -> list[tuple[int, int]]:
    """Maximal runs of equal neighbours, cut to at most `longest`."""
    runs: list[tuple[int, int]] = []
    for index, value in enumerate(values):
        if runs and values[runs[-1][0]] == value and index - runs[-1][0] < longest:
            runs[-1] = (runs[-1][0], index + 1)
        else:
            runs.append((index, index + 1))
    return runs
