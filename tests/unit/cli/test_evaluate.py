"""`dflash-online eval` on real files: the figures are those of the library."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from tiny_models import HIDDEN, VOCAB, tiny_config, tiny_drafter, tiny_record, write_target_folder

from dflash_online.cli import main
from dflash_online.drafter.checkpoint import TrainingInfo, export_tensors, save_checkpoint
from dflash_online.evaluate.tau import evaluate_drafter
from dflash_online.target.frozen import FrozenHead
from dflash_online.wire.codec import encode_record
from tests.integration.fake_target import LAYER_IDS
from tests.integration.fake_target import write_target_folder as write_served_folder


@pytest.fixture
def folders(tmp_path: Path) -> dict[str, str]:
    """A drafter, its target and two records on disk."""
    config = tiny_config()
    tensors = export_tensors(tiny_drafter(config), config)
    save_checkpoint(tmp_path / "drafter", config, tensors, training=TrainingInfo(number=3))
    generator = torch.Generator().manual_seed(2)
    target = {
        "model.embed_tokens.weight": torch.randn(VOCAB, HIDDEN, generator=generator),
        "lm_head.weight": torch.randn(VOCAB, HIDDEN, generator=generator),
        "model.norm.weight": torch.ones(HIDDEN),
    }
    write_target_folder(tmp_path / "target", target)
    (tmp_path / "records").mkdir()
    for seed in (0, 1):
        record = tiny_record(20, ((6, 20),), seed=seed, record_id=f"r{seed}")
        (tmp_path / "records" / f"{seed}.rec").write_bytes(b"".join(map(bytes, encode_record(record))))
    return {name: str(tmp_path / name) for name in ("drafter", "target", "records")}


def run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert isinstance(ended.value.code, int)
    return ended.value.code


def options(folders: dict[str, str], *names: str) -> list[str]:
    return [text for name in names for text in (f"--{name}", folders[name])]


def test_eval_reports_what_the_library_measures(
    folders: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = options(folders, "drafter", "target", "records")
    assert run("eval", *arguments, "--nodes", "4,2", "--out", str(tmp_path / "out.json"), "--json") == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert json.loads((tmp_path / "out.json").read_text()) == result
    (found,) = result["drafters"]
    records = [tiny_record(20, ((6, 20),), seed=seed, record_id=f"r{seed}") for seed in (0, 1)]
    wanted = evaluate_drafter(tiny_drafter(), FrozenHead.from_folder(Path(folders["target"])), records)
    assert found["version"].startswith("3-")
    assert (found["num_records"], found["left_out"]) == (2, {})
    assert list(found["tau"]) == ["chain", "ddtree_nodes_2", "ddtree_nodes_4", "top8_oracle"]
    assert found["tau"]["chain"]["tau"] == pytest.approx(wanted.tau)
    assert found["tau"]["chain"]["histogram"] == list(wanted.histogram)
    assert len(found["top1_per_slot"]) == tiny_config().num_drafts
    assert found["fc_weight_std"] > 0


def test_eval_compares_two_drafters_on_the_same_records(
    folders: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tiny_config()
    tensors = export_tensors(tiny_drafter(config, seed=4), config)
    save_checkpoint(tmp_path / "other", config, tensors, training=TrainingInfo(number=4))
    arguments = options(folders, "drafter", "target", "records")
    assert run("eval", *arguments, "--against", str(tmp_path / "other"), "--json") == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    first, second = (found["tau"]["chain"]["tau"] for found in result["drafters"])
    paired = result["paired"]["chain"]
    assert paired["num_records"] == 2
    assert paired["ci_low"] <= paired["mean_difference"] <= paired["ci_high"]
    assert (paired["mean_difference"] > 0) == (first > second)


def test_eval_passes_over_a_file_that_is_no_record_and_says_so(
    folders: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    (Path(folders["records"]) / "0.rec").write_bytes(b"nonsense")
    assert run("eval", *options(folders, "drafter", "target", "records"), "--json") == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out.splitlines()[-1])["drafters"][0]["num_records"] == 1
    assert "0.rec: left out" in captured.err


def test_eval_answers_prompts_with_the_target_in_this_process(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = write_served_folder(tmp_path / "target")
    config = tiny_config(
        hidden_size=32, vocab_size=264, num_target_layers=8, target_layer_ids=LAYER_IDS, mask_token_id=263
    )
    tensors = export_tensors(tiny_drafter(config), config)
    save_checkpoint(tmp_path / "drafter", config, tensors, training=TrainingInfo(number=3))
    lines = [{"messages": [{"role": "user", "content": text}]} for text in ("hello", "good day")]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    arguments = ["--drafter", str(tmp_path / "drafter"), "--target", str(target)]
    arguments += ["--prompts", str(tmp_path / "prompts.jsonl"), "--max-new-tokens", "20", "--nodes", "8"]
    assert run("eval", *arguments, "--json") == 0
    (found,) = json.loads(capsys.readouterr().out.splitlines()[-1])["drafters"]
    assert (found["num_records"], found["left_out"]) == (2, {})
    for reading in found["tau"].values():
        committed = sum((a + 1) * count for a, count in enumerate(reading["histogram"]))
        assert 2 <= committed <= 2 * 20
        assert reading["tau"] == pytest.approx(committed / reading["num_rounds"])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["--records", "EMPTY"], "--records must be a folder that holds record files"),
        ([], "--records, --prompts must be exactly one of the two"),
        (["--records", "RECORDS", "--prompts", "x"], "--records, --prompts must be exactly one of the two"),
        (["--records", "RECORDS", "--url", "http://x"], "--url must be used with --prompts only"),
        (["--records", "RECORDS", "--nodes", "0"], "nodes must be in 1..512, got 0"),
        (["--records", "RECORDS", "--nodes", "a"], "--nodes must be numbers with commas between them"),
        (["--prompts", "/nowhere.jsonl"], "/nowhere.jsonl"),
    ],
)
def test_what_eval_cannot_use_is_named(
    folders: dict[str, str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    changes: list[str],
    message: str,
) -> None:
    (tmp_path / "empty").mkdir()
    places = {"EMPTY": str(tmp_path / "empty"), "RECORDS": folders["records"]}
    arguments = [places.get(text, text) for text in changes]
    assert run("eval", *options(folders, "drafter", "target"), *arguments) == 2
    assert message in capsys.readouterr().err.replace("\n", " ")
