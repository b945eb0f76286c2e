"""The step: schedule, choice of records, loading, restart from files, and ranks that equal one rank."""

from __future__ import annotations

import multiprocessing
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import tiny_drafter, tiny_head, tiny_record
from torch import Tensor
from trainer_fixtures import make_config

from dflash_online.distill.pack import PackedBatch, pack_records
from dflash_online.distill.recipe import ZLAB
from dflash_online.drafter.model import DFlashDrafter
from dflash_online.errors import CheckpointError, IncompleteCheckpointError
from dflash_online.process.port import free_port
from trainer.feed.buffer import write_record
from trainer.loop.optimizer import DecayPhase, learning_rate, make_optimizer, planned_decay
from trainer.loop.parallel import Ranks
from trainer.loop.records import StepLoader, StepPlan, pick_records, read_record
from trainer.loop.state_files import Progress, load_state, save_state
from trainer.loop.step import StepOutcome, train_step
from trainer.store.record_rows import StoredRecord

CPU = torch.device("cpu")


def make_batch(seed: int) -> PackedBatch:
    records = [
        tiny_record(12 + seed, ((3, 12 + seed),), seed=seed),
        tiny_record(9, ((2, 9),), seed=seed + 50),
    ]
    return pack_records(
        records, block_size=4, num_anchors=6 + seed, generator=torch.Generator().manual_seed(seed)
    )


def step(
    drafter: DFlashDrafter, optimizer: torch.optim.Optimizer, batches: list[PackedBatch], ranks: Ranks
) -> StepOutcome:
    return train_step(
        drafter, tiny_head(), optimizer, batches, ZLAB, ranks, learning_rate=1e-2, clip=1.0, chunk_slots=16
    )


def weights(drafter: DFlashDrafter) -> dict[str, Tensor]:
    return {name: parameter.detach().clone() for name, parameter in drafter.named_parameters()}


def test_learning_rate_warms_up_stays_and_decays() -> None:
    config = make_config(optimizer={"lr": 1.0, "warmup_steps": 4, "decay_steps": 10}, max_steps=100)
    rates = [learning_rate(config, n, planned_decay(config)) for n in range(100)]
    assert rates[:5] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])
    assert set(rates[5:90]) == {1.0}
    assert rates[99] == pytest.approx(0.1)
    assert rates[89] > rates[94] > rates[99]
    on_demand = DecayPhase(start_step=20, num_steps=10)
    assert learning_rate(config, 40, on_demand) == pytest.approx(0.1)  # and stays there
    assert planned_decay(make_config()) is None


def test_least_used_records_are_picked_and_equals_by_chance() -> None:
    config = make_config(records_per_step=2)
    available = [StoredRecord(seq, "", uses) for seq, uses in [(1, 0), (2, 3), (3, 3), (4, 3)]]
    picked = set()
    for seed in range(20):
        plan = pick_records(available, config, 7, torch.Generator().manual_seed(seed), is_last_call=False)
        assert plan is not None
        assert plan.step == 7
        assert 1 in plan.seqs()
        picked |= set(plan.seqs())
    assert picked == {1, 2, 3, 4}
    assert StepPlan.from_json(plan.to_json()) == plan


def test_step_waits_for_enough_records_unless_no_more_will_come() -> None:
    config, pick = make_config(records_per_step=3), torch.Generator()
    available = [StoredRecord(1, "", 0)]
    assert pick_records(available, config, 1, pick, is_last_call=False) is None
    last = pick_records(available, config, 1, pick, is_last_call=True)
    assert last is not None
    assert last.seqs() == [1]
    assert pick_records([], config, 1, pick, is_last_call=True) is None


def test_loader_names_files_that_cannot_be_read_and_goes_on(tmp_path: Path) -> None:
    good = write_record(tiny_record(10, ((2, 10),), record_id="r/0/1"), tmp_path)
    torn = tmp_path / "torn.rec"
    torn.write_bytes(good.read_bytes()[:-9])
    stored = [StoredRecord(1, str(good), 0), StoredRecord(2, str(torn), 0), StoredRecord(3, "/gone", 0)]
    assert read_record(stored[1]) is None
    loader = StepLoader(make_config(anchors_per_step=4), Ranks.alone(CPU), block_size=4)
    loader.submit(StepPlan(1, (tuple(stored),)))
    plan, loaded, _ = loader.take()
    loader.close()
    assert loader.pending is None
    assert plan.seqs() == [1, 2, 3]
    assert loaded.unreadable == [2, 3]
    assert loaded.num_tokens == 10
    assert loaded.batches[0].num_anchors == 4


def test_pack_does_not_depend_on_the_rank_that_loads_it(tmp_path: Path) -> None:
    paths = [
        write_record(tiny_record(20, ((2, 20),), seed=n, record_id=f"r/0/{n}"), tmp_path) for n in range(2)
    ]
    plan = StepPlan(5, tuple((StoredRecord(n, str(path), 0),) for n, path in enumerate(paths)))
    config = make_config(anchors_per_step=8, packs_per_step=2)

    def load(rank: int, world_size: int) -> list[PackedBatch]:
        loader = StepLoader(config, Ranks(rank, world_size, CPU), block_size=4)
        loader.submit(plan)
        batches = loader.take()[1].batches
        loader.close()
        return batches

    alone = load(0, 1)
    shared = load(0, 2) + load(1, 2)
    assert len(alone) == 2
    for one, other in zip(alone, shared, strict=True):
        assert one.anchor_position_A.equal(other.anchor_position_A)
        assert one.label_AB.equal(other.label_AB)


