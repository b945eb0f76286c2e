"""Checkpoints: bit-exact round trip, all or nothing, and every bad folder refused by name."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import sliding_config, tiny_config, tiny_drafter, write_target_folder

from dflash_online.drafter.checkpoint import (
    DrafterVersion,
    TrainingInfo,
    check_against_target,
    export_tensors,
    load_checkpoint,
    save_checkpoint,
    weights_digest,
)
from dflash_online.errors import (
    CheckpointError,
    ConfigError,
    IncompleteCheckpointError,
    TensorMismatchError,
    UnsupportedCheckpointError,
)
from dflash_online.target.model_info import TargetModelInfo

INFO = TrainingInfo(
    number=7,
    step=120,
    recipe={"name": "zlab", "gamma": None},
    cursor=33,
    parent_version="6-0123456789ab",
    gate={"tau": 1.5},
    target={"path": "tiny", "revision": "", "weight_checksum": "00"},
    tokens_seen=4096,
)


def tiny_tensors(config=None):
    config = config or tiny_config(dtype="bfloat16")
    return config, export_tensors(tiny_drafter(config), config)


def saved(path: Path, config=None) -> Path:
    config, tensors = tiny_tensors(config)
    save_checkpoint(path, config, tensors, training=INFO)
    return path


def child_environment() -> dict[str, str]:
    return os.environ | {"PYTHONPATH": str(Path(__file__).parents[1])}


@pytest.mark.parametrize(
    "config", [tiny_config(dtype="bfloat16"), sliding_config(3), tiny_config(attention_bias=True)]
)
def test_round_trip_is_bit_exact(tmp_path, config):
    config, tensors = tiny_tensors(config)
    version = save_checkpoint(tmp_path / "runs" / "v7", config, tensors, training=INFO)
    loaded = load_checkpoint(tmp_path / "runs" / "v7")
    assert loaded.config == config
    assert loaded.training == INFO
    assert loaded.version == version == DrafterVersion(7, weights_digest(tensors)[:12])
    assert loaded.tensors.keys() == tensors.keys()
    assert all(
        torch.equal(loaded.tensors[n], t) and loaded.tensors[n].dtype == t.dtype for n, t in tensors.items()
    )
    assert [p.name for p in (tmp_path / "runs").iterdir()] == ["v7"]
    assert (tmp_path / "runs/v7/COMPLETE").read_text().strip() == str(version)


def test_config_json_says_what_its_readers_look_for(tmp_path):
    fields = json.loads((saved(tmp_path / "v", sliding_config(3)) / "config.json").read_text())
    assert fields["architectures"] == ["DFlashDraftModel"]
    assert fields["model_type"] == "qwen3"
    expected = {"block_size": 4, "mask_token_id": 36, "num_target_layers": 9, "target_layer_ids": [1, 5]}
    assert fields["dflash_config"] == expected
    assert (fields["block_size"], fields["num_target_layers"]) == (4, 9)
    assert fields["rope_theta"] == fields["rope_parameters"]["rope_theta"] == 1e4
    assert fields["use_sliding_window"] is True
    assert fields["sliding_window"] == 3
    assert fields["layer_types"] == ["sliding_attention", "full_attention"]


def test_an_existing_folder_is_never_overwritten(tmp_path):
    folder = saved(tmp_path / "v")
    before = (folder / "model.safetensors").read_bytes()
    with pytest.raises(CheckpointError, match="exists already"):
        saved(folder)
    assert (folder / "model.safetensors").read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["v"]


def test_a_writer_killed_half_way_leaves_no_checkpoint_and_no_half_one_is_loaded(tmp_path):
    # The process ends, as if by kill -9, when it opens the completion marker.
    script = textwrap.dedent("""
        import os, sys
        from pathlib import Path
        import dflash_online.drafter.checkpoint as checkpoint
        from tiny_models import tiny_config, tiny_drafter
        config = tiny_config()
        tensors = checkpoint.export_tensors(tiny_drafter(config), config)
        def die_at_marker(event, args):
            if event == "open" and str(args[0]).endswith("COMPLETE"):
                os._exit(9)  # no finally, no except
        sys.addaudithook(die_at_marker)
        info = checkpoint.TrainingInfo(number=1)
        checkpoint.save_checkpoint(Path(sys.argv[1]), config, tensors, training=info)
    """)
    run = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path / "v")], env=child_environment(), timeout=120, check=False
    )
    assert run.returncode == 9
    assert not (tmp_path / "v").exists()
    (scratch,) = tmp_path.iterdir()
    assert (scratch / "model.safetensors").is_file()
    with pytest.raises(IncompleteCheckpointError, match="COMPLETE is missing"):
        load_checkpoint(scratch)


def test_a_full_disk_is_named_and_leaves_nothing_behind(tmp_path):
    script = textwrap.dedent("""
        import resource, sys
        from pathlib import Path
        from dflash_online.drafter.checkpoint import TrainingInfo, export_tensors, save_checkpoint
        from dflash_online.errors import CheckpointError
        from tiny_models import tiny_config, tiny_drafter
        config = tiny_config()
        tensors = export_tensors(tiny_drafter(config), config)
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))  # below the weights, above the JSON
        try:
            save_checkpoint(Path(sys.argv[1]), config, tensors, training=TrainingInfo(number=1))
        except CheckpointError as error:
            sys.exit(str(error))
    """)
    run = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path / "runs" / "v")],
        env=child_environment(),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert run.returncode == 1, run.stderr
    assert f"drafter checkpoint {tmp_path / 'runs' / 'v'}: cannot be written" in run.stderr
    assert "File too large" in run.stderr
    assert list((tmp_path / "runs").iterdir()) == []


@pytest.mark.parametrize("lost", ["COMPLETE", "training.json", "config.json", "model.safetensors"])
def test_a_folder_that_lacks_a_file_does_not_exist(tmp_path, lost):
    folder = saved(tmp_path / "v")
    (folder / lost).unlink()
    with pytest.raises(IncompleteCheckpointError, match=f"{lost} is missing"):
        load_checkpoint(folder)


def test_a_missing_folder_is_named(tmp_path):
    with pytest.raises(IncompleteCheckpointError, match=r"nowhere: no such folder"):
        load_checkpoint(tmp_path / "nowhere")


def test_weights_changed_after_the_marker_are_refused(tmp_path):
    folder = saved(tmp_path / "v")
    tensors = load_file(folder / "model.safetensors")
    tensors["norm.weight"] = tensors["norm.weight"] + 1
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match="the completion marker says 7-"):
        load_checkpoint(folder)


@pytest.mark.parametrize("text", ["{", "[]", '{"number": 1, "colour": "red"}'])
def test_broken_training_json_is_refused(tmp_path, text):
    folder = saved(tmp_path / "v")
    (folder / "training.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"training\.json"):
        load_checkpoint(folder)


def test_published_folder_without_our_files_loads_as_number_zero(tmp_path):
    folder = saved(tmp_path / "v")
    (folder / "COMPLETE").unlink()
    (folder / "training.json").unlink()
    loaded = load_checkpoint(folder)
    assert loaded.training is None
    assert loaded.version == DrafterVersion(0, weights_digest(loaded.tensors)[:12])


def test_published_spellings_of_names_and_shards_are_understood(tmp_path):
    config, tensors = tiny_tensors()
    folder = saved(tmp_path / "v")
    for name in ("COMPLETE", "training.json", "model.safetensors"):
        (folder / name).unlink()
    aliases = {"fc.weight": "encoder.fc.weight", "hidden_norm.weight": "encoder.output_norm_enc.weight"}
    renamed = {aliases.get(name, f"model.{name}"): tensor for name, tensor in tensors.items()}
    names = sorted(renamed)
    shards = {"a.safetensors": names[:5], "b.safetensors": names[5:]}
    for file, part in shards.items():
        save_file({name: renamed[name] for name in part}, folder / file)
    weight_map = {name: file for file, part in shards.items() for name in part}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    assert load_checkpoint(folder).version.digest == weights_digest(tensors)[:12]
    assert load_checkpoint(folder).config == config


@pytest.mark.parametrize(
    ("change", "kind", "message"),
    [
        (lambda t: t.pop("norm.weight"), "missing", "norm.weight"),
        (lambda t: t.update(extra=torch.ones(2)), "unexpected", "extra"),
        (lambda t: t.update({"fc.weight": t["fc.weight"].T.contiguous()}), "wrong", r"shape \[48, 24\]"),
        (
            lambda t: t.update({"norm.weight": t["norm.weight"].float()}),
            "wrong",
            "is torch.float32, not torch.bf",
        ),
        (lambda t: t["norm.weight"].fill_(float("nan")), "wrong", r"norm.weight is not finite: nan at \[0\]"),
        (
            lambda t: t["fc.weight"][1, 3].fill_(float("inf")),
            "wrong",
            r"fc.weight is not finite: inf at \[1, 3\]",
        ),
    ],
)
def test_wrong_tensors_are_neither_written_nor_loaded(tmp_path, change, kind, message):
    config, tensors = tiny_tensors()
    folder = saved(tmp_path / "good")
    change(tensors)
    with pytest.raises(TensorMismatchError, match=message) as caught:
        save_checkpoint(tmp_path / "bad", config, tensors, training=INFO)
    assert len(getattr(caught.value, kind)) == 1
    assert not (tmp_path / "bad").exists()
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(TensorMismatchError, match=message):
        load_checkpoint(folder)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"architectures": ["DFlash2DraftModel"]}, "DFlash2DraftModel"),
        ({"dflash_config": {"conv_kernel_size": 4, "conv_group_size": 8}}, "DFlash2"),
        ({"dflash_config": {"selector_rank": 256, "selector_top_k": 16}}, "DFlash2"),
        ({"dflash_config": {"projector_type": "domino"}}, "Domino: projector_type = domino"),
        ({"dflash_config": {"markov_rank": 8}}, r"DSpark \(Markov head\): markov_rank = 8"),
        ({"dflash_config": {"projector_type": "dspark"}}, "DSpark: projector_type = dspark"),
        (
            {"architectures": ["DSparkDraftModel"]},
            "DSpark: architecture DSparkDraftModel, not DFlashDraftModel",
        ),
        ({"architectures": ["DominoDraftModel"]}, "Domino: architecture DominoDraftModel"),
        ({"architectures": ["DFlashLagunaForCausalLM"]}, "DFlash for Laguna: architecture"),
        ({"architectures": ["LlamaForCausalLM"]}, ": architecture LlamaForCausalLM, not DFlashDraftModel"),
        ({"draft_vocab_size": 16}, "reduced vocabulary: draft_vocab_size = 16 of 37"),
        ({"hidden_act": "gelu"}, "hidden_act = gelu, not silu"),
        ({"speculators_model_type": "dflash"}, "speculators"),
        ({"dflash_config": {"final_logit_softcapping": 30.0}}, "soft-capped"),
        ({"dflash_config": {"output_multiplier": 2.0}}, "output_multiplier = 2.0"),
        ({"rope_parameters": {"rope_theta": 1e6, "partial_rotary_factor": 0.25}}, "rotary"),
        ({"rope_parameters": {"rope_theta": 1e6, "rope_type": "llama3"}}, "rotary"),
        ({"rope_parameters": {"rope_theta": 1e6, "rope_type": "yarn", "mscale": 0.7}}, "rotary"),
        ({"is_causal": True}, "is_causal = True"),
        ({"layer_types": ["sliding_attention"] * 2, "sliding_window": 4}, "use_sliding_window"),
    ],
)
def test_other_families_are_refused_by_name(tmp_path, fields, message):
    folder = saved(tmp_path / "v")
    config = json.loads((folder / "config.json").read_text())
    nested = config["dflash_config"] | fields.pop("dflash_config", {})
    (folder / "config.json").write_text(json.dumps(config | fields | {"dflash_config": nested}))
    with pytest.raises(UnsupportedCheckpointError, match=message):
        load_checkpoint(folder)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "layers.0.attention_conv.base_kernel",
            r"DFlash2 \(grouped convolutions\): tensor layers.0.attention",
        ),
        ("candidate_selector.hidden_projection.weight", r"DFlash2 \(candidate selector\)"),
        ("prefix_gru.weight_ih_l0", "Domino"),
        ("model.embed_proj.0.weight", "Domino"),
        ("markov_head.markov_w1.weight", "DSpark"),
        ("confidence_head.proj.weight", "DSpark"),
    ],
)
def test_other_families_are_known_by_their_tensors_when_the_config_says_nothing(tmp_path, name, message):
    folder = saved(tmp_path / "v")
    tensors = load_file(folder / "model.safetensors") | {name: torch.ones(2, dtype=torch.bfloat16)}
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(UnsupportedCheckpointError, match=message):
        load_checkpoint(folder)


def test_a_mask_embedding_of_its_own_is_refused(tmp_path):
    folder = saved(tmp_path / "v")
    (folder / "mask_embedding.pt").write_bytes(b"")
    with pytest.raises(UnsupportedCheckpointError, match=r"mask embedding of its own: mask_embedding\.pt"):
        load_checkpoint(folder)


@pytest.mark.parametrize("dtype", ["int8", "no_such_type", "nn"])
def test_a_config_whose_type_is_no_floating_type_is_refused(tmp_path, dtype):
    folder = saved(tmp_path / "v")
    fields = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(fields | {"dtype": dtype}))
    with pytest.raises(TensorMismatchError, match=f"dtype '{dtype}' is no floating type"):
        load_checkpoint(folder)


def test_a_config_of_another_hidden_size_names_tensor_shape_and_bound(tmp_path):
    folder = saved(tmp_path / "v")
    fields = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(fields | {"hidden_size": 32}))
    with pytest.raises(
        TensorMismatchError, match=r"fc.weight has shape \[24, 48\], not \[32, 64\]"
    ) as caught:
        load_checkpoint(folder)
    assert len(caught.value.wrong) == 3 + 2 * 9
    assert not caught.value.missing


@pytest.mark.parametrize("size", [0, 4, 100, -1])
def test_weights_cut_short_anywhere_are_refused(tmp_path, size):
    folder = saved(tmp_path / "v")
    data = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(data[:size])
    with pytest.raises(CheckpointError, match="weights cannot be read"):
        load_checkpoint(folder)


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ("{", "weights cannot be read"),
        ("{}", "weight_map"),
        ('{"weight_map": []}', "weight_map must map names to file names"),
        ('{"weight_map": {"fc.weight": "lost.safetensors"}}', "lost.safetensors"),
        ('{"weight_map": {"gc.weight": "model.safetensors"}}', "gc.weight"),
    ],
)
def test_a_broken_index_of_shards_is_refused(tmp_path, index, message):
    folder = saved(tmp_path / "v")
    (folder / "model.safetensors.index.json").write_text(index)
    with pytest.raises(CheckpointError, match=message):
        load_checkpoint(folder)


def test_one_tensor_in_two_spellings_is_refused(tmp_path):
    folder = saved(tmp_path / "v")
    tensors = load_file(folder / "model.safetensors")
    save_file(tensors | {"encoder.fc.weight": tensors["fc.weight"].clone()}, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"fc\.weight is there twice"):
        load_checkpoint(folder)


@pytest.mark.parametrize("name", ["config.json", "training.json", "COMPLETE"])
def test_a_file_that_is_no_text_is_refused_by_name(tmp_path, name):
    folder = saved(tmp_path / "v")
    (folder / name).write_bytes(b"\xff\xfe")
    with pytest.raises(CheckpointError, match=f"{name} cannot be read"):
        load_checkpoint(folder)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_size": 64}, "drafter hidden_size must be the target's 64, got 24"),
        ({"num_hidden_layers": 6}, r"drafter target_layer_ids must be in 0..4 \(the target has 6 layers\)"),
        ({"vocab_size": 36}, r"drafter mask_token_id must be in 0..35 .*got 36"),
    ],
)
def test_a_drafter_that_does_not_fit_the_target_is_refused(tmp_path, change, message):
    target = write_target_folder(tmp_path, {"x": torch.ones(1)}, **change)
    with pytest.raises(ConfigError, match=message):
        check_against_target(tiny_config(), TargetModelInfo.from_folder(target))


def test_version_reads_back_and_refuses_other_text():
    version = DrafterVersion(7, "ab12cd34ef56")
    assert str(version) == "7-ab12cd34ef56"
    assert DrafterVersion.parse(str(version)) == version
    for text in ("none", "7", "7-AB12CD34EF56", "7-ab12cd34ef5", "-1-ab12cd34ef56", "7-ab12cd34ef56\n"):
        with pytest.raises(ConfigError, match="drafter_version"):
            DrafterVersion.parse(text)


def test_digest_depends_on_names_types_shapes_and_bytes_but_not_on_order():
    tensors = {"a": torch.arange(4.0), "b": torch.ones(2, dtype=torch.bfloat16)}
    digest = weights_digest(tensors)
    assert digest == weights_digest(dict(reversed(tensors.items())))
    others = [
        tensors | {"a": torch.arange(4.0) + 1},
        tensors | {"a": torch.arange(4.0).view(2, 2)},
        tensors | {"b": torch.ones(2, dtype=torch.float16)},
        {"c": tensors["a"], "b": tensors["b"]},
    ]
    assert len({digest, *map(weights_digest, others)}) == 5
