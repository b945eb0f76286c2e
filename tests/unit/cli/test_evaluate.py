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


def test_eval_reports_what_the_library_measures(
    folders: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    options = [text for name, folder in folders.items() for text in (f"--{name}", folder)]
    assert run("eval", *options, "--json") == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    records = [tiny_record(20, ((6, 20),), seed=seed, record_id=f"r{seed}") for seed in (0, 1)]
    wanted = evaluate_drafter(tiny_drafter(), FrozenHead.from_folder(Path(folders["target"])), records)
    assert found["drafter_version"].startswith("3-")
    assert (found["num_records"], found["num_rounds"]) == (2, wanted.num_rounds)
    assert found["tau_chain"] == pytest.approx(wanted.tau)
    assert found["histogram"] == list(wanted.histogram)
    assert len(found["top1_per_slot"]) == tiny_config().num_drafts


def test_eval_without_records_names_the_folder(
    folders: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty").mkdir()
    options = ["--drafter", folders["drafter"], "--target", folders["target"]]
    assert run("eval", *options, "--records", str(tmp_path / "empty")) == 2
    assert "--records must be a folder that holds record files" in capsys.readouterr().err.replace("\n", " ")
