"""Counts by depth and rank, and the model of independent slots against brute force."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_online.tree.build import best_first_trees
from dflash_online.tree.candidates import top_candidates
from dflash_online.tree.draft_tree import chain_trees
from dflash_online.tree.ranks import PathRanks, RankTable, expected_accepted, expected_of_chain
from dflash_online.tree.walk import path_ranks, walk


def test_a_rank_counts_as_a_trial_only_where_it_was_offered() -> None:
    table = RankTable()
    table.add(PathRanks(accepted=(0, 2), offered=(3, 3, 1)))
    table.add(PathRanks(accepted=(), offered=(1,)))
    table.add(PathRanks(accepted=(1,), offered=(2,)))  # cut, or at its end: no miss at depth 2
    assert table.accepted_DK == [[1, 1, 0], [0, 0, 1], [0]]
    assert table.offered_DK == [[3, 2, 1], [1, 1, 1], [1]]
    assert table.probabilities() == [[1 / 3, 1 / 2, 0.0], [0.0, 0.0, 1.0], [0.0]]
    table.halve()
    assert (table.num_trials(0), table.num_trials(1), table.num_trials(9)) == (1.5, 1.0, 0.0)
    assert table.probabilities()[0] == [1 / 3, 1 / 2, 0.0]


probability_rows = st.lists(st.lists(st.floats(0, 1), min_size=1, max_size=3), min_size=0, max_size=3)


@settings(max_examples=100, deadline=None)
@given(prob_DK=probability_rows, num_nodes=st.integers(0, 12))
def test_the_expected_length_is_that_of_the_heaviest_prefixes(
    prob_DK: list[list[float]], num_nodes: int
) -> None:
    weights = sorted(
        (
            math.prod(prefix)
            for length in range(1, len(prob_DK) + 1)
            for prefix in itertools.product(*prob_DK[:length])
        ),
        reverse=True,
    )
    expected = expected_accepted(prob_DK, num_nodes)
    assert len(expected) == num_nodes + 1
    for size, found in enumerate(expected):
        assert found == pytest.approx(sum(weights[:size]), abs=1e-9)


def test_a_chain_is_the_sum_of_its_reaches() -> None:
    prob_DK = [[0.5, 0.4], [0.5, 0.1], [0.8]]
    assert expected_of_chain(prob_DK, 3) == pytest.approx(0.5 + 0.25 + 0.2)
    assert expected_of_chain(prob_DK, 1) == pytest.approx(0.5)
    assert expected_of_chain([], 3) == 0.0
    assert expected_accepted(prob_DK, 2)[2] == pytest.approx(0.9)


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10**6), num_nodes=st.integers(1, 20), vocab=st.integers(1, 6))
def test_ranks_along_a_path_are_places_among_the_candidates(seed: int, num_nodes: int, vocab: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits_RDV = torch.randn((2, 4, vocab), generator=generator)
    trees = best_first_trees(torch.zeros(2, dtype=torch.int64), logits_RDV, num_nodes)
    target_RN = torch.randint(0, vocab, trees.token_id_RN.shape, generator=generator)
    committed = walk(trees, target_RN)
    rank_RP, offered_RP = path_ranks(trees, committed.path_RP)
    order_RDK = top_candidates(logits_RDV, num_nodes).token_id_RDK.tolist()
    for request, path in enumerate(committed.path_RP.tolist()):
        for step in range(int(committed.num_accepted_R[request]) + 1):
            node, parents = path[step], trees.parent_RN[request].tolist()
            assert offered_RP[request, step] == parents.count(node)
            token = int(trees.token_id_RN[request, node])
            wanted = 0 if step == 0 else order_RDK[request][step - 1].index(token)
            assert rank_RP[request, step] == wanted


def test_every_draft_of_a_chain_has_rank_zero() -> None:
    trees = chain_trees(torch.tensor([7]), torch.tensor([[1, 2, 3]]))
    rank_RP, offered_RP = path_ranks(trees, torch.tensor([[0, 1, 2, 3]]))
    assert rank_RP.tolist() == [[0, 0, 0, 0]]
    assert offered_RP.tolist() == [[1, 1, 1, 0]]
