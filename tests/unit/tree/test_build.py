"""Best trees against the heap oracle and against brute force, ties included."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dflash_online.errors import ConfigError, ShapeError
from dflash_online.tree import build
from dflash_online.tree.build import best_first_trees, tree_of_candidates
from dflash_online.tree.candidates import Candidates, merge_shards, shard_candidates, top_candidates
from dflash_online.tree.draft_tree import DraftTrees, chain_trees, links, visibility
from dflash_online.tree.reference import heap_tree
from dflash_online.tree.walk import path_ranks, walk

KINDS = ("normal", "peaked", "tied", "masked", "bfloat16", "equal")


def random_logits(kind: str, seed: int, num_requests: int, num_depths: int, vocab: int) -> Tensor:
    """Logits of one kind; all but the first two make equal weights, within a level and across levels."""
    generator = torch.Generator().manual_seed(seed)
    shape = (num_requests, num_depths, vocab)
    normal = torch.randn(shape, generator=generator)
    few = torch.randint(-1, 2, shape, generator=generator).float()
    return {
        "normal": normal,
        # Beyond float32 resolution: many a best token has log-probability 0.0 and ties with its parent.
        "peaked": 40 * normal,
        "tied": few,
        "masked": few.masked_fill(few < 0, -torch.inf),
        "bfloat16": normal.bfloat16(),
        "equal": torch.zeros(shape),
    }[kind]


def paths(trees: DraftTrees, request: int) -> list[tuple[int, ...]]:
    """Token path of every node but the root; checks order, depths and siblings on the way."""
    token, parent = trees.token_id_RN[request].tolist(), trees.parent_RN[request].tolist()
    found: list[tuple[int, ...]] = [()]
    assert parent[0] == -1
    for node in range(1, len(token)):
        assert 0 <= parent[node] < node
        found.append((*found[parent[node]], token[node]))
    assert trees.depth_RN[request].tolist() == [len(path) for path in found]
    assert len(set(found)) == len(found)
    return found[1:]


def in_tensors(anchor_R: Tensor, candidates: Candidates, num_nodes: int) -> DraftTrees:
    """As on a GPU, or without numba."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "compiled_heap", lambda: None)
        return tree_of_candidates(anchor_R, candidates, num_nodes)


def assert_same_trees(found: DraftTrees, expected: DraftTrees) -> None:
    """Node for node, not only as sets."""
    assert torch.equal(found.token_id_RN, expected.token_id_RN)
    assert torch.equal(found.parent_RN, expected.parent_RN)
    assert torch.equal(found.depth_RN, expected.depth_RN)
    assert found.max_depth == expected.max_depth


@settings(max_examples=250, deadline=None)
@given(
    kind=st.sampled_from(KINDS),
    seed=st.integers(0, 10**6),
    num_requests=st.integers(1, 3),
    num_depths=st.integers(1, 6),
    vocab=st.integers(1, 9),
    num_nodes=st.integers(1, 24),
)
def test_the_nodes_equal_those_of_the_heap(
    kind: str, seed: int, num_requests: int, num_depths: int, vocab: int, num_nodes: int
) -> None:
    logits = random_logits(kind, seed, num_requests, num_depths, vocab)
    trees = best_first_trees(torch.arange(num_requests), logits, num_nodes)
    candidates = top_candidates(logits, num_nodes)
    assert build.compiled_heap() is not None
    assert_same_trees(trees, in_tensors(torch.arange(num_requests), candidates, num_nodes))
    assert trees.token_id_RN[:, 0].tolist() == list(range(num_requests))
    assert trees.max_depth == min(num_depths, num_nodes)
    assert not trees.is_chain
    for request in range(num_requests):
        oracle = heap_tree(candidates.log_prob_RDK[request], candidates.token_id_RDK[request], num_nodes)
        found = paths(trees, request)
        assert len(found) == len(oracle)
        assert set(found) == {node.path for node in oracle}
        assert all(path[:-1] == () or path[:-1] in found for path in found)


@pytest.mark.parametrize("kind", KINDS)
def test_a_large_tree_equals_that_of_the_heap(kind: str) -> None:
    candidates = top_candidates(random_logits(kind, 3, 2, 15, 500), 64)
    trees = in_tensors(torch.arange(2), candidates, 64)
    assert_same_trees(trees, tree_of_candidates(torch.arange(2), candidates, 64))
    for request in range(2):
        oracle = heap_tree(candidates.log_prob_RDK[request], candidates.token_id_RDK[request], 64)
        assert set(paths(trees, request)) == {node.path for node in oracle}


