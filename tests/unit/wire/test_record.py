"""What a record header refuses, and what it derives."""

from __future__ import annotations

import dataclasses

import pytest
from tiny_models import tiny_record

from dflash_online.errors import CorruptRecordError

HEADER = tiny_record(6, ((2, 4), (4, 6))).header


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"token_ids": (1,), "num_rows": 0}, "token_ids"),
        ({"num_rows": 6}, "num_rows"),
        ({"row_width": 0}, "row_width"),
        ({"row_width": 47}, "row_width"),
        ({"layer_ids": ()}, "row_width"),
        ({"dtype": "float16"}, "dtype"),
        ({"prompt_length": 0}, "prompt_length"),
        ({"prompt_length": 7}, "prompt_length"),
        ({"loss_spans": ((2, 7),)}, "loss_spans"),
        ({"loss_spans": ((2, 2),)}, "loss_spans"),
        ({"loss_spans": ((3, 5), (4, 6))}, "loss_spans"),
        ({"loss_spans": ((-1, 5),)}, "loss_spans"),
    ],
)
def test_a_header_that_contradicts_itself_is_refused_by_field(change, field):
    with pytest.raises(CorruptRecordError) as caught:
        dataclasses.replace(HEADER, **change)
    assert caught.value.field == field


def test_loss_mask_covers_the_spans_and_nothing_else():
    record = tiny_record(7, ((1, 3), (5, 7)))
    assert record.loss_mask_T().tolist() == [False, True, True, False, False, True, True]
    assert record.header.num_bytes == 6 * 48 * 2 == record.features_TF.nbytes