def test_loss_falls_over_steps() -> None:
    drafter, config = tiny_drafter(), make_config()
    optimizer, batch = make_optimizer(drafter, config), make_batch(0)
    losses = [step(drafter, optimizer, [batch], Ranks.alone(CPU)).loss for _ in range(15)]
    assert losses[-1] < losses[0] / 2


def test_clip_bounds_the_update_and_reports_the_norm_before_it() -> None:
    drafter = tiny_drafter()
    optimizer = torch.optim.SGD(drafter.parameters(), lr=1.0)
    before = weights(drafter)
    options: dict[str, Any] = {"learning_rate": 1.0, "clip": 0.01, "chunk_slots": 16}
    outcome = train_step(drafter, tiny_head(), optimizer, [make_batch(0)], ZLAB, Ranks.alone(CPU), **options)
    moved = torch.cat([(value - before[name]).flatten() for name, value in weights(drafter).items()])
    assert outcome.grad_norm > 0.01
    assert float(moved.norm()) == pytest.approx(0.01, rel=1e-3)


def test_step_that_is_not_finite_changes_nothing() -> None:
    drafter = tiny_drafter()
    optimizer = make_optimizer(drafter, make_config())
    batch = make_batch(0)
    batch.features_SF[3] = float("nan")
    before = weights(drafter)
    outcome = step(drafter, optimizer, [batch], Ranks.alone(CPU))
    assert not outcome.is_applied
    assert all(before[name].equal(value) for name, value in weights(drafter).items())


def test_restart_from_files_takes_the_same_next_step(tmp_path: Path) -> None:
    config = make_config()
    drafter, pick = tiny_drafter(), torch.Generator().manual_seed(3)
    optimizer = make_optimizer(drafter, config)
    for seed in range(3):
        step(drafter, optimizer, [make_batch(seed)], Ranks.alone(CPU))
    progress = Progress(step=3, tokens_seen=99, trained_s=1.5, cursor=7)
    save_state(tmp_path / "v1", drafter, optimizer, pick, progress)
    drawn = torch.rand(2, generator=pick)
    step(drafter, optimizer, [make_batch(4)], Ranks.alone(CPU))

    other, other_pick = tiny_drafter(seed=9), torch.Generator()
    other_optimizer = make_optimizer(other, config)
    assert load_state(tmp_path / "v1", other, other_optimizer, other_pick) == progress
    assert torch.rand(2, generator=other_pick).equal(drawn)
    step(other, other_optimizer, [make_batch(4)], Ranks.alone(CPU))
    for name, value in weights(drafter).items():
        torch.testing.assert_close(weights(other)[name], value, rtol=0, atol=0)


def test_state_without_marker_or_damaged_is_refused(tmp_path: Path) -> None:
    drafter, pick = tiny_drafter(), torch.Generator()
    optimizer = make_optimizer(drafter, make_config())
    with pytest.raises(IncompleteCheckpointError):
        load_state(tmp_path / "none", drafter, optimizer, pick)
    save_state(tmp_path / "v1", drafter, optimizer, pick, Progress())
    (tmp_path / "v1" / "optimizer.safetensors").write_bytes(b"junk")
    with pytest.raises(CheckpointError, match="cannot be read"):
        load_state(tmp_path / "v1", drafter, optimizer, pick)
    with pytest.raises(CheckpointError, match="cannot be written"):
        save_state(Path("/proc/none/v1"), drafter, optimizer, pick, Progress())


def run_rank(rank: int, port: int, path: str) -> None:
    """One of two processes: two steps on its own pack each."""
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    ranks = Ranks.join(dict(os.environ), CPU)
    assert ranks.share({"from": 0} if rank == 0 else None) == {"from": 0}
    assert ranks.gather(10 + rank) == [10, 11]
    drafter = tiny_drafter()
    optimizer = make_optimizer(drafter, make_config())
    outcomes = [step(drafter, optimizer, [make_batch(2 * n + rank)], ranks) for n in range(2)]
    torch.save(
        {
            "weights": weights(drafter),
            "figures": [(o.loss, o.grad_norm, *o.stats.accuracy()) for o in outcomes],
        },
        f"{path}/{rank}.pt",
    )
    ranks.leave()


@pytest.mark.slow
def test_step_of_two_ranks_is_the_step_of_one_rank_on_both_packs(tmp_path: Path) -> None:
    spawn = multiprocessing.get_context("spawn")
    port = free_port()
    processes = [spawn.Process(target=run_rank, args=(rank, port, str(tmp_path))) for rank in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [0, 0]

    drafter = tiny_drafter()
    optimizer = make_optimizer(drafter, make_config())
    alone = [
        step(drafter, optimizer, [make_batch(2 * n), make_batch(2 * n + 1)], Ranks.alone(CPU))
        for n in range(2)
    ]
    figures = torch.tensor([(o.loss, o.grad_norm, *o.stats.accuracy()) for o in alone])
    for rank in range(2):
        found = torch.load(tmp_path / f"{rank}.pt", weights_only=True)
        torch.testing.assert_close(torch.tensor(found["figures"]), figures, rtol=1e-5, atol=1e-6)
        for name, value in weights(drafter).items():
            torch.testing.assert_close(found["weights"][name], value, rtol=1e-4, atol=1e-5)
