"""Best trees, in tensors and by the compiled heap, against the heap oracle and brute force, ties included."""

from __future__ import annotations

import itertools
import logging
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

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


def trees_in_tensors(anchor_R: Tensor, candidates: Candidates, num_nodes: int) -> DraftTrees:
    """The trees of another device, on the CPU."""
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
    assert_same_trees(trees, trees_in_tensors(torch.arange(num_requests), candidates, num_nodes))
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
    trees = tree_of_candidates(torch.arange(2), candidates, 64)
    assert_same_trees(trees, trees_in_tensors(torch.arange(2), candidates, 64))
    for request in range(2):
        oracle = heap_tree(candidates.log_prob_RDK[request], candidates.token_id_RDK[request], 64)
        assert set(paths(trees, request)) == {node.path for node in oracle}


LOG_PROBS = (0.0, -0.0, -1e-45, -0.1, -0.5, -0.5 - 2**-24, -1.0, -(2.0**24), -torch.inf, torch.nan)


@settings(max_examples=300, deadline=None)
@given(
    log_probs=st.lists(st.lists(st.sampled_from(LOG_PROBS), min_size=1, max_size=5), min_size=1, max_size=6),
    num_requests=st.integers(1, 3),
    num_nodes=st.integers(1, 40),
)
def test_sums_that_round_to_ties_make_the_same_trees(
    log_probs: list[list[float]], num_requests: int, num_nodes: int
) -> None:
    # Log-probabilities that are no numbers count as -inf, as absent ones do here.
    width = max(map(len, log_probs))
    rows = [[*row, *[torch.nan] * (width - len(row))] for row in log_probs]
    falling_DK = torch.tensor(rows).nan_to_num(nan=-torch.inf, neginf=-torch.inf).sort(descending=True).values
    log_prob_DK = falling_DK.masked_fill(falling_DK.isneginf(), torch.nan)
    # Requests differ: each starts one depth later.
    log_prob_RDK = torch.stack([log_prob_DK.roll(-request, dims=0) for request in range(num_requests)])
    token_RDK = torch.arange(width).expand(log_prob_RDK.shape)
    anchor_R = torch.zeros(num_requests, dtype=torch.int64)
    trees = tree_of_candidates(anchor_R, Candidates(token_RDK, log_prob_RDK), num_nodes)
    assert_same_trees(trees, trees_in_tensors(anchor_R, Candidates(token_RDK, log_prob_RDK), num_nodes))
    with_infinity_RDK = log_prob_RDK.nan_to_num(nan=-torch.inf, neginf=-torch.inf)
    assert_same_trees(
        trees, tree_of_candidates(anchor_R, Candidates(token_RDK, with_infinity_RDK), num_nodes)
    )
    for request in range(num_requests):
        oracle = heap_tree(log_prob_RDK[request], token_RDK[request], num_nodes)
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


@pytest.fixture
def fresh_heap() -> Iterator[None]:
    """A process that has not asked for the compiled heap yet, and again afterwards."""
    build.compiled_heap.cache_clear()
    yield
    build.compiled_heap.cache_clear()


def test_a_cpu_uses_the_compiled_heap(fresh_heap: None, caplog: pytest.LogCaptureFixture) -> None:
    build.warm_up("cpu")
    heap_nodes = build.compiled_heap()
    assert heap_nodes is not None
    assert heap_nodes.__module__ == "dflash_online.tree.heap"
    assert caplog.records == []


def test_other_devices_compile_nothing(fresh_heap: None) -> None:
    build.warm_up("meta")
    build.warm_up(torch.device("cuda", 1))
    assert build.compiled_heap.cache_info().currsize == 0


