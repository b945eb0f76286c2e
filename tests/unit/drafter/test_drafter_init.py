"""Where drafters begin: configs for targets of several kinds, mask ids, seeds, warm starts."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from tiny_models import tiny_config, tiny_drafter

from dflash_online.drafter.checkpoint import TrainingInfo, export_tensors, save_checkpoint
from dflash_online.drafter.init import choose_mask_token_id, initialize, new_drafter_config, warm_start
from dflash_online.errors import ConfigError
from dflash_online.target.model_info import TargetModelInfo

TARGET = TargetModelInfo(
    hidden_size=576,
    intermediate_size=1536,
    vocab_size=49152,
    num_layers=30,
    num_heads=9,
    num_kv_heads=3,
    head_dim=64,
    rms_norm_eps=1e-5,
    rope_theta=1e5,
    has_plain_rotary=True,
    tie_word_embeddings=True,
    context_length=8192,
    dtype="bfloat16",
    num_tokenizer_ids=49152,
    unk_token_id=0,
    pad_token_id=2,
    bos_token_ids=(1,),
    eos_token_ids=(2,),
)


def test_config_takes_the_target_sizes_and_spreads_the_hooked_layers():
    config = new_drafter_config(TARGET, num_layers=2, block_size=8)
    assert (config.hidden_size, config.intermediate_size, config.vocab_size) == (576, 1536, 49152)
    assert (config.num_heads, config.num_kv_heads, config.head_dim) == (9, 3, 64)
    assert config.target_layer_ids == (1, 8, 14, 20, 27)
    assert (config.rope_theta, config.max_position_embeddings, config.mask_token_id) == (1e5, 8192, 0)


@pytest.mark.parametrize("change", [{"has_plain_rotary": False}, {"head_dim": 256}])
def test_heads_are_not_inherited_from_partial_rotation_or_wide_heads(change):
    target = dataclasses.replace(TARGET, hidden_size=5120, num_heads=24, num_kv_heads=4, **change)
    config = new_drafter_config(target)
    assert (config.num_heads, config.num_kv_heads, config.head_dim) == (40, 8, 128)


def test_mask_id_is_the_first_row_beyond_the_tokenizer():
    target = dataclasses.replace(TARGET, vocab_size=151936, num_tokenizer_ids=151669)
    assert choose_mask_token_id(target) == 151669


def test_mask_id_without_a_free_row_is_the_unknown_then_the_padding_token():
    assert choose_mask_token_id(TARGET) == 0
    assert choose_mask_token_id(dataclasses.replace(TARGET, unk_token_id=None, pad_token_id=5)) == 5


def test_mask_id_is_never_a_token_that_begins_or_ends_text():
    with pytest.raises(ConfigError, match="mask_token_id must be given"):
        choose_mask_token_id(dataclasses.replace(TARGET, unk_token_id=1, pad_token_id=2))


def test_explicit_mask_id_wins_and_is_bounded_by_the_vocabulary():
    assert new_drafter_config(TARGET, mask_token_id=17).mask_token_id == 17
    with pytest.raises(ConfigError, match=r"mask_token_id must be in 0\.\.49151"):
        new_drafter_config(TARGET, mask_token_id=49152)


def test_layers_beyond_the_target_are_refused():
    with pytest.raises(ConfigError, match="target_layer_ids"):
        new_drafter_config(TARGET, target_layer_ids=(1, 29))


def test_same_seed_same_weights_other_seed_other_weights():
    one, same, other = (initialize(tiny_config(), seed=seed) for seed in (0, 0, 1))
    for name, tensor in one.state_dict().items():
        assert torch.equal(tensor, same.state_dict()[name])
    assert not torch.equal(one.fc.weight, other.fc.weight)
    assert abs(float(one.fc.weight.detach().std()) - 0.02) < 0.002
    assert torch.equal(one.hidden_norm.weight, torch.ones_like(one.hidden_norm.weight))
    assert torch.equal(one.norm.weight, torch.full_like(one.norm.weight, 0.3))


def test_warm_start_gives_the_weights_of_the_folder_and_checks_the_target(tmp_path):
    config = tiny_config()
    tensors = export_tensors(tiny_drafter(config, seed=5), config)
    save_checkpoint(tmp_path / "v", config, tensors, training=TrainingInfo(number=1))
    drafter = warm_start(tmp_path / "v")
    assert drafter.config == config
    assert all(torch.equal(tensor, tensors[name]) for name, tensor in drafter.state_dict().items())
    with pytest.raises(ConfigError, match="hidden_size"):
        warm_start(tmp_path / "v", target=TARGET)
