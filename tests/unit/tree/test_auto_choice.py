"""The choice of policy `auto` on a simulated server: known costs, known acceptance, a clock of its own."""

from __future__ import annotations

import heapq
import itertools
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from dflash_online.errors import ConfigError
from dflash_online.tree.auto import STEADY_SHARE, WARM_SHARE, AutoChooser, Step
from dflash_online.tree.ladder import Choice, bucket_of, ladder
from dflash_online.tree.policy import PolicyMode
from dflash_online.tree.ranks import PathRanks

OFF, CHAIN = Choice(PolicyMode.OFF, 0), Choice(PolicyMode.CHAIN, 7)
GOOD_RANKS = [[0.5, 0.2, 0.1, 0.05]] * 7
ONLY_BEST = [[0.95, 0.0, 0.0, 0.0]] * 7
HOPELESS = [[0.0, 0.0]] * 7


def best_prefixes(prob_DK: list[list[float]], num_nodes: int) -> set[tuple[int, ...]]:
    """Rank tuples of the best tree, as the drafter that knows these probabilities would grow it."""
    found: set[tuple[int, ...]] = set()
    heap = [(-prob, (rank,)) for rank, prob in enumerate(prob_DK[0])]
    heapq.heapify(heap)
    while heap and len(found) < num_nodes:
        negative, prefix = heapq.heappop(heap)
        found.add(prefix)
        if len(prefix) < len(prob_DK):
            for rank, prob in enumerate(prob_DK[len(prefix)]):
                heapq.heappush(heap, (negative * prob, (*prefix, rank)))
    return found


@dataclass
class Server:
    """Runs steps and keeps the time. `cost_s` gives seconds of a step by batch size and verify width."""

    cost_s: Callable[[int, int], float]
    prob_DK: list[list[float]]
    version: str = "1-a"
    max_nodes: int = 64
    noise: float = 0.1
    now: float = 0.0
    seed: int = 0
    ran: list[Choice] = field(default_factory=list)
    spent: Counter[bool] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.chooser = AutoChooser(7, self.max_nodes, lambda: self.now)
        self.random = random.Random(self.seed)

    def run(self, num_steps: int, batch_size: int = 1) -> Choice:
        """Steps of one batch size; returns the pick at their end."""
        for _ in range(num_steps):
            choice = self.chooser.choose(batch_size, self.version)
            seconds = self.cost_s(batch_size, 1 + choice.num_nodes)
            seconds *= 1 + self.noise * self.random.random()
            self.now += seconds
            self.ran.append(choice)
            self.spent[choice != self.chooser.pick_of(batch_size)[0]] += seconds
            paths = [self.walk(choice) for _ in range(batch_size)] if choice.num_nodes else []
            self.chooser.record(
                Step(
                    choice=choice,
                    batch_size=batch_size,
                    seconds=seconds,
                    drafter_version=self.version,
                    paths=paths,
                )
            )
        return self.chooser.pick_of(batch_size)[0]

    def walk(self, choice: Choice) -> PathRanks:
        """One request's step: the target's rank at each depth is drawn, and followed within the tree."""
        nodes = (
            best_prefixes(self.prob_DK, choice.num_nodes)
            if choice.mode is PolicyMode.TREE
            else {(0,) * depth for depth in range(1, choice.num_nodes + 1)}
        )
        path: tuple[int, ...] = ()
        offered = []
        while width := sum(node[:-1] == path for node in nodes):
            offered.append(width)
            probs = self.prob_DK[len(path)]
            drawn = self.random.choices([*range(len(probs)), -1], [*probs, 1 - sum(probs)])[0]
            if (*path, drawn) not in nodes:
                break
            path = (*path, drawn)
        return PathRanks(path, tuple(offered))


def flat(_batch_size: int, width: int) -> float:
    """Verifying more costs next to nothing: a device with idle compute."""
    return 0.020 + 0.00001 * width + (0.004 if width > 1 else 0.0)


