"""The demo's training part with the real trainer service, against the fake target."""

from __future__ import annotations

from pathlib import Path

from fake_target import FakeTarget
from trainer_process import run_config

from dflash_online.demo.memory import PeakMemory
from dflash_online.demo.run import ask_info
from dflash_online.demo.screen import LoopView
from dflash_online.demo.services import Running, start_trainer
from dflash_online.demo.training import train_for


def test_the_demo_reads_what_the_trainer_says(target: FakeTarget, tmp_path: Path) -> None:
    views: list[LoopView] = []
    trainer = start_trainer(tmp_path / "runs", tmp_path / "trainer.log")
    with trainer.service, PeakMemory() as memory:
        memory.add(trainer.service)
        trainer.service.wait_ready(trainer.url + "/readyz", 60.0, lambda waited_s: None)
        status = train_for(
            # The fake target lives in this process; only a service that is alive is asked of it.
            *(trainer, Running(trainer.service, 1), run_config(target.url, max_steps=20)),
            train_s=90.0,
            stop_timeout_s=60.0,
            ask_info=lambda: ask_info(target.url),
            show=views.append,
        )
        memory.look()
    assert status["state"] == "completed"
    assert views[-1].num_published() >= 1
    assert views[-1].loss is not None
    assert "records" in views[-1].line()
    assert memory.peaks_mb()["trainer"] > 50
    assert trainer.service.left_over() == []
    assert trainer.is_port_free()
