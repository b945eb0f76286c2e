"""Packing: which anchors may be chosen, how many per record, and what their labels are."""

from __future__ import annotations

import pytest
import torch
from tiny_models import tiny_record

from dflash_online.distill.pack import all_blocks, pack_records, share_out, valid_anchors
from dflash_online.errors import ConfigError, ShapeError

BLOCK = 4


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def pack(records, num_anchors=1000, seed=0, pad=False):
    return pack_records(
        records, block_size=BLOCK, num_anchors=num_anchors, generator=generator(seed), pad=pad
    )


def test_an_anchor_is_supervised_and_so_is_the_token_after_it():
    record = tiny_record(12, ((0, 1), (3, 6), (8, 9), (10, 12)))
    # Spans of one token hold no anchor; the last anchor of a record of T tokens is T - 2.
    assert valid_anchors(record.loss_mask_T()).tolist() == [3, 4, 10]


def test_labels_and_valid_slots_equal_a_loop_over_the_rule():
    records = [tiny_record(9, ((3, 6), (7, 9)), seed=1), tiny_record(6, ((0, 6),), seed=2)]
    batch = pack(records)
    assert batch.anchor_position_A.tolist() == [3, 4, 7, 0, 1, 2, 3, 4]
    assert batch.document_A.tolist() == [0, 0, 0, 1, 1, 1, 1, 1]
    for row in range(batch.num_anchors):
        record = records[int(batch.document_A[row])]
        tokens, mask, anchor = (
            record.header.token_ids,
            record.loss_mask_T(),
            int(batch.anchor_position_A[row]),
        )
        assert int(batch.anchor_token_A[row]) == tokens[anchor]
        for k in range(BLOCK):
            inside = anchor + k < len(tokens)
            assert bool(batch.valid_AB[row, k]) == (k >= 1 and inside and bool(mask[anchor + k]))
            assert int(batch.label_AB[row, k]) == (tokens[anchor + k] if inside else 0)
    assert batch.block_position_AB[0].tolist() == [3, 4, 5, 6]


def test_contexts_lie_end_to_end_one_row_per_token_but_the_last():
    records = [tiny_record(5, ((1, 5),), seed=1), tiny_record(4, ((1, 4),), seed=2)]
    batch = pack(records)
    assert torch.equal(batch.features_SF, torch.cat([r.features_TF for r in records]))
    assert batch.context_position_S.tolist() == [0, 1, 2, 3, 0, 1, 2]
    assert batch.context_document_S.tolist() == [0, 0, 0, 0, 1, 1, 1]
    # The last row that any block may see is that of T - 3: strictly before the last anchor T - 2.
    assert int(batch.anchor_position_A.max()) == 3


def test_anchors_are_sampled_without_replacement_sorted_and_by_seed():
    records = [tiny_record(60, ((10, 60),), seed=1), tiny_record(30, ((5, 30),), seed=2)]
    batch = pack(records, num_anchors=20)
    places = list(zip(batch.document_A.tolist(), batch.anchor_position_A.tolist(), strict=True))
    assert len(set(places)) == 20
    assert places == sorted(places)
    assert torch.equal(batch.anchor_position_A, pack(records, num_anchors=20).anchor_position_A)
    other = pack(records, num_anchors=20, seed=1)
    assert not torch.equal(batch.anchor_position_A, other.anchor_position_A)


def test_every_valid_anchor_is_chosen_about_equally_often():
    record, counts, shared = tiny_record(13, ((2, 13),)), torch.zeros(13), generator()
    for _ in range(400):
        batch = pack_records([record], block_size=BLOCK, num_anchors=3, generator=shared)
        counts[batch.anchor_position_A] += 1
    assert counts[:2].sum() == 0
    assert counts[12] == 0
    # 400 draws of 3 in 10: mean 120, deviation about 9.
    assert counts[2:12].min() > 80
    assert counts[2:12].max() < 160


def test_the_number_of_anchors_follows_the_supervised_tokens_of_each_record():
    records = [tiny_record(80, ((9, 70),), seed=1), tiny_record(40, ((9, 30),), seed=2)]
    batch = pack(records, num_anchors=40)
    assert torch.bincount(batch.document_A).tolist() == [30, 10]


@pytest.mark.parametrize(
    ("total", "available", "shares"),
    [
        (10, [5, 5], [5, 5]),
        (100, [5, 3], [5, 3]),
        (4, [6, 3, 3], [2, 1, 1]),
        (1, [1, 1, 1], [1, 0, 0]),
        (7, [10, 1, 1], [6, 1, 0]),
    ],
)
def test_sharing_out_is_by_largest_remainder_and_never_above_what_there_is(total, available, shares):
    assert share_out(total, available) == shares


def test_records_without_an_anchor_are_left_out_with_their_context():
    silent = tiny_record(50, ((49, 50),), seed=1)
    record = tiny_record(5, ((1, 5),), seed=2)
    batch = pack([silent, record, silent])
    assert len(batch.features_SF) == 4
    assert set(batch.document_A.tolist()) == {0}
    with pytest.raises(ShapeError, match="none of 1 records"):
        pack([silent])


def test_padding_fills_up_with_blocks_that_teach_nothing():
    batch = pack([tiny_record(5, ((1, 5),))], num_anchors=6, pad=True)
    assert batch.document_A.tolist() == [0, 0, 0, -1, -1, -1]
    assert batch.num_anchors == 3
    assert not batch.valid_AB[3:].any()
    assert batch.mask(None).keep_A.tolist() == [True] * 3 + [False] * 3


def test_blocks_at_the_end_of_an_answer_keep_their_valid_slots():
    batch = all_blocks(tiny_record(10, ((4, 10),)), torch.tensor([8]), BLOCK)
    assert batch.valid_AB.tolist() == [[False, True, False, False]]


def test_features_of_unequal_width_are_refused():
    with pytest.raises(ShapeError, match=r"one width, got \[24, 48\]"):
        pack([tiny_record(5, ((1, 5),)), tiny_record(5, ((1, 5),), width=24)])


@pytest.mark.parametrize(
    ("block_size", "num_anchors", "field"), [(1, 4, "block_size"), (4, 0, "num_anchors")]
)
def test_bounds_are_named(block_size, num_anchors, field):
    with pytest.raises(ConfigError, match=field):
        pack_records(
            [tiny_record(5, ((1, 5),))], block_size=block_size, num_anchors=num_anchors, generator=generator()
        )


def test_moving_a_batch_moves_every_part():
    batch = pack([tiny_record(5, ((1, 5),))]).to("meta")
    assert all(getattr(batch, name).device.type == "meta" for name in batch.__slots__)
