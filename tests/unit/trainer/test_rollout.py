"""Gate, guard and identity: pure judgements on figures."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tiny_models import tiny_record
from trainer_fixtures import make_resolved

from dflash_online.errors import TargetIdentityError, TargetRefusedError
from dflash_online.target.client import VersionAcceptance
from trainer.rollout.gate import decide
from trainer.rollout.guard import find_fault, pool_acceptance
from trainer.rollout.identity import check_checksum, check_header, check_info
from trainer.runs.config import GateConfig, GuardConfig


def live(version: str, *histogram: int, policy: str = "chain") -> VersionAcceptance:
    return VersionAcceptance(drafter_version=version, policy=policy, histogram=histogram)


def test_gate_asks_for_the_relative_gain() -> None:
    assert decide(GateConfig(min_gain=-0.02), new_tau=1.97, old_tau=2.0)[0]
    assert not decide(GateConfig(min_gain=-0.02), new_tau=1.95, old_tau=2.0)[0]
    passed, reason = decide(GateConfig(min_gain=0.1), new_tau=2.0, old_tau=2.0)
    assert not passed
    assert reason == "held-out tau 2.000 < 2.200 = (1 +0.1) * 2.000"


def test_histograms_of_several_targets_are_summed_by_version_and_policy() -> None:
    pooled = pool_acceptance([live("1", 1, 2), live("1", 1, 0, 5), live("1", 9, policy="tree"), live("2", 3)])
    assert pooled == (live("1", 2, 2, 5), live("1", 9, policy="tree"), live("2", 3))


GUARD = GuardConfig(min_steps=100, margin=0.1)


@pytest.mark.parametrize(
    ("entries", "is_fault"),
    [
        ([live("2", 80, 20), live("1", 40, 60)], True),  # 1.2 against 1.6
        ([live("2", 45, 55), live("1", 40, 60)], False),  # 1.55: within the margin
        ([live("2", 79, 20), live("1", 40, 60)], False),  # 99 steps of the new one
        ([live("2", 80, 20), live("1", 30, 60)], False),  # 90 of the old one
        ([live("2", 80, 20)], False),
        ([], False),
        ([live("2", 80, 20), live("1", 40, 60, policy="tree")], False),  # another policy is no measure
        ([live("2", 80, 20, policy="tree"), live("2", 1, 1), live("1", 40, 60)], False),
    ],
)
def test_guard_finds_a_fault_only_in_enough_and_comparable_steps(
    entries: list[VersionAcceptance], is_fault: bool
) -> None:
    fault = find_fault(GUARD, entries, new_version="2", old_version="1")
    assert (fault is not None) == is_fault


def test_guard_names_both_figures() -> None:
    fault = find_fault(GUARD, [live("2", 80, 20), live("1", 40, 60)], new_version="2", old_version="1")
    assert fault == "live tau 1.200 < 1.440 = (1 - 0.1) * 1.600 of 1 (100 and 100 verify steps)"


def test_identity_names_the_field_that_changed() -> None:
    expected = make_resolved(weight_checksum="00")
    info = {"target": {"weight_checksum": "00"}, "layer_ids": [1, 5], "model": {"hidden_size": 24}}
    check_info(expected, info, "http://t")
    with pytest.raises(TargetIdentityError, match=r"layer_ids .*\[1, 5\].*\[1, 6\]"):
        check_info(expected, info | {"layer_ids": [1, 6]}, "http://t")
    with pytest.raises(TargetRefusedError, match="lacks"):
        check_info(expected, {}, "http://t")
    header = tiny_record(4, ((1, 4),)).header
    check_header(expected, header)
    with pytest.raises(TargetIdentityError, match="weight_checksum"):
        check_header(replace(expected, weight_checksum="01"), header)
    check_checksum(expected, None)
    with pytest.raises(TargetIdentityError):
        check_checksum(expected, "01")