@settings(max_examples=60, deadline=None)
@given(
    kind=st.sampled_from(KINDS),
    seed=st.integers(0, 10**6),
    num_depths=st.integers(1, 4),
    vocab=st.integers(1, 4),
    num_nodes=st.integers(1, 12),
)
def test_the_total_weight_equals_that_of_all_prefixes_sorted(
    kind: str, seed: int, num_depths: int, vocab: int, num_nodes: int
) -> None:
    logits = random_logits(kind, seed, 1, num_depths, vocab)
    prob = logits[0].double().softmax(dim=1).nan_to_num(nan=0.0)
    weight = {
        path: torch.stack([prob[depth, token] for depth, token in enumerate(path)]).prod().item()
        for length in range(1, num_depths + 1)
        for path in itertools.product(range(vocab), repeat=length)
    }
    best = sorted(weight.values(), reverse=True)[:num_nodes]
    found = paths(best_first_trees(torch.zeros(1), logits, num_nodes), 0)
    assert len(found) == len(best)
    assert sum(weight[path] for path in found) == pytest.approx(sum(best), abs=1e-5)


@settings(max_examples=100, deadline=None)
@given(
    kind=st.sampled_from(KINDS),
    seed=st.integers(0, 10**6),
    vocab=st.integers(1, 700),
    num_candidates=st.integers(1, 6),
)
def test_candidates_equal_a_stable_sort_of_the_whole_vocabulary(
    kind: str, seed: int, vocab: int, num_candidates: int
) -> None:
    logits = random_logits(kind, seed, 2, 2, vocab)
    found = top_candidates(logits, num_candidates)
    order = logits.float().sort(dim=2, descending=True, stable=True).indices[:, :, :num_candidates]
    log_prob = logits.double().log_softmax(dim=2).nan_to_num(nan=-torch.inf, neginf=-torch.inf)
    assert torch.equal(found.token_id_RDK, order)
    assert found.log_prob_RDK.dtype == torch.float32
    assert bool((found.log_prob_RDK <= 0).all())
    torch.testing.assert_close(found.log_prob_RDK.double(), log_prob.gather(2, order), atol=1e-5, rtol=1e-5)


@settings(max_examples=150, deadline=None)
@given(
    kind=st.sampled_from(KINDS),
    seed=st.integers(0, 10**6),
    vocab=st.integers(2, 400),
    num_candidates=st.integers(1, 8),
    data=st.data(),
)
def test_candidates_of_shards_equal_those_of_the_whole_vocabulary(
    kind: str, seed: int, vocab: int, num_candidates: int, data: st.DataObject
) -> None:
    logits = random_logits(kind, seed, 2, 3, vocab)
    cuts = [0, *sorted(data.draw(st.lists(st.integers(0, vocab), min_size=1, max_size=3))), vocab]
    shards = [
        shard_candidates(logits[:, :, first:end], num_candidates, first)
        for first, end in itertools.pairwise(cuts)
    ]
    found, whole = merge_shards(torch.stack(shards), vocab), top_candidates(logits, num_candidates)
    assert torch.equal(found.token_id_RDK, whole.token_id_RDK)
    torch.testing.assert_close(found.log_prob_RDK, whole.log_prob_RDK, atol=1e-5, rtol=1e-6)


def test_a_shard_of_masked_tokens_gives_way() -> None:
    logits = torch.tensor([[[-torch.inf, -torch.inf, 1.0, 0.0]]])
    shards = [shard_candidates(part, 3, 2 * rank) for rank, part in enumerate(logits.split(2, dim=2))]
    found = merge_shards(torch.stack(shards), 4)
    assert found.token_id_RDK.tolist() == [[[2, 3, 0]]]
    torch.testing.assert_close(found.log_prob_RDK, top_candidates(logits, 3).log_prob_RDK)


def test_one_candidate_per_depth_makes_a_chain() -> None:
    logits = random_logits("normal", 1, 3, 5, 11)
    anchor = torch.tensor([4, 5, 6])
    trees = tree_of_candidates(anchor, top_candidates(logits, 1), 4)
    chain = chain_trees(anchor, logits.argmax(dim=2)[:, :4])
    assert torch.equal(trees.token_id_RN, chain.token_id_RN)
    assert torch.equal(trees.parent_RN, chain.parent_RN)
    assert torch.equal(trees.depth_RN, chain.depth_RN)


def test_a_certain_child_goes_after_its_parent_and_before_the_next_sibling() -> None:
    log_prob = torch.tensor([[[-0.5, -0.5], [0.0, -90.0]]])
    candidates = Candidates(torch.tensor([[[7, 8], [3, 4]]]), log_prob)
    tokens = [paths(tree_of_candidates(torch.zeros(1), candidates, n), 0) for n in (1, 2, 3, 4)]
    assert tokens[0] == [(7,)]
    assert tokens[1] == [(7,), (7, 3)]
    assert tokens[2] == [(7,), (8,), (7, 3)]
    assert tokens[3] == [(7,), (8,), (7, 3), (8, 3)]


@pytest.mark.parametrize(("num_depths", "num_nodes"), [(3, 0), (0, 3), (0, 0)])
def test_without_budget_or_depth_only_the_root_is_left(num_depths: int, num_nodes: int) -> None:
    trees = best_first_trees(torch.tensor([5, 6]), torch.zeros(2, num_depths, 4), num_nodes)
    assert (trees.num_nodes, trees.max_depth) == (1, 0)
    assert trees.token_id_RN.tolist() == [[5], [6]]


