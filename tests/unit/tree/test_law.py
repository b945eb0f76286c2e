"""Sampling at the nodes of a tree and walking it gives the target's law, whatever the drafts are."""

from __future__ import annotations

from collections import Counter
from itertools import product

import pytest
import torch
from scipy.stats import chisquare

from dflash_online.tree.draft_tree import DraftTrees
from dflash_online.tree.walk import walk
from tests.unit.tree.test_tree import random_trees

VOCAB, LENGTH, NUM_SAMPLES = 4, 3, 20_000


def next_probs(prefix: tuple[int, ...]) -> torch.Tensor:
    """[V]: a fixed distribution for each prefix, far from uniform."""
    seed = sum((token + 1) * 11**place for place, token in enumerate(prefix))
    return torch.softmax(1.5 * torch.randn(VOCAB, generator=torch.Generator().manual_seed(seed)), dim=0)


def texts_at_nodes(trees: DraftTrees, prefix: tuple[int, ...]) -> list[tuple[int, ...]]:
    """The text that ends with each node of the first tree."""
    texts = [prefix]
    for parent, token in zip(trees.parent_RN[0, 1:].tolist(), trees.token_id_RN[0, 1:].tolist(), strict=True):
        texts.append((*texts[parent], token))
    return texts


def generate(prefix: tuple[int, ...], num: int, generator: torch.Generator) -> Counter[tuple[int, ...]]:
    """Counts of `num` texts of LENGTH tokens, decoded with a new random tree for every prefix."""
    if len(prefix) >= LENGTH:
        return Counter({prefix[:LENGTH]: num})
    tree = random_trees(int(torch.randint(10**6, (), generator=generator)), 1, 6, VOCAB)
    trees = DraftTrees(
        tree.token_id_RN.expand(num, -1),
        tree.parent_RN.expand(num, -1),
        tree.depth_RN.expand(num, -1),
        max_depth=tree.max_depth,
        is_chain=False,
    )
    probs_NV = torch.stack([next_probs(text) for text in texts_at_nodes(tree, prefix)])
    token_RN = torch.multinomial(probs_NV, num, replacement=True, generator=generator).T
    result = walk(trees, token_RN)
    steps = Counter(
        tuple(produced[: accepted + 1])
        for produced, accepted in zip(
            result.produced_RP.tolist(), result.num_accepted_R.tolist(), strict=True
        )
    )
    counts: Counter[tuple[int, ...]] = Counter()
    for produced, count in steps.items():
        counts += generate((*prefix, *produced), count, generator)
    return counts


@pytest.mark.parametrize("seed", range(4))
def test_texts_follow_the_exact_probabilities_of_every_path(seed: int) -> None:
    counts = generate((), NUM_SAMPLES, torch.Generator().manual_seed(seed))
    exact = {}
    for text in product(range(VOCAB), repeat=LENGTH):
        prob = 1.0
        for place, token in enumerate(text):
            prob *= float(next_probs(text[:place])[token])
        exact[text] = prob
    assert sum(exact.values()) == pytest.approx(1.0, abs=1e-5)
    common = [text for text in exact if exact[text] * NUM_SAMPLES >= 5]
    assert len(common) > 30
    seen, wanted = [counts[t] for t in common], [exact[t] * NUM_SAMPLES for t in common]
    seen.append(NUM_SAMPLES - sum(seen))
    wanted.append(NUM_SAMPLES - sum(wanted))
    assert chisquare(seen, wanted, sum_check=False).pvalue > 1e-3
