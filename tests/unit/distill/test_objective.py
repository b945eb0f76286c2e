"""The objective on whole batches: against a loop over blocks, and its limits."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import torch.nn.functional as F
from tiny_models import HIDDEN, VOCAB, sliding_config, tiny_config, tiny_drafter, tiny_head, tiny_record

from dflash_online.distill.noise import FeatureNoise
from dflash_online.distill.objective import block_objective
from dflash_online.distill.pack import pack_records
from dflash_online.distill.recipe import RECIPES, Recipe
from dflash_online.errors import ConfigError, ShapeError

ZLAB = RECIPES["zlab"]


def tiny_batch(num_anchors=1000, pad=False):
    records = [
        tiny_record(14, ((4, 9), (11, 14)), seed=1),
        tiny_record(3, ((1, 3),), seed=2),
        tiny_record(20, ((0, 20),), seed=3),
    ]
    generator = torch.Generator().manual_seed(0)
    batch = pack_records(records, block_size=4, num_anchors=num_anchors, generator=generator, pad=pad)
    return records, batch


@pytest.mark.parametrize("config", [tiny_config(), sliding_config(3)])
def test_objective_equals_a_loop_that_decodes_block_by_block(config):
    records, batch = tiny_batch()
    drafter, head = tiny_drafter(config), tiny_head()
    result = block_objective(drafter, head, batch, ZLAB, chunk_slots=5)
    loss_sum, weight_sum, correct, total = 0.0, 0.0, [0] * 4, [0] * 4
    for row in range(batch.num_anchors):
        record, anchor = records[int(batch.document_A[row])], int(batch.anchor_position_A[row])
        tokens, mask = record.header.token_ids, record.loss_mask_T()
        cache = drafter.new_cache()
        drafter.extend_context(cache, record.features_TF[:anchor], torch.arange(anchor))
        block = torch.tensor([tokens[anchor]] + [config.mask_token_id] * 3)
        logits = head.logits(drafter.draft_block(head.embed(block), anchor, cache))
        for k in range(1, 4):
            if anchor + k < len(tokens) and mask[anchor + k]:
                weight = float(torch.exp(torch.tensor(-(k - 1) / ZLAB.gamma_for(4))))
                label = torch.tensor(tokens[anchor + k])
                loss_sum += weight * float(F.cross_entropy(logits[k], label))
                weight_sum += weight
                total[k] += 1
                correct[k] += int(logits[k].argmax() == label)
    torch.testing.assert_close(result.loss_sum.item(), loss_sum, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(result.denominator.item(), weight_sum, rtol=1e-6, atol=1e-6)
    assert result.stats.num_total_B.tolist() == total
    assert result.stats.num_correct_B.tolist() == correct


def test_padded_blocks_change_neither_loss_nor_gradient_nor_statistics():
    drafter, head = tiny_drafter(), tiny_head()
    sums, gradients, stats = [], [], []
    for pad in (False, True):
        _, batch = tiny_batch(num_anchors=50, pad=pad)
        assert len(batch.document_A) == (50 if pad else batch.num_anchors)
        drafter.zero_grad()
        result = block_objective(drafter, head, batch, ZLAB)
        (result.loss_sum / result.denominator).backward()
        sums.append(torch.stack([result.loss_sum.detach(), result.denominator]))
        gradients.append(torch.cat([p.grad.flatten() for p in drafter.parameters()]))
        stats.append(result.stats.as_tensor())
    torch.testing.assert_close(sums[0], sums[1])
    torch.testing.assert_close(gradients[0], gradients[1])
    torch.testing.assert_close(stats[0], stats[1])
    assert torch.isfinite(gradients[1]).all()


def test_records_of_one_batch_do_not_reach_each_other():
    _, batch = tiny_batch()
    drafter, head = tiny_drafter(), tiny_head()
    changed = batch.features_SF.clone()
    changed[batch.context_document_S == 2] += 1.0
    before = block_objective(drafter, head, only_document(batch, 0), ZLAB)
    after = block_objective(
        drafter, head, only_document(dataclasses.replace(batch, features_SF=changed), 0), ZLAB
    )
    assert torch.equal(before.loss_sum, after.loss_sum)


def only_document(batch, document):
    """The same blocks, labels of all other documents switched off."""
    valid = batch.valid_AB & (batch.document_A == document)[:, None]
    return dataclasses.replace(batch, valid_AB=valid)


def test_gradient_reaches_every_parameter_and_never_the_frozen_head():
    _, batch = tiny_batch()
    drafter, head = tiny_drafter(), tiny_head()
    block_objective(drafter, head, batch, ZLAB).loss_sum.backward()
    silent = [name for name, p in drafter.named_parameters() if p.grad is None or not p.grad.abs().sum() > 0]
    assert silent == []
    assert head.weight_VH.grad is None


def test_loss_of_a_drafter_that_learns_the_records_by_heart_tends_to_zero():
    _, batch = tiny_batch()
    drafter, head = tiny_drafter(seed=2), tiny_head()
    optimizer = torch.optim.AdamW(drafter.parameters(), lr=3e-3, weight_decay=0.0)
    for _ in range(150):
        result = block_objective(drafter, head, batch, ZLAB)
        loss = result.loss_sum / result.denominator
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss.item() < 0.05
    assert min(result.stats.accuracy()) == 1.0


def test_loss_of_fresh_weights_is_about_that_of_guessing():
    _, batch = tiny_batch()
    head = dataclasses.replace(tiny_head(), weight_VH=torch.zeros(VOCAB, HIDDEN))
    result = block_objective(tiny_drafter(), head, batch, ZLAB)
    torch.testing.assert_close(
        result.loss_sum / result.denominator, torch.log(torch.tensor(float(VOCAB))), rtol=1e-5, atol=0
    )


def test_statistics_add_up_and_survive_a_reduction_as_a_tensor():
    _, batch = tiny_batch()
    drafter, head = tiny_drafter(), tiny_head()
    whole = block_objective(drafter, head, batch, ZLAB).stats
    parts = [block_objective(drafter, head, only_document(batch, d), ZLAB).stats for d in range(3)]
    summed = parts[0] + parts[1] + parts[2]
    torch.testing.assert_close(summed.as_tensor(), whole.as_tensor())
    assert whole.from_tensor(whole.as_tensor()).accuracy() == whole.accuracy()
    assert len(whole.accuracy()) == len(whole.mean_loss()) == 3


def test_noise_goes_to_the_drafter_alone_and_needs_a_generator():
    _, batch = tiny_batch()
    drafter, head = tiny_drafter(), tiny_head()
    clean_features = batch.features_SF.clone()
    noisy_recipe = Recipe(name="noisy", noise=FeatureNoise((0.5,)))
    noisy = block_objective(drafter, head, batch, noisy_recipe, generator=torch.Generator().manual_seed(0))
    assert torch.equal(batch.features_SF, clean_features)
    assert noisy.loss_sum != block_objective(drafter, head, batch, ZLAB).loss_sum
    with pytest.raises(ConfigError, match="generator"):
        block_objective(drafter, head, batch, noisy_recipe)


def test_blocks_of_another_size_are_refused():
    _, batch = tiny_batch()
    with pytest.raises(ShapeError, match="blocks of 4 slots, the drafter has 5"):
        block_objective(tiny_drafter(tiny_config(block_size=5)), tiny_head(), batch, ZLAB)


def test_a_bfloat16_head_moves_the_drafters_products_to_bfloat16_and_keeps_float32_masters():
    _, batch = tiny_batch()
    drafter = tiny_drafter()
    exact = block_objective(drafter, tiny_head(), batch, ZLAB)
    low = block_objective(drafter, tiny_head(dtype=torch.bfloat16), batch, ZLAB)
    assert low.loss_sum != exact.loss_sum
    torch.testing.assert_close(low.loss_sum, exact.loss_sum, rtol=0.02, atol=0)
    low.loss_sum.backward()
    assert {p.grad.dtype for p in drafter.parameters()} == {torch.float32}
