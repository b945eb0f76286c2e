"""Acceptance counts are exact, per version, and leave out steps that drafted nothing."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from server_patches.acceptance import AcceptanceCounter, StepTag, resolved_steps


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
