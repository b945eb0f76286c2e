"""Acceptance counts are exact, per version, and leave out steps that drafted nothing."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch
from prometheus_client import CollectorRegistry, Counter

from dflash_online.tree.draft_tree import DraftTrees, chain_trees
from dflash_online.tree.ranks import PathRanks
from dflash_online.tree.walk import walk
from server_patches.acceptance import (
    AcceptanceCounter,
    StepRanks,
    StepTag,
    depth_label,
    resolved_steps,
)


@dataclass
class FakeRequest:
    is_over: bool = False
    is_retracted: bool = False
    output_ids: list[int] = field(default_factory=list)
    finished_len: int | None = None

    def finished(self) -> bool:
        return self.is_over


@dataclass
class FakeBatch:
    reqs: list[FakeRequest]


@dataclass
class FakeResult:
    num_correct_drafts_per_req_cpu: list[int]
    dflash_step: StepTag | None = None
    dflash_ranks: StepRanks | None = None


def test_tau_is_pooled_over_steps_with_the_bonus() -> None:
    counter = AcceptanceCounter()
    for num_accepted in (0, 0, 3, 1):
        counter.add(StepTag("4-abc", 7, is_chain=True), num_accepted)
    (entry,) = counter.report()
    assert entry["histogram"] == [2, 1, 0, 1]
    assert (entry["num_steps"], entry["num_committed"], entry["tau"]) == (4, 8, 2.0)


def test_versions_are_counted_apart() -> None:
    counter = AcceptanceCounter()
    counter.add(StepTag("1-a", 7, is_chain=True), 2)
    counter.add(StepTag("2-b", 7, is_chain=True), 0)
    assert {e["drafter_version"]: e["num_steps"] for e in counter.report()} == {"1-a": 1, "2-b": 1}


def test_trees_are_counted_by_their_number_of_nodes() -> None:
    counter = AcceptanceCounter()
    counter.add(StepTag("1-a", 16, is_chain=False), 2)
    counter.add(StepTag("1-a", 32, is_chain=False), 3)
    counter.add(StepTag("1-a", 7, is_chain=True), 1)
    assert {e["policy"]: e["tau"] for e in counter.report()} == {"tree:16": 3, "tree:32": 4, "chain": 2}


def counted(result: FakeResult, batch: FakeBatch) -> list[int]:
    tokens = [[0] * (num_accepted + 1) for num_accepted in result.num_correct_drafts_per_req_cpu]
    return [step.num_kept() for step in resolved_steps(tokens, result, batch)]


def test_requests_that_had_ended_or_were_retracted_are_left_out() -> None:
    batch = FakeBatch([FakeRequest(), FakeRequest(is_over=True), FakeRequest(is_retracted=True)])
    assert counted(FakeResult([1, 5, 6], StepTag("1-a", 7, is_chain=True)), batch) == [1]


def test_prefill_and_steps_without_drafts_count_nothing() -> None:
    batch = FakeBatch([FakeRequest()])
    assert counted(FakeResult([1]), batch) == []
    assert counted(FakeResult([0], StepTag("1-a", 0, is_chain=True)), batch) == []


@pytest.mark.parametrize(
    ("num_output", "finished_len", "num_kept"),
    [(20, None, 4), (20, 20, 4), (20, 19, 4), (20, 18, 3), (20, 16, 1), (20, 15, 0)],
)
def test_a_step_that_ends_its_request_counts_the_drafts_that_the_answer_kept(
    num_output: int, finished_len: int | None, num_kept: int
) -> None:
    """Four drafts and the bonus were appended; the end cuts the bonus first, then drafts."""
    request = FakeRequest()
    (step,) = resolved_steps(
        [[0] * 5], FakeResult([4], StepTag("1-a", 7, is_chain=True)), FakeBatch([request])
    )
    request.output_ids, request.finished_len = [0] * num_output, finished_len
    assert step.num_kept() == num_kept


def test_ranks_of_a_tree_are_those_of_the_accepted_nodes() -> None:
    # Two first drafts; below the second, one child.
    trees = DraftTrees(
        token_id_RN=torch.tensor([[9, 1, 2, 3]]),
        parent_RN=torch.tensor([[-1, 0, 0, 2]]),
        depth_RN=torch.tensor([[0, 1, 1, 2]]),
        max_depth=2,
        is_chain=False,
    )
    ranks = StepRanks(trees, walk(trees, torch.tensor([[2, 5, 3, 7]])))
    assert ranks.path(0, 2, is_cut=False) == PathRanks((1, 0), (2, 1))
    assert ranks.path(0, 1, is_cut=True) == PathRanks((1,), (2,))
    missed = StepRanks(trees, walk(trees, torch.tensor([[2, 5, 8, 7]])))
    assert missed.path(0, 1, is_cut=False) == PathRanks((1,), (2, 1))


def test_ranks_of_a_chain_need_no_tensors() -> None:
    trees = chain_trees(torch.tensor([9]), torch.tensor([[1, 2]]))
    ranks = StepRanks(trees, walk(trees, torch.tensor([[1, 8, 7]])))
    assert ranks.path(0, 1, is_cut=False) == PathRanks((0,), (1, 1))
    assert ranks.path(0, 2, is_cut=False) == PathRanks((0, 0), (1, 1))
    assert ranks.path(0, 0, is_cut=True) == PathRanks((), ())


def test_acceptance_by_depth_and_rank_is_reported_and_labelled_with_bounds() -> None:
    series = CollectorRegistry()
    labels = ("drafter_version", "policy", "depth", "rank")
    counter = AcceptanceCounter(None, Counter("drafts", "x", labelnames=labels, registry=series))
    for number in range(70):
        tag = StepTag(f"{number}-a", 16, is_chain=False)
        counter.add(tag, 1)
        counter.add_path(tag, PathRanks((number,), (70, 1)))
    first = counter.report()[1]
    assert first["accepted_by_depth_and_rank"] == [[0, 1] + [0] * 68, [0]]
    assert first["offered_by_depth_and_rank"] == [[1] * 70, [1]]
    samples = [s for m in series.collect() for s in m.samples if s.name.endswith("_total")]
    assert {s.labels["rank"] for s in samples} == {"0", "1", "2-3", "4-7", "8+"}
    assert len({s.labels["drafter_version"] for s in samples}) == 65
    assert [depth_label(depth) for depth in (1, 8, 9, 20)] == ["1", "8", "9+", "9+"]
