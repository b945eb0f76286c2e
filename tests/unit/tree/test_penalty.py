"""Penalties inside a tree against penalizing one token after another, as plain decoding does."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_online.tree.draft_tree import visibility
from dflash_online.tree.penalty import Penalty, penalty_terms
from tests.unit.tree.test_tree import random_trees

VOCAB = 7


def penalized(logits_V: list[float], said: list[int], penalty: Penalty) -> list[float]:
    """One token's logits, by the definition."""
    result = []
    for token, logit in enumerate(logits_V):
        count = said.count(token)
        if count:
            logit -= penalty.frequency * count + penalty.presence
            logit = logit * penalty.repetition if logit < 0 else logit / penalty.repetition
        if token in penalty.ending_token_ids and len(said) < penalty.min_new_tokens:
            logit = float("-inf")
        result.append(logit)
    return result


@settings(max_examples=50, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    num_nodes=st.integers(1, 9),
    num_said=st.integers(1, 6),
    frequency=st.sampled_from([0.0, 0.7, -0.5]),
    presence=st.sampled_from([0.0, 1.5]),
    repetition=st.sampled_from([1.0, 1.3, 0.8]),
    min_new_tokens=st.sampled_from([0, 4, 8]),
)
def test_every_node_is_penalized_by_the_output_and_its_own_path(
    seed: int,
    num_nodes: int,
    num_said: int,
    frequency: float,
    presence: float,
    repetition: float,
    min_new_tokens: int,
) -> None:
    penalty = Penalty(
        frequency=frequency,
        presence=presence,
        repetition=repetition,
        min_new_tokens=min_new_tokens,
        ending_token_ids=(2, 5),
    )
    generator = torch.Generator().manual_seed(seed)
    trees = random_trees(seed, 1, num_nodes, VOCAB)
    output_T = torch.randint(VOCAB, (num_said,), generator=generator)
    logits_NV = torch.randn(num_nodes, VOCAB, generator=generator)
    is_on_path_NN = visibility(trees)[0]
    is_on_path_NN[:, 0] = False
    terms = penalty_terms(penalty, output_T, trees.token_id_RN[0], is_on_path_NN, VOCAB)
    found_NV = terms.apply(logits_NV)
    parent_N, token_N = trees.parent_RN[0].tolist(), trees.token_id_RN[0].tolist()
    for node in range(num_nodes):
        path, above = [], node
        while above > 0:
            path.append(token_N[above])
            above = parent_N[above]
        wanted_V = penalized(logits_NV[node].tolist(), output_T.tolist() + path, penalty)
        torch.testing.assert_close(found_NV[node], torch.tensor(wanted_V), rtol=1e-5, atol=1e-5)


def test_the_defaults_do_nothing() -> None:
    assert Penalty().is_neutral
    logits_NV = torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(0))
    root = torch.zeros(1, dtype=torch.int64), torch.zeros(1, 1, dtype=torch.bool)
    terms = penalty_terms(Penalty(), torch.tensor([1, 1, 3]), *root, VOCAB)
    torch.testing.assert_close(terms.apply(logits_NV), logits_NV, rtol=0, atol=0)


@pytest.mark.parametrize(
    "changed", [{"frequency": 0.1}, {"presence": -1.0}, {"repetition": 1.1}, {"min_new_tokens": 1}]
)
def test_any_penalty_is_noticed(changed: dict[str, float]) -> None:
    assert not Penalty(**changed).is_neutral  # type: ignore[arg-type]
