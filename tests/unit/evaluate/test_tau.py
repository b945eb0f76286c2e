"""Offline tau: the tabled walk equals decoding block by block, and a scripted drafter has its known tau."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from tiny_models import (
    HIDDEN,
    VOCAB,
    sliding_config,
    tiny_config,
    tiny_drafter,
    tiny_head,
    tiny_record,
)

from dflash_online.distill.objective import block_objective
from dflash_online.distill.pack import pack_records
from dflash_online.distill.recipe import RECIPES
from dflash_online.evaluate.tau import chain_walk, compare, evaluate_drafter, tau_of
from dflash_online.target.frozen import FrozenHead


def half_trained(config, records, num_steps=60):
    """A drafter that gets some drafts right and some wrong, so that rounds have many lengths."""
    drafter, head = tiny_drafter(config), tiny_head()
    optimizer = torch.optim.AdamW(drafter.parameters(), lr=3e-3)
    generator = torch.Generator().manual_seed(0)
    for _ in range(num_steps):
        batch = pack_records(records, block_size=config.block_size, num_anchors=64, generator=generator)
        result = block_objective(drafter, head, batch, RECIPES["zlab"])
        optimizer.zero_grad()
        (result.loss_sum / result.denominator).backward()
        optimizer.step()
    return drafter, head


def some_records():
    return [
        tiny_record(30, ((8, 30),), seed=1, record_id="generated"),
        tiny_record(40, ((3, 12), (20, 21), (25, 40)), seed=2, record_id="conversation"),
        tiny_record(12, ((2, 6), (6, 12)), seed=3, record_id="touching"),
    ]


@pytest.mark.parametrize("config", [tiny_config(), sliding_config(3), tiny_config(block_size=7)])
def test_walk_over_the_table_equals_decoding_round_by_round(config):
    records = some_records()
    drafter, head = half_trained(config, records)
    tabled = evaluate_drafter(drafter, head, records)
    lazy = evaluate_drafter(drafter, head, records, with_slots=False)
    for record, found, lazily in zip(records, tabled.records, lazy.records, strict=True):
        assert found.record_id == record.header.record_id
        assert found.histogram == chain_walk(drafter, head, record)
        assert (lazily.histogram, lazily.anchor_histogram) == (found.histogram, found.anchor_histogram)
    # The oracle must have had something to disagree about.
    assert sum(count > 0 for count in tabled.histogram) >= 3
    assert lazy.stats is None


def test_tau_by_histogram_by_rounds_and_by_committed_tokens_agree():
    records = some_records()[:1]
    drafter, head = half_trained(tiny_config(), records)
    (found,) = evaluate_drafter(drafter, head, records).records
    committed = [a + 1 for a, count in enumerate(found.histogram) for _ in range(count)]
    assert tau_of(found.histogram) == found.tau == pytest.approx(sum(committed) / len(committed))
    # The first of the 22 answer tokens comes from prefill; the last round's bonus may lie behind the end.
    assert sum(committed) in (21, 22)


def always_seven():
    """A drafter whose every draft is token 7, whatever the context.

    Its layers add nothing, so that the hidden state of a slot is the mask's embedding, an identity row; the
    head swaps the rows of the mask and of token 7.
    """
    config = tiny_config(hidden_size=VOCAB, num_heads=1, num_kv_heads=1, head_dim=4)
    drafter = tiny_drafter(config)
    with torch.no_grad():
        for layer in drafter.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
    eye = torch.eye(VOCAB)
    head_VH = eye.clone()
    head_VH[[7, config.mask_token_id]] = eye[[config.mask_token_id, 7]]
    return drafter, FrozenHead(eye, head_VH, torch.ones(VOCAB), 1e-6)


@pytest.mark.parametrize("right", [0, 1, 2, 3])
def test_a_drafter_that_is_right_a_known_number_of_times_has_that_tau(right):
    # Token 7 is always drafted; the text has `right` of them after every other token.
    tokens = ((1, *(7,) * right) * 12)[: 12 * (right + 1)]
    drafter, head = always_seven()
    record = tiny_record(len(tokens), ((0, len(tokens)),), width=2 * VOCAB, token_ids=tokens)
    histogram = chain_walk(drafter, head, record)
    assert evaluate_drafter(drafter, head, [record]).records[0].histogram == histogram
    assert histogram[right] == sum(histogram) or right == 0
    assert tau_of(histogram) == right + 1


def test_a_round_at_the_end_of_a_record_accepts_at_most_what_is_left():
    tokens = (1, 7, 7, 7, 7, 7)
    drafter, head = always_seven()
    record = tiny_record(6, ((0, 6),), width=2 * VOCAB, token_ids=tokens)
    # Anchor 0 accepts three and the bonus is token 4; from there one token is left.
    assert chain_walk(drafter, head, record) == (0, 1, 0, 1)


def test_accuracy_per_slot_is_that_of_the_objective():
    records = some_records()
    drafter, head = half_trained(tiny_config(), records)
    generator = torch.Generator().manual_seed(0)
    batch = pack_records(records, block_size=4, num_anchors=1000, generator=generator)
    expected = block_objective(drafter, head, batch, RECIPES["zlab"]).stats
    found = evaluate_drafter(drafter, head, records).stats
    assert torch.equal(found.num_correct_B, expected.num_correct_B)
    assert torch.equal(found.num_total_B, expected.num_total_B)


def test_records_without_an_anchor_are_left_out():
    drafter, head = tiny_drafter(), tiny_head()
    result = evaluate_drafter(drafter, head, [tiny_record(5, ((4, 5),))])
    assert result.records == ()
    assert (result.tau, result.tau_all_anchors, result.num_rounds) == (1.0, 1.0, 0)


def test_training_raises_tau_and_the_paired_comparison_says_so():
    records = [tiny_record(40, ((5, 40),), seed=seed, record_id=str(seed)) for seed in range(8)]
    fresh = evaluate_drafter(tiny_drafter(), tiny_head(), records)
    trained = evaluate_drafter(*half_trained(tiny_config(), records, num_steps=200), records)
    assert trained.tau > fresh.tau + 0.5
    verdict = compare(fresh, trained, seed=0)
    assert verdict.ci_low > 0
    assert verdict.num_records == 8
    assert verdict.mean_difference == pytest.approx(
        sum(new.tau - old.tau for old, new in zip(fresh.records, trained.records, strict=True)) / 8
    )


def test_drafting_does_not_depend_on_features_that_a_server_would_not_have():
    record = tiny_record(30, ((8, 30),), seed=1)
    drafter, head = half_trained(tiny_config(), [record])
    changed = record.features_TF.clone()
    changed[28] = 100.0  # the last row: no block may see it
    twin = dataclasses.replace(record, features_TF=changed)
    assert (
        evaluate_drafter(drafter, head, [record]).records == evaluate_drafter(drafter, head, [twin]).records
    )
    assert HIDDEN * 2 == record.header.row_width
