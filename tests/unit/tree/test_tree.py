"""Trees of any shape: visibility and walk against slow, obvious twins."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_online.errors import ConfigError, ShapeError
from dflash_online.tree.draft_tree import DraftTrees, chain_trees, links, root_trees, visibility
from dflash_online.tree.policy import Policy, PolicyMode
from dflash_online.tree.walk import walk


def random_trees(seed: int, num_requests: int, num_nodes: int, vocab: int) -> DraftTrees:
    """Random parents; siblings carry distinct tokens where the vocabulary allows, as builders guarantee."""
    generator = torch.Generator().manual_seed(seed)
    parents, tokens, depths = [], [], []
    for _ in range(num_requests):
        parent, token, depth = [-1], [0], [0]
        while len(parent) < num_nodes:
            above = int(torch.randint(len(parent), (), generator=generator))
            taken = {token[i] for i, p in enumerate(parent) if p == above}
            free = [t for t in range(vocab) if t not in taken]
            if free:
                parent.append(above)
                token.append(free[int(torch.randint(len(free), (), generator=generator))])
                depth.append(depth[above] + 1)
        parents.append(parent)
        tokens.append(token)
        depths.append(depth)
    depth_RN = torch.tensor(depths)
    return DraftTrees(
        torch.tensor(tokens), torch.tensor(parents), depth_RN, max_depth=int(depth_RN.max()), is_chain=False
    )


def slow_walk(trees: DraftTrees, target: torch.Tensor, request: int) -> tuple[list[int], list[int]]:
    """Path of node indices, and tokens produced, by a loop a child could follow."""
    parent, token = trees.parent_RN[request].tolist(), trees.token_id_RN[request].tolist()
    node, path, produced = 0, [0], []
    while True:
        wanted = int(target[request, node])
        produced.append(wanted)
        children = [i for i, p in enumerate(parent) if p == node and token[i] == wanted]
        if not children:
            return path, produced
        node = children[0]
        path.append(node)


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10**6), num_nodes=st.integers(1, 12), vocab=st.integers(3, 5))
def test_walk_equals_following_children_one_by_one(seed: int, num_nodes: int, vocab: int) -> None:
    trees = random_trees(seed, 3, num_nodes, vocab)
    target = torch.randint(vocab, (3, num_nodes), generator=torch.Generator().manual_seed(seed + 1))
    result = walk(trees, target)
    for request in range(3):
        path, produced = slow_walk(trees, target, request)
        count = int(result.num_committed_R[request])
        assert result.path_RP[request, :count].tolist() == path
        assert result.produced_RP[request, :count].tolist() == produced
        assert int(result.bonus_R[request]) == produced[-1]
        assert int(result.num_accepted_R[request]) == len(path) - 1


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10**6), num_nodes=st.integers(1, 12))
def test_visibility_equals_walking_to_the_root(seed: int, num_nodes: int) -> None:
    trees = random_trees(seed, 2, num_nodes, vocab=5)
    seen = visibility(trees)
    for request in range(2):
        parent = trees.parent_RN[request].tolist()
        for node in range(num_nodes):
            ancestors, above = set(), node
            while above >= 0:
                ancestors.add(above)
                above = parent[above]
            assert set(seen[request, node].nonzero().flatten().tolist()) == ancestors


def test_a_chain_accepts_its_longest_right_prefix() -> None:
    trees = chain_trees(torch.tensor([7, 7]), torch.tensor([[1, 2, 3], [1, 9, 3]]))
    target = torch.tensor([[1, 2, 3, 4], [1, 2, 3, 4]])
    result = walk(trees, target)
    assert result.num_accepted_R.tolist() == [3, 1]
    assert result.bonus_R.tolist() == [4, 2]
    assert result.produced_RP[0].tolist() == [1, 2, 3, 4]
    assert result.produced_RP[1, :2].tolist() == [1, 2]


def test_the_visibility_of_a_chain_is_the_causal_triangle() -> None:
    seen = visibility(chain_trees(torch.tensor([0]), torch.tensor([[1, 2]])))
    assert torch.equal(seen[0], torch.ones(3, 3).tril().bool())


def test_a_root_alone_commits_the_targets_next_token() -> None:
    trees = root_trees(torch.tensor([5, 6]))
    result = walk(trees, torch.tensor([[8], [9]]))
    assert (trees.num_nodes, trees.max_depth) == (1, 0)
    assert result.num_committed_R.tolist() == [1, 1]
    assert result.produced_RP.tolist() == [[8], [9]]


def test_chains_of_another_batch_are_refused() -> None:
    with pytest.raises(ShapeError, match=r"\(2,\)"):
        chain_trees(torch.tensor([1, 2]), torch.zeros(3, 4, dtype=torch.int64))


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"mode": PolicyMode.OFF, "num_nodes": 1}, "num_nodes"),
        ({"mode": PolicyMode.CHAIN, "num_nodes": 0}, "num_nodes"),
        ({"mode": PolicyMode.TREE, "num_nodes": 0}, "num_nodes"),
        ({"mode": PolicyMode.AUTO, "num_nodes": -1}, "num_nodes"),
        ({"mode": PolicyMode.CHAIN, "num_nodes": 1, "max_batch_size": 0}, "max_batch_size"),
        ({"mode": PolicyMode.CHAIN, "num_nodes": 1, "probe_interval": 1}, "probe_interval"),
    ],
)
def test_a_policy_names_the_field_that_is_out_of_bounds(fields: dict[str, object], field: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Policy(**fields)  # type: ignore[arg-type]
    assert caught.value.field == field


def test_a_policy_drafts_only_up_to_its_largest_batch() -> None:
    policy = Policy(mode=PolicyMode.CHAIN, num_nodes=7, max_batch_size=4)
    assert [policy.num_drafts(n, step=0) for n in (1, 4, 5)] == [7, 7, 0]
    assert Policy(mode=PolicyMode.OFF, num_nodes=0).num_drafts(1, step=0) == 0


def test_probes_draft_every_nth_step_of_a_batch_that_is_too_large() -> None:
    policy = Policy(mode=PolicyMode.CHAIN, num_nodes=3, max_batch_size=1, probe_interval=4)
    assert [policy.num_drafts(8, step) for step in range(8)] == [3, 0, 0, 0, 3, 0, 0, 0]
    assert [policy.num_drafts(1, step) for step in range(4)] == [3] * 4


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10**6), num_nodes=st.integers(1, 12))
def test_links_lead_to_every_child_in_index_order(seed: int, num_nodes: int) -> None:
    trees = random_trees(seed, 2, num_nodes, vocab=12)
    first_child_RN, next_sibling_RN = links(trees)
    for request in range(2):
        parent = trees.parent_RN[request].tolist()
        for node in range(num_nodes):
            children, child = [], int(first_child_RN[request, node])
            while child != -1:
                children.append(child)
                child = int(next_sibling_RN[request, child])
            assert children == [i for i, p in enumerate(parent) if p == node]
