"""`dflash-online drafter init` and `convert` as a user runs them."""

from __future__ import annotations

import json

import pytest
from tiny_models import tiny_config, tiny_drafter, write_target_folder

from dflash_online.cli import main
from dflash_online.drafter.checkpoint import TrainingInfo, export_tensors, load_checkpoint, save_checkpoint


def run(capsys, *arguments: object) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as ended:
        main([str(argument) for argument in arguments])
    captured = capsys.readouterr()
    return ended.value.code, captured.out, captured.err


@pytest.fixture
def folders(tmp_path):
    """A target, and a drafter of three layers for it."""
    target = write_target_folder(tmp_path / "target", {}, unk_token_id=36, architectures=["TinyForCausalLM"])
    config = tiny_config(num_layers=3, layer_types=(), dtype="bfloat16")
    tensors = export_tensors(tiny_drafter(config), config)
    save_checkpoint(tmp_path / "drafter", config, tensors, training=TrainingInfo(number=4))
    return target, tmp_path / "drafter"


@pytest.mark.parametrize(("layers", "expected"), [((), 3), (("--layers", 2), 2), (("--layers", 4), 4)])
def test_a_warm_start_keeps_its_own_number_of_layers_unless_told_otherwise(
    capsys, tmp_path, folders, layers, expected
):
    target, drafter = folders
    to = tmp_path / "new"
    code, out, _ = run(
        capsys, "drafter", "init", "--target", target, "--to", to, "--warm-start", drafter, *layers, "--json"
    )
    assert (code, json.loads(out)["num_layers"]) == (0, expected)
    assert load_checkpoint(to).config.num_layers == expected


def test_a_fresh_drafter_has_two_layers_unless_told_otherwise(capsys, tmp_path, folders):
    to = tmp_path / "new"
    code, _, err = run(capsys, "drafter", "init", "--target", folders[0], "--to", to, "--features", 2)
    assert (code, err) == (0, "")
    assert load_checkpoint(to).config.num_layers == 2


def test_convert_says_what_it_wrote_and_refuses_to_overwrite(capsys, tmp_path, folders):
    target, drafter = folders
    there = tmp_path / "there"
    command = ("drafter", "convert", drafter, there, "--to", "speculators")
    code, out, err = run(capsys, *command, "--target", target)
    version = load_checkpoint(drafter).version
    assert (code, err) == (0, "")
    assert out.startswith(
        f"drafter {version} is in {there}: zlab to speculators, 36 tensors, 0.0 MB; verifier: "
    )
    named = json.loads((there / "config.json").read_text())["speculators_config"]["verifier"]
    assert named == {"name_or_path": str(target), "architectures": ["TinyForCausalLM"]}
    code, out, err = run(capsys, *command)
    assert (code, out) == (2, "")
    assert (
        err
        == f"dflash-online: drafter checkpoint {there}: exists already; checkpoints are never overwritten\n"
    )


def test_convert_ends_with_one_json_line(capsys, tmp_path, folders):
    _, drafter = folders
    there, back = tmp_path / "there", tmp_path / "back"
    code, out, _ = run(capsys, "drafter", "convert", drafter, there, "--to", "speculators", "--json")
    assert code == 0
    assert json.loads(out) == {
        "path": str(there),
        "from": "zlab",
        "to": "speculators",
        "version": str(load_checkpoint(drafter).version),
        "num_tensors": 36,
        "num_bytes": sum(tensor.nbytes for tensor in load_checkpoint(drafter).tensors.values()),
        "verifier": None,
        "left_out": [],
    }
    assert run(capsys, "drafter", "convert", there, back, "--to", "zlab")[0] == 0
    assert load_checkpoint(back).version == load_checkpoint(drafter).version


def test_convert_refuses_an_unknown_layout_and_a_missing_folder(capsys, tmp_path):
    code, _, err = run(capsys, "drafter", "convert", tmp_path / "a", tmp_path / "b", "--to", "gguf")
    assert code == 2
    assert "speculators" in err
    code, _, err = run(capsys, "drafter", "convert", tmp_path / "a", tmp_path / "b", "--to", "zlab")
    assert (code, err) == (2, f"dflash-online: drafter checkpoint {tmp_path / 'a'}: no such folder\n")