def test_the_tree_has_no_more_nodes_than_there_are_prefixes() -> None:
    trees = best_first_trees(torch.zeros(1), torch.zeros(1, 3, 2), 100)
    assert trees.num_nodes == 1 + 2 + 4 + 8


def test_logits_that_are_no_numbers_still_make_a_tree() -> None:
    trees = best_first_trees(torch.zeros(1), torch.full((1, 3, 5), torch.nan), 6)
    assert len(paths(trees, 0)) == 6


def test_log_probabilities_that_are_no_numbers_count_as_impossible() -> None:
    log_prob = torch.tensor([[[-0.5, -1.0, torch.nan], [torch.nan, torch.nan, torch.nan]]])
    candidates = Candidates(torch.arange(6).view(1, 2, 3), log_prob)
    for num_nodes in (2, 5, 12):
        trees = tree_of_candidates(torch.zeros(1), candidates, num_nodes)
        assert_same_trees(trees, in_tensors(torch.zeros(1), candidates, num_nodes))
        oracle = heap_tree(log_prob[0], candidates.token_id_RDK[0], num_nodes)
        assert set(paths(trees, 0)) == {node.path for node in oracle}


# The heap in a process of its own: whether numba is there is settled once per process.
WITHOUT_NUMBA = """
import logging, sys
import torch
from dflash_online.tree import build
from dflash_online.tree.candidates import top_candidates
assert "numba" not in sys.modules, "imported before a tree was due"
{before}
logging.basicConfig(level=logging.WARNING)
candidates = top_candidates(torch.randn(3, 4, 50, generator=torch.Generator().manual_seed(0)), 8)
build.warm_up("cpu")
for _ in range(2):
    trees = build.tree_of_candidates(torch.arange(3), candidates, 8)
print(trees.token_id_RN.tolist(), trees.parent_RN.tolist(), build.compiled_heap() is not None)
"""


def build_elsewhere(before: str, **environment: str) -> tuple[str, str]:
    """Output and log of a process that builds trees."""
    result = subprocess.run(
        [sys.executable, "-c", WITHOUT_NUMBA.format(before=before)],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    return result.stdout, result.stderr


def test_without_numba_trees_are_the_same_and_the_log_says_so_once() -> None:
    candidates = top_candidates(torch.randn(3, 4, 50, generator=torch.Generator().manual_seed(0)), 8)
    trees = tree_of_candidates(torch.arange(3), candidates, 8)
    expected = f"{trees.token_id_RN.tolist()} {trees.parent_RN.tolist()}"
    output, log = build_elsewhere("")
    assert (output.strip(), log) == (f"{expected} True", "")
    output, log = build_elsewhere("sys.modules['numba'] = None  # as if it were not installed")
    assert output.strip() == f"{expected} False"
    assert log.count("for want of numba") == 1


def test_compiling_needs_no_folder_to_write_to() -> None:
    output, log = build_elsewhere("", NUMBA_CACHE_DIR="/proc/none", HOME="/proc/none")
    assert output.strip().endswith("True")
    assert log == ""


def test_bad_input_is_refused_by_name() -> None:
    logits = torch.zeros(2, 3, 4)
    with pytest.raises(ShapeError, match=r"\(3,\)"):
        best_first_trees(torch.zeros(3), logits, 2)
    with pytest.raises(ShapeError, match="V >= 1"):
        top_candidates(logits[0], 2)
    with pytest.raises(ConfigError, match="num_nodes"):
        best_first_trees(torch.zeros(2), logits, -1)
    with pytest.raises(ConfigError, match="num_candidates"):
        top_candidates(logits, 0)
    with pytest.raises(ConfigError, match="num_candidates"):
        shard_candidates(logits, 0, 0)
    with pytest.raises(ShapeError, match="K >= 1"):
        merge_shards(torch.zeros(2, 1, 1, 1, dtype=torch.int64), 4)


def test_no_value_is_read_back_by_the_host() -> None:
    # Tensors of the meta device have shapes and no values: reading one raises.
    anchor = torch.zeros(2, dtype=torch.int64, device="meta")
    logits = torch.zeros((2, 5, 4000), dtype=torch.bfloat16, device="meta")
    trees = best_first_trees(anchor, logits, 16)
    assert trees.token_id_RN.shape == trees.parent_RN.shape == trees.depth_RN.shape == (2, 17)
    shards = torch.stack(
        [shard_candidates(part, 16, 2000 * rank) for rank, part in enumerate(logits.split(2000, 2))]
    )
    assert tree_of_candidates(anchor, merge_shards(shards, 4000), 16).num_nodes == 17
    assert visibility(trees).shape == (2, 17, 17)
    assert [link.shape for link in links(trees)] == [(2, 17)] * 2
    committed = walk(trees, trees.token_id_RN)
    assert committed.produced_RP.shape == (2, 6)
    assert [ranks.shape for ranks in path_ranks(trees, committed.path_RP)] == [(2, 6)] * 2
