"""What is read from a target's small files, plain and nested, and what is refused."""

from __future__ import annotations

import json

import pytest
import torch
from tiny_models import write_target_folder

from dflash_online.errors import ConfigError
from dflash_online.target.model_info import TargetModelInfo


def folder_with(tmp_path, **changes):
    return write_target_folder(tmp_path, {"x": torch.ones(1)}, **changes)


def test_plain_config_is_read(tmp_path):
    info = TargetModelInfo.from_folder(folder_with(tmp_path))
    assert (info.hidden_size, info.num_layers, info.num_heads, info.num_kv_heads, info.head_dim) == (
        24,
        9,
        4,
        2,
        10,
    )
    assert (info.rms_norm_eps, info.rope_theta, info.context_length) == (1e-5, 1e4, 128)
    assert info.has_plain_rotary
    assert info.num_tokenizer_ids is None


@pytest.mark.parametrize(
    ("rope", "theta", "is_plain"),
    [
        ({"rope_theta": 7e6, "rope_type": "default"}, 7e6, True),
        ({"full_attention": {"rope_theta": 1e7}, "sliding_attention": {"rope_theta": 1e4}}, 1e7, True),
        ({"rope_theta": 1e7, "partial_rotary_factor": 0.25}, 1e7, False),
        ({"rope_theta": 1e7, "mrope_section": [11, 11, 10]}, 1e7, False),
    ],
)
def test_rotary_settings_of_newer_files(tmp_path, rope, theta, is_plain):
    info = TargetModelInfo.from_folder(folder_with(tmp_path, rope_parameters=rope))
    assert (info.rope_theta, info.has_plain_rotary) == (theta, is_plain)


def test_special_ids_come_from_config_and_tokenizer(tmp_path):
    folder = folder_with(tmp_path, bos_token_id=1, eos_token_id=[2, 3], pad_token_id=2)
    vocabulary = {"a": 0, "b": 1, "c": 2, "d": 3}
    tokenizer = {"model": {"vocab": vocabulary}, "added_tokens": [{"content": "<unk>", "id": 9}]}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    (folder / "tokenizer_config.json").write_text(json.dumps({"unk_token": {"content": "<unk>"}}))
    info = TargetModelInfo.from_folder(folder)
    assert (info.num_tokenizer_ids, info.unk_token_id, info.pad_token_id) == (10, 9, 2)
    assert (info.bos_token_ids, info.eos_token_ids) == ((1,), (2, 3))


def test_unigram_vocabulary_counts_by_place(tmp_path):
    folder = folder_with(tmp_path)
    (folder / "tokenizer.json").write_text(json.dumps({"model": {"vocab": [["<unk>", 0.0], ["a", -1.0]]}}))
    assert TargetModelInfo.from_folder(folder).num_tokenizer_ids == 2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_size": None}, "target config.json hidden_size must be an integer >= 1, got None"),
        ({"vocab_size": "many"}, "vocab_size"),
        ({"num_hidden_layers": 0}, "num_hidden_layers"),
        ({"rms_norm_eps": "small"}, "rms_norm_eps must be a number"),
    ],
)
def test_a_malformed_field_is_named(tmp_path, change, message):
    with pytest.raises(ConfigError, match=message):
        TargetModelInfo.from_folder(folder_with(tmp_path, **change))


@pytest.mark.parametrize("text", [None, "{", "[1]"])
def test_a_folder_without_a_readable_config_is_named(tmp_path, text):
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(ConfigError, match=r"config\.json"):
        TargetModelInfo.from_folder(tmp_path)