def dear(batch_size: int, width: int) -> float:
    """Compute-bound: each verified token costs as much as a decode step."""
    return 0.020 * batch_size * width


def test_off_wins_where_verifying_is_dear() -> None:
    server = Server(dear, GOOD_RANKS)
    assert server.run(300) == OFF
    assert server.ran[-100:].count(OFF) >= 90


def test_chain_wins_where_only_the_best_rank_is_ever_accepted() -> None:
    server = Server(lambda _, width: 0.02 + 0.003 * width, ONLY_BEST)
    assert server.run(600) == CHAIN


def test_a_tree_wins_where_other_ranks_are_accepted_and_width_is_cheap() -> None:
    server = Server(flat, GOOD_RANKS)
    pick = server.run(600)
    assert pick.mode is PolicyMode.TREE
    assert pick.num_nodes >= 16


def test_a_useless_drafter_turns_drafting_off() -> None:
    assert Server(flat, HOPELESS).run(200) == OFF


def test_the_pick_is_within_a_few_percent_of_the_best_choice() -> None:
    """Costs in between: which tree is best is not obvious, so the pick is judged by its true rate."""
    server = Server(lambda _, width: 0.02 + 0.0004 * width, GOOD_RANKS)
    pick = server.run(1500)
    rate: dict[Choice, float] = {}
    for choice in server.chooser.rungs:
        tokens = [1 + len(server.walk(choice).accepted) if choice.num_nodes else 1 for _ in range(3000)]
        rate[choice] = sum(tokens) / len(tokens) / server.cost_s(1, 1 + choice.num_nodes)
    assert rate[pick] > 0.93 * max(rate.values())


def test_batch_sizes_are_judged_apart() -> None:
    server = Server(lambda batch, width: 0.02 + 0.0008 * batch * width, GOOD_RANKS)
    small, large = server.run(600, batch_size=1), server.run(600, batch_size=32)
    assert small.mode is PolicyMode.TREE
    assert large == OFF
    sizes = [entry["max_batch_size"] for entry in server.chooser.describe()["batch_sizes"]]
    assert sizes == [1, 32]


def test_a_new_drafter_version_is_judged_anew_both_ways() -> None:
    server = Server(flat, HOPELESS)
    assert server.run(200) == OFF
    server.version, server.prob_DK = "2-b", GOOD_RANKS
    assert server.run(300).mode is PolicyMode.TREE
    assert server.chooser.version == "2-b"
    server.version, server.prob_DK = "3-c", HOPELESS
    assert server.run(300) == OFF


def test_late_results_of_an_older_version_do_not_count() -> None:
    chooser = AutoChooser(7, 0, lambda: 0.0)
    assert chooser.choose(1, "2-b") == CHAIN
    chooser.record(
        Step(choice=CHAIN, batch_size=1, seconds=1.0, drafter_version="1-a", paths=[PathRanks((0,), (1, 1))])
    )
    assert chooser.describe()["accepted_by_depth_and_rank"] == []


@pytest.mark.parametrize("cost_s", [flat, dear])
def test_the_time_spent_on_trials_is_bounded(cost_s: Callable[[int, int], float]) -> None:
    server = Server(cost_s, GOOD_RANKS, noise=0.0)
    server.run(400)
    warm = dict(server.spent)
    assert warm[True] <= WARM_SHARE * sum(warm.values()) + cost_s(1, 65)
    server.run(4000)
    late = {key: server.spent[key] - warm[key] for key in (True, False)}
    assert 0 < late[True] <= 1.2 * STEADY_SHARE * sum(late.values()) + cost_s(1, 65)


def test_estimates_stay_alive_so_that_a_change_of_costs_is_noticed() -> None:
    server = Server(dear, GOOD_RANKS)
    assert server.run(300) == OFF
    server.cost_s = flat
    assert server.run(3000).mode is PolicyMode.TREE


