"""Labels, soft KL, noise and `fc_layers` on whole batches: against loops by the book."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import torch.nn.functional as F
from tiny_models import HIDDEN, tiny_config, tiny_drafter, tiny_head, tiny_record

from dflash_online.distill.noise import FeatureNoise
from dflash_online.distill.objective import block_objective
from dflash_online.distill.pack import pack_records
from dflash_online.distill.recipe import RECIPES, Recipe
from dflash_online.drafter.checkpoint import (
    TrainingInfo,
    check_servable,
    export_tensors,
    load_checkpoint,
    save_checkpoint,
)
from dflash_online.errors import ConfigError, UnsupportedCheckpointError

VERIFIER = Recipe(name="verifier", label_source="verifier", gamma=3.0)


def batch_of_three():
    records = [
        tiny_record(14, ((4, 9), (11, 14)), seed=1),
        tiny_record(3, ((1, 3),), seed=2),
        tiny_record(20, ((0, 20),), seed=3),
    ]
    generator = torch.Generator().manual_seed(0)
    return records, pack_records(records, block_size=4, num_anchors=100, generator=generator, pad=True)


def verifier_logits(record, head, position):
    """What head and final norm make of the deepest of two hooked layers, for the token behind `position`."""
    deepest = record.features_TF[position, HIDDEN:].float()
    normed = deepest / (deepest.square().mean() + head.eps).sqrt() * head.final_norm_H
    return head.weight_VH @ normed


@pytest.mark.parametrize("layer_ids", [(1, 5), (5, 1)])
def test_verifier_labels_and_soft_kl_equal_a_loop_over_slots(layer_ids):
    records, batch = batch_of_three()
    drafter, head = tiny_drafter(tiny_config(target_layer_ids=layer_ids)), tiny_head()
    if layer_ids == (5, 1):  # the deepest layer comes first: same rows, columns exchanged
        batch = dataclasses.replace(batch, features_SF=batch.features_SF.roll(HIDDEN, dims=1))
    recipe = dataclasses.replace(VERIFIER, kl_share=0.7, kl_temperature=2.0)
    result = block_objective(drafter, head, batch, recipe, chunk_slots=5)
    loss_sum, weight_sum, agreed = 0.0, 0.0, 0
    for row in range(batch.num_anchors):
        record, anchor = records[int(batch.document_A[row])], int(batch.anchor_position_A[row])
        features = record.features_TF if layer_ids == (1, 5) else record.features_TF.roll(HIDDEN, dims=1)
        cache = drafter.new_cache()
        drafter.extend_context(cache, features[:anchor], torch.arange(anchor))
        block = torch.tensor([record.header.token_ids[anchor]] + [drafter.config.mask_token_id] * 3)
        logits = head.logits(drafter.draft_block(head.embed(block), anchor, cache))
        for k in batch.valid_AB[row].nonzero().flatten().tolist():
            target = verifier_logits(record, head, anchor + k - 1)
            label = target.argmax()
            kl = 4.0 * F.kl_div(
                F.log_softmax(logits[k] / 2, 0),
                F.log_softmax(target / 2, 0),
                log_target=True,
                reduction="sum",
            )
            weight = float(torch.exp(torch.tensor(-(k - 1) / 3)))
            loss_sum += weight * float(0.3 * F.cross_entropy(logits[k], label) + 0.7 * kl)
            weight_sum += weight
            agreed += int(label) == record.header.token_ids[anchor + k]
    torch.testing.assert_close(result.loss_sum.item(), loss_sum, rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(result.denominator.item(), weight_sum, rtol=1e-6, atol=1e-6)
    assert int(result.stats.num_agreed_B.sum()) == agreed
    assert 0 < result.stats.label_agreement() < 1


def test_labels_of_tokens_agree_with_the_tokens():
    _, batch = batch_of_three()
    stats = block_objective(tiny_drafter(), tiny_head(), batch, RECIPES["zlab"]).stats
    assert stats.label_agreement() == 1.0


def test_the_denominator_of_slots_counts_them():
    _, batch = batch_of_three()
    per_slot = dataclasses.replace(VERIFIER, denominator="slots")
    result = block_objective(tiny_drafter(), tiny_head(), batch, per_slot)
    assert result.denominator.item() == int(batch.valid_AB.sum())


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=list(RECIPES))
def test_every_recipe_has_a_finite_loss_that_reaches_every_parameter(recipe):
    _, batch = batch_of_three()
    drafter = tiny_drafter(tiny_config(fc_layers=recipe.fc_layers))
    generator = torch.Generator().manual_seed(0)
    result = block_objective(drafter, tiny_head(), batch, recipe, step=3, generator=generator)
    result.loss_sum.backward()
    assert torch.isfinite(result.loss_sum)
    silent = [name for name, p in drafter.named_parameters() if p.grad is None or not p.grad.abs().sum() > 0]
    assert silent == []


def test_noise_changes_the_drafter_and_labels_only_where_the_bug_is_planted():
    _, batch = batch_of_three()
    clean = block_objective(tiny_drafter(), tiny_head(), batch, VERIFIER).stats
    noisy = dataclasses.replace(VERIFIER, noise=FeatureNoise((0.5,)))
    planted = dataclasses.replace(noisy, noise_reaches_labels=True)
    agreed = []
    for recipe in (noisy, planted):
        generator = torch.Generator().manual_seed(0)
        result = block_objective(tiny_drafter(), tiny_head(), batch, recipe, generator=generator)
        assert not torch.equal(result.stats.loss_B, clean.loss_B)
        agreed.append(result.stats.num_agreed_B)
    assert torch.equal(agreed[0], clean.num_agreed_B)
    assert not torch.equal(agreed[1], clean.num_agreed_B)


def test_fc_without_the_deepest_layer_never_reads_it():
    _, batch = batch_of_three()
    drafter, head = tiny_drafter(tiny_config(fc_layers="all_but_last")), tiny_head()
    assert drafter.fc.weight.shape == (HIDDEN, HIDDEN)
    recipe = Recipe(name="x", fc_layers="all_but_last")
    before = block_objective(drafter, head, batch, recipe).loss_sum
    features = batch.features_SF.clone()
    features[:, HIDDEN:] = 7.0
    after = block_objective(drafter, head, dataclasses.replace(batch, features_SF=features), recipe).loss_sum
    assert torch.equal(before, after)


def test_recipe_and_drafter_must_read_the_same_layers():
    _, batch = batch_of_three()
    with pytest.raises(ConfigError, match="recipe fc_layers must be the drafter's 'all'"):
        block_objective(tiny_drafter(), tiny_head(), batch, Recipe(name="x", fc_layers="all_but_last"))
    with pytest.raises(ConfigError, match="rising, with fc_layers all_but_last"):
        tiny_config(fc_layers="all_but_last", target_layer_ids=(5, 1))


def test_a_checkpoint_of_fc_without_the_deepest_layer_loads_again_and_is_refused_to_servers(tmp_path):
    drafter = tiny_drafter(tiny_config(fc_layers="all_but_last"))
    tensors = export_tensors(drafter, drafter.config)
    save_checkpoint(tmp_path / "v3", drafter.config, tensors, training=TrainingInfo(number=1))
    loaded = load_checkpoint(tmp_path / "v3")
    assert loaded.config == drafter.config
    assert torch.equal(loaded.tensors["fc.weight"], drafter.fc.weight)
    with pytest.raises(UnsupportedCheckpointError, match="fc_layers = all_but_last: servers feed every"):
        check_servable(loaded)
