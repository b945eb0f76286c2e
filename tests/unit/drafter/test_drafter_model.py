"""The drafter's two ways through its layers agree: training blocks, and decoding with a growing context."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from tiny_models import HIDDEN, sliding_config, tiny_config, tiny_drafter

from dflash_online.drafter.attention import BlockMask
from dflash_online.drafter.model import DFlashDrafter, RmsNorm
from dflash_online.drafter.tensors import expected_shapes
from dflash_online.errors import ShapeError

CONFIGS = [tiny_config(), sliding_config(3), sliding_config(6), tiny_config(attention_bias=True)]


def random_inputs(config, num_rows, num_blocks, seed=3):
    generator = torch.Generator().manual_seed(seed)
    features = torch.randn(num_rows, config.feature_width, generator=generator)
    embeds = torch.randn(num_blocks, config.block_size, HIDDEN, generator=generator)
    return features, embeds


def train_blocks(drafter, features, embeds, anchors):
    anchor_A = torch.tensor(anchors)
    mask = BlockMask(
        block_size=drafter.config.block_size,
        anchor_position_A=anchor_A,
        document_A=torch.zeros_like(anchor_A),
        context_position_S=torch.arange(len(features)),
        context_document_S=torch.zeros(len(features), dtype=torch.int64),
        sliding_window=drafter.config.sliding_window,
    )
    return drafter.forward_blocks(
        embeds,
        drafter.context(features),
        block_positions_AB=anchor_A[:, None] + torch.arange(drafter.config.block_size),
        ctx_positions_S=torch.arange(len(features)),
        mask=mask,
    )


@pytest.mark.parametrize("config", CONFIGS)
def test_one_training_block_equals_one_inference_block(config):
    drafter = tiny_drafter(config)
    anchors = [0, 1, 5, 6, 12]
    features, embeds = random_inputs(config, num_rows=12, num_blocks=len(anchors))
    trained = train_blocks(drafter, features, embeds, anchors)
    for block, anchor in enumerate(anchors):
        cache = drafter.new_cache()
        drafter.extend_context(cache, features[:anchor], torch.arange(anchor))
        drafted = drafter.draft_block(embeds[block], anchor, cache)
        torch.testing.assert_close(drafted, trained[block], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("config", CONFIGS)
def test_context_grown_by_unequal_rounds_equals_context_from_scratch(config):
    drafter = tiny_drafter(config)
    features, embeds = random_inputs(config, num_rows=700, num_blocks=6)
    grown, start = drafter.new_cache(), 0
    # 300 and 400 rows outgrow the first buffer twice.
    for round_, num_committed in enumerate((1, 4, 2, 300, 1, 392)):
        stop = start + num_committed
        drafter.extend_context(grown, features[start:stop], torch.arange(start, stop))
        start = stop
        scratch = drafter.new_cache()
        drafter.extend_context(scratch, features[:start], torch.arange(start))
        for layer in range(config.num_layers):
            for one, other in zip(grown.layer(layer), scratch.layer(layer), strict=True):
                torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(
            drafter.draft_block(embeds[round_], start, grown),
            drafter.draft_block(embeds[round_], start, scratch),
            rtol=1e-5,
            atol=1e-5,
        )


def test_drafting_leaves_the_cache_as_it_is():
    drafter = tiny_drafter()
    features, embeds = random_inputs(drafter.config, num_rows=5, num_blocks=1)
    cache = drafter.new_cache()
    drafter.extend_context(cache, features, torch.arange(5))
    before = [tensor.clone() for layer in range(2) for tensor in cache.layer(layer)]
    first = drafter.draft_block(embeds[0], 5, cache)
    assert torch.equal(first, drafter.draft_block(embeds[0], 5, cache))
    assert cache.num_rows == 5
    after = [tensor for layer in range(2) for tensor in cache.layer(layer)]
    assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True))


def test_a_block_ignores_the_features_of_its_anchor_and_later_and_the_other_blocks():
    drafter = tiny_drafter()
    features, embeds = random_inputs(drafter.config, num_rows=12, num_blocks=3)
    clean = train_blocks(drafter, features, embeds, [2, 5, 9])
    changed_features, changed_embeds = features.clone(), embeds.clone()
    changed_features[5:] += 1.0
    changed_embeds[[0, 2]] += 1.0
    changed = train_blocks(drafter, changed_features, changed_embeds, [2, 5, 9])
    assert torch.equal(clean[1], changed[1])
    assert not torch.allclose(clean[2], changed[2])


def test_rows_just_before_the_anchor_matter():
    drafter = tiny_drafter()
    features, embeds = random_inputs(drafter.config, num_rows=12, num_blocks=1)
    clean = train_blocks(drafter, features, embeds, [5])
    features[4] += 1.0
    assert not torch.allclose(clean, train_blocks(drafter, features, embeds, [5]))


def test_parameter_names_and_shapes_are_those_of_a_published_checkpoint():
    for config in CONFIGS:
        shapes = {name: tuple(tensor.shape) for name, tensor in DFlashDrafter(config).state_dict().items()}
        assert shapes == expected_shapes(config)
    names = set(expected_shapes(tiny_config()))
    assert {"fc.weight", "hidden_norm.weight", "norm.weight", "layers.1.self_attn.q_norm.weight"} <= names
    assert expected_shapes(tiny_config())["fc.weight"] == (HIDDEN, 2 * HIDDEN)


def test_drafter_made_from_tensors_has_their_values_as_trainable_float32():
    source = tiny_drafter()
    tensors = {name: tensor.bfloat16() for name, tensor in source.state_dict().items()}
    drafter = DFlashDrafter.from_tensors(source.config, tensors)
    assert all(p.requires_grad and p.dtype == torch.float32 for p in drafter.parameters())
    assert torch.equal(drafter.fc.weight, tensors["fc.weight"].float())
    with torch.no_grad():
        drafter.norm.weight.add_(1)
    assert torch.equal(tensors["norm.weight"].float(), torch.ones(HIDDEN))


def test_norm_is_the_library_norm_and_keeps_the_type():
    norm = RmsNorm(HIDDEN, 1e-6)
    x = torch.randn(3, HIDDEN, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(norm(x), F.rms_norm(x, (HIDDEN,), eps=1e-6))
    assert norm(x.bfloat16()).dtype == torch.bfloat16


def test_features_of_another_width_are_refused():
    drafter = tiny_drafter()
    with pytest.raises(ShapeError, match=rf"must be \[C, {2 * HIDDEN}\]"):
        drafter.context(torch.zeros(3, HIDDEN))


def test_a_context_that_reaches_the_anchor_is_refused():
    drafter = tiny_drafter()
    features, embeds = random_inputs(drafter.config, num_rows=5, num_blocks=1)
    cache = drafter.new_cache()
    drafter.extend_context(cache, features, torch.arange(5))
    with pytest.raises(ShapeError, match="context reaches position 4, the block starts at 4"):
        drafter.draft_block(embeds[0], 4, cache)


def test_blocks_and_context_that_disagree_are_refused():
    drafter = tiny_drafter()
    features, embeds = random_inputs(drafter.config, num_rows=5, num_blocks=2)
    with pytest.raises(ShapeError):
        train_blocks(drafter, features, embeds[:1], [2, 3])
