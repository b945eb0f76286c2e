"""Conversion between checkpoint layouts keeps every tensor byte and every config field."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import sliding_config, tiny_config, tiny_drafter, write_target_folder

from dflash_online.drafter.checkpoint import TrainingInfo, export_tensors, load_checkpoint, save_checkpoint
from dflash_online.drafter.convert import convert_checkpoint
from dflash_online.drafter.speculators import Layout, Verifier
from dflash_online.errors import CheckpointError, ConfigError, UnsupportedCheckpointError

INFO = TrainingInfo(number=7, step=120, recipe={"name": "zlab"}, parent_version="6-0123456789ab")
NAMED = {"name_or_path": "Qwen/Qwen3-8B", "architectures": ["Qwen3ForCausalLM"]}


def saved(path: Path, config=None, training=INFO) -> Path:
    config = config or tiny_config(dtype="bfloat16")
    save_checkpoint(path, config, export_tensors(tiny_drafter(config), config), training=training)
    return path


def files_of(path: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in path.iterdir()}


def edit(path: Path, **changes: object) -> Path:
    """Change fields of a config.json; None takes one out."""
    fields = json.loads((path / "config.json").read_text()) | changes
    kept = {name: value for name, value in fields.items() if value is not None}
    (path / "config.json").write_text(json.dumps(kept))
    return path


def as_speculators_writes(path: Path, tmp_path: Path, **changes: object) -> Path:
    """A published speculators folder, which does not say how many layers the target has."""
    own = saved(tmp_path / "plain", training=None)
    convert_checkpoint(own, path, Layout.SPECULATORS)
    return edit(path, **({"num_target_layers": None} | changes))


@pytest.mark.parametrize("training", [INFO, None])
@pytest.mark.parametrize(
    "config",
    [tiny_config(dtype="bfloat16"), sliding_config(3), tiny_config(attention_bias=True, rope_theta=1e7)],
)
def test_there_and_back_every_file_is_the_same(tmp_path, config, training):
    own = saved(tmp_path / "own", config, training)
    convert_checkpoint(own, tmp_path / "theirs", Layout.SPECULATORS)
    convert_checkpoint(tmp_path / "theirs", tmp_path / "back", Layout.ZLAB)
    assert files_of(tmp_path / "back") == files_of(own)
    assert (tmp_path / "theirs/model.safetensors").read_bytes() == (own / "model.safetensors").read_bytes()
    assert load_checkpoint(tmp_path / "back").config == config
    assert load_checkpoint(tmp_path / "back").version == load_checkpoint(own).version


def test_from_the_other_side_too_the_named_target_included(tmp_path):
    own = saved(tmp_path / "own")
    convert_checkpoint(own, tmp_path / "theirs", Layout.SPECULATORS, verifier="Qwen/Qwen3-8B")
    edit(tmp_path / "theirs", speculators_config={"verifier": NAMED})
    done = convert_checkpoint(tmp_path / "theirs", tmp_path / "ours", Layout.ZLAB)
    assert done.verifier == Verifier("Qwen/Qwen3-8B", ("Qwen3ForCausalLM",))
    assert json.loads((tmp_path / "ours/config.json").read_text())["verifier"] == NAMED
    convert_checkpoint(tmp_path / "ours", tmp_path / "again", Layout.SPECULATORS)
    fields = json.loads((tmp_path / "again/config.json").read_text())
    assert fields["speculators_config"]["verifier"] == NAMED
    assert files_of(tmp_path / "again")["model.safetensors"] == files_of(own)["model.safetensors"]


def test_hooked_layers_are_counted_from_the_embedding_there(tmp_path):
    convert_checkpoint(saved(tmp_path / "own"), tmp_path / "theirs", Layout.SPECULATORS)
    fields = json.loads((tmp_path / "theirs/config.json").read_text())
    assert tiny_config().target_layer_ids == (1, 5)
    assert fields["aux_hidden_state_layer_ids"] == [2, 6]
    assert fields["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == 3
    assert fields["draft_vocab_size"] == fields["transformer_layer_config"]["vocab_size"] == 37
    assert "dflash_config" not in fields
    assert "target_layer_ids" not in fields["transformer_layer_config"]


def test_a_speculators_folder_needs_the_targets_number_of_layers(tmp_path):
    theirs = as_speculators_writes(tmp_path / "theirs", tmp_path)
    with pytest.raises(CheckpointError, match="number of layers is not in this layout"):
        convert_checkpoint(theirs, tmp_path / "ours", Layout.ZLAB)
    target = write_target_folder(tmp_path / "target", {"x": torch.ones(1)})
    done = convert_checkpoint(theirs, tmp_path / "ours", Layout.ZLAB, target=target)
    assert load_checkpoint(tmp_path / "ours").config == tiny_config(dtype="bfloat16")
    assert done.verifier.name_or_path == str(target)


def test_copies_of_the_targets_tensors_are_left_out_and_named(tmp_path):
    theirs = as_speculators_writes(tmp_path / "theirs", tmp_path, num_target_layers=9)
    tensors = load_file(theirs / "model.safetensors")
    save_file(tensors | {"lm_head.weight": torch.ones(37, 24)}, theirs / "model.safetensors")
    assert convert_checkpoint(theirs, tmp_path / "ours", Layout.ZLAB).left_out == ("lm_head.weight",)
    assert load_checkpoint(tmp_path / "ours").tensors.keys() == tensors.keys()


def test_published_spellings_become_plain_ones(tmp_path):
    own = saved(tmp_path / "own", training=None)
    tensors = load_file(own / "model.safetensors")
    save_file({f"model.{name}": tensor for name, tensor in tensors.items()}, own / "model.safetensors")
    convert_checkpoint(own, tmp_path / "plain", Layout.ZLAB)
    assert load_file(tmp_path / "plain/model.safetensors").keys() == tensors.keys()


def test_an_existing_folder_and_a_target_that_does_not_fit_are_refused(tmp_path):
    own = saved(tmp_path / "own")
    (tmp_path / "there").mkdir()
    with pytest.raises(CheckpointError, match="exists already"):
        convert_checkpoint(own, tmp_path / "there", Layout.SPECULATORS)
    target = write_target_folder(tmp_path / "target", {"x": torch.ones(1)}, hidden_size=64)
    with pytest.raises(ConfigError, match="drafter hidden_size must be the target's 64, got 24"):
        convert_checkpoint(own, tmp_path / "new", Layout.SPECULATORS, target=target)
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"speculators_model_type": "dflash2"}, "DFlash2: speculators_model_type = dflash2"),
        ({"speculators_model_type": "dspark"}, "DSpark: speculators_model_type = dspark"),
        ({"speculators_model_type": "eagle3"}, "another speculator: speculators_model_type = eagle3"),
        ({"sample_from_anchor": True}, "drafts at its anchor too: sample_from_anchor = True"),
        ({"draft_vocab_size": 16}, "reduced vocabulary: draft_vocab_size = 16 of 37"),
        ({"target_hidden_size": 64}, "hidden_size 24 for a target of 64"),
    ],
)
def test_what_plain_dflash_does_not_do_is_refused_by_name(tmp_path, changes, message):
    theirs = as_speculators_writes(tmp_path / "theirs", tmp_path, num_target_layers=9, **changes)
    with pytest.raises(UnsupportedCheckpointError, match=message):
        convert_checkpoint(theirs, tmp_path / "ours", Layout.ZLAB)
    assert not (tmp_path / "ours").exists()


def test_bidirectional_sliding_layers_are_refused_and_mean_nothing_without_sliding_layers(tmp_path):
    for name, config in (("full", tiny_config()), ("sliding", sliding_config(3))):
        convert_checkpoint(saved(tmp_path / name, config), tmp_path / f"{name}-there", Layout.SPECULATORS)
        edit(tmp_path / f"{name}-there", sliding_window_non_causal=True)
    convert_checkpoint(tmp_path / "full-there", tmp_path / "ours", Layout.ZLAB)
    with pytest.raises(UnsupportedCheckpointError, match="sliding_window_non_causal"):
        convert_checkpoint(tmp_path / "sliding-there", tmp_path / "other", Layout.ZLAB)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        (
            {"aux_hidden_state_layer_ids": [0, 6]},
            ConfigError,
            r"aux_hidden_state_layer_ids must be >= 1 each",
        ),
        ({"aux_hidden_state_layer_ids": [2, 9]}, ConfigError, r"target_layer_ids must be in 0\.\.7"),
        ({"aux_hidden_state_layer_ids": "2, 6"}, CheckpointError, "must be a list of integers, got '2, 6'"),
        ({"mask_token_id": None}, CheckpointError, "mask_token_id must be an integer, got None"),
        ({"block_size": None}, CheckpointError, "block_size must be an integer, got None"),
        (
            {"transformer_layer_config": 3},
            CheckpointError,
            "transformer_layer_config must be an object, got 3",
        ),
        (
            {"speculators_config": {"verifier": {"name_or_path": 3}}},
            CheckpointError,
            "name_or_path must be a",
        ),
    ],
)
def test_a_bad_field_is_named_with_its_value(tmp_path, changes, error, message):
    theirs = as_speculators_writes(tmp_path / "theirs", tmp_path, num_target_layers=9, **changes)
    with pytest.raises(error, match=message):
        convert_checkpoint(theirs, tmp_path / "ours", Layout.ZLAB)


def test_other_commands_say_how_to_convert(tmp_path):
    theirs = as_speculators_writes(tmp_path / "theirs", tmp_path)
    with pytest.raises(UnsupportedCheckpointError, match=r"drafter convert .*theirs FOLDER --to zlab"):
        load_checkpoint(theirs)


@pytest.mark.parametrize("layout", list(Layout))
def test_a_drafter_that_no_server_can_run_is_not_exported(tmp_path, layout):
    own = saved(tmp_path / "own", tiny_config(fc_layers="all_but_last"))
    with pytest.raises(UnsupportedCheckpointError, match="fc_layers = all_but_last: servers feed every"):
        convert_checkpoint(own, tmp_path / "there", layout)
    assert not (tmp_path / "there").exists()
