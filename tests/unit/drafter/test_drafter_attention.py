"""The visibility rule against a brute-force loop, and the fast attention against the dense mask."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from dflash_online.drafter.attention import BlockMask, attend, plan_attention
from dflash_online.errors import ShapeError

FULL, SLIDING = "full_attention", "sliding_attention"
BLOCK = 4


def packed_mask(window: int | None = None) -> BlockMask:
    """Documents of 9, 1 and 5 rows and two padded rows; first and last anchors; two padded blocks."""
    lengths = [9, 1, 5]
    positions = [p for n in lengths for p in range(n)] + [0, 0]
    documents = [d for d, n in enumerate(lengths) for _ in range(n)] + [-1, -1]
    # a = 0 sees no context; a = T - 2 is the last valid anchor of a record of T tokens and T - 1 rows.
    anchors = [(0, 0), (0, 3), (0, 4), (0, 8), (1, 0), (2, 0), (2, 4), (-1, 0), (-1, 3)]
    return BlockMask(
        block_size=BLOCK,
        anchor_position_A=torch.tensor([a for _, a in anchors]),
        document_A=torch.tensor([d for d, _ in anchors]),
        context_position_S=torch.tensor(positions),
        context_document_S=torch.tensor(documents),
        sliding_window=window,
    )


def visible_by_the_book(mask: BlockMask, layer_type: str) -> torch.Tensor:
    """Rule C.3 spelled out, one query and one key at a time."""
    is_sliding, window = layer_type == SLIDING, mask.sliding_window or 0
    num_anchors, num_rows = len(mask.document_A), len(mask.context_document_S)
    visible = torch.zeros(num_anchors * BLOCK, num_rows + num_anchors * BLOCK, dtype=torch.bool)
    for n in range(num_anchors):
        anchor, document = int(mask.anchor_position_A[n]), int(mask.document_A[n])
        for m in range(BLOCK):
            query = n * BLOCK + m
            for row in range(num_rows):
                j = int(mask.context_position_S[row])
                same = document != -1 and int(mask.context_document_S[row]) == document
                near = not is_sliding or j >= anchor + m - (window - 1)
                visible[query, row] = same and j < anchor and near
            for m_key in range(BLOCK):
                near = not is_sliding or (m_key <= m and m - m_key <= window - 1)
                visible[query, num_rows + n * BLOCK + m_key] = near
    return visible


@pytest.mark.parametrize(
    ("layer_type", "window"),
    [(FULL, None), (FULL, 3), (SLIDING, 1), (SLIDING, 2), (SLIDING, 3), (SLIDING, 6), (SLIDING, 100)],
)
def test_dense_mask_equals_the_rule_spelled_out(layer_type, window):
    mask = packed_mask(window)
    kept_Q = mask.keep_A.repeat_interleave(BLOCK)
    dense = mask.dense(layer_type)
    assert torch.equal(dense[kept_Q], visible_by_the_book(mask, layer_type)[kept_Q])


@pytest.mark.parametrize("layer_type", [FULL, SLIDING])
def test_padded_block_sees_no_context_and_no_other_block_and_no_row_is_empty(layer_type):
    mask = packed_mask(window=3)
    dense = mask.dense(layer_type)
    num_rows = len(mask.context_document_S)
    padded_Q = ~mask.keep_A.repeat_interleave(BLOCK)
    assert not dense[padded_Q, :num_rows].any()
    block_QQ = dense[:, num_rows:].clone()
    for n in range(len(mask.document_A)):
        block_QQ[n * BLOCK : (n + 1) * BLOCK, n * BLOCK : (n + 1) * BLOCK] = False
    assert not block_QQ.any()
    assert dense.any(dim=1).all()


@pytest.mark.parametrize(("layer_type", "window"), [(FULL, None), (SLIDING, 1), (SLIDING, 3), (SLIDING, 50)])
@pytest.mark.parametrize("queries_per_group", [1, 8, 64])
def test_grouped_attention_equals_dense_attention(layer_type, window, queries_per_group):
    mask = packed_mask(window)
    num_queries, num_rows = len(mask.document_A) * BLOCK, len(mask.context_document_S)
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(num_queries, 6, 8, generator=generator, requires_grad=True)
    context_key, context_value = torch.randn(2, num_rows, 2, 8, generator=generator)
    block_key, block_value = torch.randn(2, num_queries, 2, 8, generator=generator)
    for tensor in (context_key, context_value, block_key, block_value):
        tensor.requires_grad_()
    leaves = [query, context_key, context_value, block_key, block_value]
    plan = plan_attention(mask, layer_type, queries_per_group=queries_per_group)
    fast = attend(query, context_key, context_value, block_key, block_value, plan, BLOCK)
    keys = torch.cat([context_key, block_key]).repeat_interleave(3, dim=1).transpose(0, 1)[None]
    values = torch.cat([context_value, block_value]).repeat_interleave(3, dim=1).transpose(0, 1)[None]
    dense = F.scaled_dot_product_attention(
        query.transpose(0, 1)[None], keys, values, attn_mask=mask.dense(layer_type)
    )[0].transpose(0, 1)
    kept_Q = mask.keep_A.repeat_interleave(BLOCK)
    torch.testing.assert_close(fast[kept_Q], dense[kept_Q])
    assert torch.isfinite(fast).all()
    weight = torch.randn(dense[kept_Q].shape, generator=generator)
    for one, other in zip(
        torch.autograd.grad((fast[kept_Q] * weight).sum(), leaves),
        torch.autograd.grad((dense[kept_Q] * weight).sum(), leaves),
        strict=True,
    ):
        torch.testing.assert_close(one, other)


def test_a_group_reads_only_the_rows_before_its_last_anchor():
    plan = plan_attention(packed_mask(), FULL, queries_per_group=BLOCK)
    assert plan.piece_rows == (9, 1, 5, 2)
    assert [group.num_anchors for group in plan.groups] == [1] * 9
    assert [group.num_rows for group in plan.groups] == [0, 3, 4, 8, 0, 0, 4, 0, 0]
    assert [group.piece for group in plan.groups if group.num_rows] == [0, 0, 0, 2]


def test_mask_refuses_parts_of_unequal_length():
    with pytest.raises(ShapeError, match=r"anchors \(2,\), \(1,\)"):
        BlockMask(
            block_size=4,
            anchor_position_A=torch.zeros(2, dtype=torch.int64),
            document_A=torch.zeros(1, dtype=torch.int64),
            context_position_S=torch.zeros(3, dtype=torch.int64),
            context_document_S=torch.zeros(3, dtype=torch.int64),
        )
    with pytest.raises(ShapeError, match="context"):
        BlockMask(
            block_size=4,
            anchor_position_A=torch.zeros(2, dtype=torch.int64),
            document_A=torch.zeros(2, dtype=torch.int64),
            context_position_S=torch.zeros(3, dtype=torch.int64),
            context_document_S=torch.zeros(4, dtype=torch.int64),
        )
