"""Policy `auto` in the server: limits, probes, late results, what is kept and what reaches /metrics."""

from __future__ import annotations

from prometheus_client import REGISTRY

from dflash_online.tree.ladder import Choice
from dflash_online.tree.policy import Policy, PolicyMode
from dflash_online.tree.ranks import PathRanks
from server_patches.auto import AutoPolicy, AutoSeries, TimedStep

AUTO = Policy(mode=PolicyMode.AUTO, num_nodes=8)
MISS = PathRanks((), (1,))


def begin(auto: AutoPolicy, policy: Policy, batch_size: int = 1, step: int = 1) -> TimedStep:
    timed = auto.begin(policy, batch_size, step, "1-a")
    assert timed is not None
    return timed


def prepared(series: AutoSeries | None = None) -> AutoPolicy:
    auto = AutoPolicy("cpu", series)
    auto.prepare(num_drafts=5, max_nodes=8)
    return auto


def finish(auto: AutoPolicy, timed: TimedStep) -> None:
    timed.timer.finish()
    auto.record(timed, [MISS] * timed.batch_size if timed.choice.num_nodes else [])


def test_another_policy_is_left_alone() -> None:
    chain = Policy(mode=PolicyMode.CHAIN, num_nodes=5)
    auto = prepared()
    assert auto.begin(chain, 1, 1, "1-a") is None
    assert auto.describe(chain) is None


def test_a_step_is_drafted_by_a_concrete_policy_and_timed() -> None:
    auto = prepared()
    timed = begin(auto, AUTO)
    assert timed.policy == Policy(mode=PolicyMode.CHAIN, num_nodes=5)
    timed.timer.finish()
    assert 0.0 < timed.timer.seconds < 1.0


def test_above_the_batch_limit_nothing_is_drafted_nor_learnt_but_by_probes() -> None:
    auto = prepared()
    policy = Policy(mode=PolicyMode.AUTO, num_nodes=8, max_batch_size=2, probe_interval=4)
    chooser = auto.chooser
    assert chooser is not None
    drafted = []
    for step in range(1, 41):
        timed = begin(auto, policy, batch_size=3, step=step)
        drafted.append(timed.policy.num_nodes > 0)
        finish(auto, timed)
    assert [step for step, was_drafted in enumerate(drafted, start=1) if was_drafted] == [*range(4, 41, 4)]
    assert chooser.describe_bucket(4)["num_steps"] == 10
    assert begin(auto, policy, batch_size=2, step=1).policy.num_nodes > 0


def test_what_was_learnt_survives_a_change_of_policy_but_not_of_the_ladder() -> None:
    auto = prepared()
    finish(auto, begin(auto, AUTO))
    auto.prepare(num_drafts=5, max_nodes=8)
    described = auto.describe(AUTO)
    assert described is not None
    assert described["batch_sizes"][0]["num_steps"] == 1
    auto.prepare(num_drafts=5, max_nodes=4)
    assert auto.describe(AUTO) == {
        "drafter_version": "",
        "batch_sizes": [],
        "accepted_by_depth_and_rank": [],
    }


def test_a_late_step_of_another_ladder_is_ignored() -> None:
    auto = prepared()
    late = TimedStep(Choice(PolicyMode.TREE, 8), 1, "1-a", begin(auto, AUTO).timer, is_forced=False)
    auto.prepare(num_drafts=5, max_nodes=4)
    finish(auto, late)
    described = auto.describe(AUTO)
    assert described is not None
    assert described["batch_sizes"] == []


def test_picks_and_steps_reach_the_metrics() -> None:
    auto = prepared(AutoSeries())
    for step in range(1, 17):
        finish(auto, begin(auto, AUTO, batch_size=1, step=step))
    described = auto.describe(AUTO)
    assert described is not None
    pick = described["batch_sizes"][0]["policy"]

    def sample(name: str, **labels: str) -> float | None:
        return REGISTRY.get_sample_value(name, {"max_batch_size": "1", **labels})

    assert sample("dflash:auto_is_pick", policy=pick) == 1.0
    steps = [
        metric_sample.value
        for metric in REGISTRY.collect()
        if metric.name == "dflash:auto_steps"
        for metric_sample in metric.samples
        if metric_sample.name.endswith("_total")
    ]
    assert sum(steps) == 16
    choices = [choice["policy"] for choice in described["batch_sizes"][0]["choices"]]
    # Gauges are set at each review, at the latest every eighth step.
    assert 8 < sum(sample("dflash:auto_timed_steps", policy=name) or 0 for name in choices) <= 16