def test_noise_does_not_make_it_flap() -> None:
    """Two choices of equal worth: the margin keeps one."""
    server = Server(lambda _, width: 0.02 if width == 1 else 0.036, ONLY_BEST, max_nodes=0, noise=0.2)
    server.prob_DK = [[0.45], *[[0.8]] * 6]
    server.run(300)
    picks = []
    for _ in range(1000):
        picks.append(server.run(1))
    changes = sum(a != b for a, b in itertools.pairwise(picks))
    assert changes <= 6


def test_some_alternatives_are_known_after_a_few_requests() -> None:
    """Trials are spent on one choice after the other: all begun and none known would help nobody."""
    server = Server(lambda _, width: 0.1 if width == 1 else 0.2 + 0.01 * width, [[0.97, 0.01]] * 7)
    server.run(45)
    (entry,) = server.chooser.describe()["batch_sizes"]
    known = [c["policy"] for c in entry["choices"] if c["tokens_per_second_per_request"] is not None]
    assert {"off", "chain"} <= set(known)


def test_one_slow_step_does_not_upset_it() -> None:
    server = Server(flat, GOOD_RANKS)
    pick = server.run(600)
    server.chooser.record(
        Step(choice=pick, batch_size=1, seconds=30.0, drafter_version=server.version, paths=[])
    )
    assert server.run(50) == pick


def test_it_says_what_it_picked_and_why() -> None:
    server = Server(dear, GOOD_RANKS, max_nodes=16)
    server.run(300, batch_size=3)
    (entry,) = server.chooser.describe()["batch_sizes"]
    assert (entry["max_batch_size"], entry["policy"]) == (4, "off")
    assert entry["reason"].split(":")[0] in {"best", "faster", "kept"}
    assert "off" in entry["reason"]
    assert entry["num_steps"] == 300
    assert [choice["policy"] for choice in entry["choices"]] == [
        "off",
        "tree:4",
        "chain",
        "tree:8",
        "tree:16",
    ]
    off = entry["choices"][0]
    assert off["tokens_per_second_per_request"] == pytest.approx(1e3 / off["step_ms"], rel=0.01)
    assert off["tokens_from"] == "exact"


def test_the_ladder_holds_what_the_server_can_verify() -> None:
    assert [choice.name for choice in ladder(5, 0)] == ["off", "chain"]
    assert [choice.name for choice in ladder(5, 40)] == [
        "off",
        "tree:4",
        "chain",
        "tree:8",
        "tree:16",
        "tree:32",
    ]


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (lambda: ladder(0, 8), "num_drafts"),
        (lambda: ladder(5, -1), "max_nodes"),
        (lambda: bucket_of(0), "batch_size"),
        (lambda: AutoChooser(7, 8, lambda: 0.0).choose(0, "1-a"), "batch_size"),
        (lambda: Step(choice=OFF, batch_size=0, seconds=1.0, drafter_version="1-a"), "batch_size"),
        (lambda: Step(choice=OFF, batch_size=1, seconds=0.0, drafter_version="1-a"), "seconds"),
        (lambda: Step(choice=OFF, batch_size=1, seconds=float("nan"), drafter_version="1-a"), "seconds"),
        (
            lambda: AutoChooser(7, 8, lambda: 0.0).record(
                Step(choice=Choice(PolicyMode.TREE, 5), batch_size=1, seconds=1.0, drafter_version="1-a")
            ),
            "choice",
        ),
    ],
)
def test_odd_input_is_refused_by_name(call: Callable[[], object], name: str) -> None:
    with pytest.raises(ConfigError) as refused:
        call()
    assert refused.value.field == name
    assert refused.value.bound


def test_buckets_are_powers_of_two() -> None:
    assert [bucket_of(size) for size in (1, 2, 3, 4, 5, 8, 9)] == [1, 2, 4, 4, 8, 8, 16]
