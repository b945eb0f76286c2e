"""Embedding, head and final norm found in every folder layout, without the rest of the target."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import save_file
from tiny_models import HIDDEN, VOCAB, write_target_folder

from dflash_online.errors import ConfigError
from dflash_online.target.frozen import FrozenHead, fastest_dtype


def target_tensors(prefix: str = "model.", head: str | None = "lm_head.weight") -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    tensors = {
        f"{prefix}embed_tokens.weight": torch.randn(VOCAB, HIDDEN, generator=generator).bfloat16(),
        f"{prefix}norm.weight": torch.randn(HIDDEN, generator=generator).bfloat16(),
        f"{prefix}layers.0.mlp.up_proj.weight": torch.randn(3, HIDDEN, generator=generator).bfloat16(),
    }
    if head:
        tensors[head] = torch.randn(VOCAB, HIDDEN, generator=generator).bfloat16()
    return tensors


def assert_holds(frozen: FrozenHead, tensors: dict[str, torch.Tensor], prefix: str, head: str) -> None:
    assert torch.equal(frozen.embedding_VH, tensors[f"{prefix}embed_tokens.weight"].float())
    assert torch.equal(frozen.final_norm_H, tensors[f"{prefix}norm.weight"].float())
    assert torch.equal(frozen.weight_VH, tensors[head].float())


@pytest.mark.parametrize(
    ("prefix", "head"),
    [
        ("model.", "lm_head.weight"),
        ("model.language_model.", "lm_head.weight"),
        ("language_model.model.", "language_model.lm_head.weight"),
    ],
)
def test_untied_head_is_found_under_every_known_prefix(tmp_path, prefix, head):
    tensors = target_tensors(prefix, head)
    frozen = FrozenHead.from_folder(write_target_folder(tmp_path, tensors))
    assert_holds(frozen, tensors, prefix, head)
    assert frozen.vocab_size == VOCAB
    assert frozen.eps == 1e-5


def test_tied_head_is_the_embedding_itself(tmp_path):
    tensors = target_tensors(head=None)
    frozen = FrozenHead.from_folder(write_target_folder(tmp_path, tensors, tie_word_embeddings=True))
    assert frozen.weight_VH is frozen.embedding_VH


def test_tied_in_the_config_wins_over_a_stored_head(tmp_path):
    frozen = FrozenHead.from_folder(write_target_folder(tmp_path, target_tensors(), tie_word_embeddings=True))
    assert frozen.weight_VH is frozen.embedding_VH


@pytest.mark.parametrize("head", [None, "lm_head.weight"])
def test_a_config_that_is_silent_on_tying_is_settled_by_the_stored_tensors(tmp_path, head):
    tensors = target_tensors(head=head)
    frozen = FrozenHead.from_folder(write_target_folder(tmp_path, tensors, tie_word_embeddings=None))
    assert (frozen.weight_VH is frozen.embedding_VH) == (head is None)


def test_nested_text_config_is_understood(tmp_path):
    tensors = target_tensors("model.language_model.")
    folder = write_target_folder(tmp_path, tensors)
    fields = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({"text_config": fields, "tie_word_embeddings": False}))
    assert_holds(FrozenHead.from_folder(folder), tensors, "model.language_model.", "lm_head.weight")


def test_sharded_folder_reads_only_the_shards_it_needs(tmp_path):
    tensors = target_tensors()
    folder = write_target_folder(tmp_path, {"unused": torch.ones(1)})
    (folder / "model.safetensors").unlink()
    shards = {
        "model-1.safetensors": ["model.embed_tokens.weight"],
        "model-2.safetensors": ["model.norm.weight", "lm_head.weight"],
    }
    for file, names in shards.items():
        save_file({name: tensors[name] for name in names}, folder / file)
    weight_map = {name: file for file, names in shards.items() for name in names}
    weight_map["model.layers.0.mlp.up_proj.weight"] = "model-3.safetensors"  # not there, and not needed
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    assert_holds(FrozenHead.from_folder(folder), tensors, "model.", "lm_head.weight")


def test_logits_and_embeddings_are_products_and_rows(tmp_path):
    frozen = FrozenHead.from_folder(write_target_folder(tmp_path, target_tensors()))
    hidden = torch.randn(2, 3, HIDDEN, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(frozen.logits(hidden), hidden @ frozen.weight_VH.T)
    assert torch.equal(frozen.embed(torch.tensor([[4, 5]])), frozen.embedding_VH[[4, 5]][None])
    low = FrozenHead.from_folder(tmp_path, dtype=torch.bfloat16)
    assert low.logits(hidden).dtype == torch.bfloat16


@pytest.mark.parametrize("lost", ["model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"])
def test_a_missing_tensor_is_named(tmp_path, lost):
    tensors = target_tensors()
    del tensors[lost]
    with pytest.raises(ConfigError, match=lost.removeprefix("model.")):
        FrozenHead.from_folder(write_target_folder(tmp_path, tensors))


def test_a_matrix_of_another_width_is_refused(tmp_path):
    tensors = target_tensors()
    with pytest.raises(ConfigError, match=rf"target embedding must be \[rows, {HIDDEN + 1}\]"):
        FrozenHead.from_folder(write_target_folder(tmp_path, tensors, hidden_size=HIDDEN + 1))


@pytest.mark.parametrize("name", ["model.embed_tokens.weight", "lm_head.weight"])
def test_a_quantized_matrix_is_refused_by_name_and_type(tmp_path, name):
    tensors = target_tensors()
    tensors[name] = torch.zeros(VOCAB, HIDDEN, dtype=torch.float8_e4m3fn)
    with pytest.raises(ConfigError, match=rf"target {name} dtype must be .*not quantized, got 'float8"):
        FrozenHead.from_folder(write_target_folder(tmp_path, tensors))


def test_a_head_whose_weight_is_packed_is_missing_by_name(tmp_path):
    tensors = target_tensors(head="lm_head.qweight")
    with pytest.raises(ConfigError, match=r"a folder with a tensor lm_head.weight"):
        FrozenHead.from_folder(write_target_folder(tmp_path, tensors))


def test_a_shard_of_the_vocabulary_is_refused_and_padding_is_kept(tmp_path):
    tensors = target_tensors()
    padded = FrozenHead.from_folder(write_target_folder(tmp_path / "padded", tensors, vocab_size=VOCAB - 5))
    assert padded.vocab_size == VOCAB
    tensors["lm_head.weight"] = tensors["lm_head.weight"][: VOCAB // 2].clone()
    with pytest.raises(ConfigError, match="target head must be whole: 37 rows or more, got 18"):
        FrozenHead.from_folder(write_target_folder(tmp_path / "shard", tensors))


def test_unreadable_weights_are_named(tmp_path):
    folder = write_target_folder(tmp_path, target_tensors())
    (folder / "model.safetensors").write_bytes(b"no tensors here")
    with pytest.raises(ConfigError, match="readable safetensors"):
        FrozenHead.from_folder(folder)


def test_fastest_dtype_is_one_of_two_on_cpu_and_bfloat16_on_gpu():
    assert fastest_dtype(64) in (torch.float32, torch.bfloat16)
    assert fastest_dtype(64, "cuda") == torch.bfloat16