def test_without_numba_the_trees_are_the_same_and_one_warning_is_logged(
    fresh_heap: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    candidates = top_candidates(random_logits("tied", 5, 4, 6, 20), 16)
    expected = tree_of_candidates(torch.arange(4), candidates, 16)
    build.compiled_heap.cache_clear()
    monkeypatch.delitem(sys.modules, "dflash_online.tree.heap")
    monkeypatch.setitem(sys.modules, "numba", None)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            assert_same_trees(tree_of_candidates(torch.arange(4), candidates, 16), expected)
        build.warm_up("cpu")
    assert [record.name for record in caplog.records] == ["dflash_online.tree.build"]
    assert "numba" in caplog.text


def test_what_numba_cannot_compile_is_an_import_error(
    fresh_heap: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    import numba
    from numba.core.errors import TypingError

    def refuse(signature: str) -> Callable[[object], object]:
        def compile_now(function: object) -> object:
            raise TypingError("as a newer numba might")

        return compile_now

    monkeypatch.delitem(sys.modules, "dflash_online.tree.heap", raising=False)
    monkeypatch.setattr(numba, "njit", refuse)
    assert build.compiled_heap() is None
    assert "cannot compile _is_before" in caplog.text


IN_A_NEW_PROCESS = """
import sys, torch
from dflash_online.tree import build
assert "numba" not in sys.modules
build.warm_up("cpu")
assert build.compiled_heap() is not None
trees = build.best_first_trees(torch.zeros(2), torch.zeros(2, 3, 2), 100)
assert trees.num_nodes == 15
"""


def test_no_cache_folder_is_needed_and_numba_is_imported_late(tmp_path: Path) -> None:
    # Not even root can make a folder below a file.
    (tmp_path / "file").touch()
    root = Path(build.__file__).parents[2]
    folder = str(tmp_path / "file" / "numba")
    environment = {**os.environ, "NUMBA_CACHE_DIR": folder, "HOME": folder, "PYTHONPATH": str(root)}
    found = subprocess.run(
        [sys.executable, "-c", IN_A_NEW_PROCESS],
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert (found.returncode, found.stderr) == (0, "")
    assert [entry.name for entry in tmp_path.iterdir()] == ["file"]


# Tensors of the meta device have shapes and no values: to read one, or to make a shape of values, raises.


@pytest.mark.parametrize(
    "read",
    [
        lambda tensor: tensor[0].item(),
        lambda tensor: tensor.tolist(),
        lambda tensor: tensor.cpu(),
        lambda tensor: tensor.nonzero(),
        lambda tensor: tensor[tensor > 0],
        lambda tensor: bool((tensor > 0).all()),
        lambda tensor: tensor.repeat_interleave(tensor),
        lambda tensor: tensor + torch.zeros(3),
    ],
    ids=["item", "tolist", "cpu", "nonzero", "mask", "bool", "repeat", "mixed"],
)
def test_a_read_by_the_host_would_be_seen(read: Callable[[Tensor], object]) -> None:
    # NotImplementedError is a RuntimeError.
    with pytest.raises(RuntimeError, match=r"meta|data-dependent"):
        read(torch.zeros(3, dtype=torch.int64, device="meta"))


def test_no_value_is_read_back_by_the_host() -> None:
    anchor_R = torch.zeros(2, dtype=torch.int64, device="meta")
    logits_RDV = torch.zeros((2, 5, 4000), dtype=torch.bfloat16, device="meta")
    trees = best_first_trees(anchor_R, logits_RDV, 16)
    assert trees.token_id_RN.shape == trees.parent_RN.shape == trees.depth_RN.shape == (2, 17)
    assert visibility(trees).shape == (2, 17, 17)
    assert links(trees)[0].shape == links(trees)[1].shape == (2, 17)
    committed = walk(trees, trees.token_id_RN)
    assert committed.path_RP.shape == committed.produced_RP.shape == (2, 6)
    assert committed.num_committed_R.shape == committed.bonus_R.shape == (2,)
    ranks_RP, offered_RP = path_ranks(trees, committed.path_RP)
    assert ranks_RP.shape == offered_RP.shape == (2, 6)


def test_no_value_of_a_shard_is_read_back_by_the_host() -> None:
    logits_RDV = torch.zeros((2, 5, 4000), dtype=torch.bfloat16, device="meta")
    # The last shard holds fewer tokens than there are candidates.
    parts = [logits_RDV[:, :, :2000], logits_RDV[:, :, 2000:3990], logits_RDV[:, :, 3990:]]
    shards = [shard_candidates(part, 16, 2000) for part in parts]
    candidates = merge_shards(torch.stack(shards), 4000)
    assert candidates.token_id_RDK.shape == candidates.log_prob_RDK.shape == (2, 5, 16)
    trees = tree_of_candidates(torch.zeros(2, dtype=torch.int64, device="meta"), candidates, 16)
    assert {trees.token_id_RN.device.type, trees.parent_RN.device.type} == {"meta"}
