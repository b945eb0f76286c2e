"""Windows of a verify pass: the mask cell by cell, widening, and what is refused."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_online.errors import ConfigError, ShapeError
from dflash_online.tree.build import best_first_trees
from dflash_online.tree.draft_tree import DraftTrees, chain_trees, visibility
from server_patches.compat import MAX_NODES_ENV, VERIFY_WIDTHS_ENV
from server_patches.verify_graphs import VerifyGraphs
from server_patches.verify_mask import flat_mask
from server_patches.verify_window import (
    VerifyWindows,
    check_widths,
    live_rows,
    pad_visibility,
    read_mask_in_graphs,
    widths_from_environment,
)


def grow(num_requests: int, num_nodes: int) -> DraftTrees:
    generator = torch.Generator().manual_seed(num_nodes)
    logits = torch.randn(num_requests, 4, 9, generator=generator)
    return best_first_trees(torch.arange(num_requests), logits, num_nodes)


def windows(backend: str, widths: tuple[int, ...] = (), max_width: int = 32) -> VerifyWindows:
    """As after `prepare`, without SGLang."""
    made = VerifyWindows(max_width, context_length=100)
    made.widths, made.backend_name, made.attn_backend = widths, backend, SimpleNamespace()
    return made


@settings(max_examples=60, deadline=None)
@given(
    prefix=st.lists(st.integers(0, 9), min_size=1, max_size=4),
    num_nodes=st.integers(0, 12),
    num_added=st.integers(0, 3),
    num_spare=st.integers(0, 5),
)
def test_each_cell_of_the_mask_is_that_of_its_node_and_key(
    prefix: list[int], num_nodes: int, num_added: int, num_spare: int
) -> None:
    trees = grow(len(prefix), num_nodes)
    width = trees.num_nodes + num_added
    sees = pad_visibility(visibility(trees), width)
    num_cells = sum(width * (length + width) for length in prefix)
    mask = flat_mask(torch.tensor(prefix), sees, num_cells + num_spare).tolist()
    cell = 0
    for request, length in enumerate(prefix):
        parent = trees.parent_RN[request].tolist() + [-1] * num_added
        for node in range(width):
            own_path, above = {node}, parent[node]
            while above >= 0:
                own_path.add(above)
                above = parent[above]
            for key in range(length + width):
                assert mask[cell] == (key < length or key - length in own_path)
                cell += 1


def test_a_mask_of_another_batch_is_refused() -> None:
    with pytest.raises(ShapeError, match="prefix"):
        flat_mask(torch.tensor([1, 2]), torch.ones(1, 2, 2, dtype=torch.bool), 8)


def test_a_tree_is_widened_to_the_next_width_and_no_further() -> None:
    made = windows("TritonAttnBackend", widths=(1, 8, 17))
    assert [made.width_of(nodes) for nodes in (1, 2, 8, 9, 17, 18)] == [1, 8, 8, 17, 17, 18]


def test_nodes_that_are_added_change_no_row_that_is_kept() -> None:
    trees = grow(2, 5)
    made = windows("BatchedTorchAttnBackend")
    inputs = made.inputs(trees, torch.tensor([3, 7]), 9, key_lengths_sum=28)
    assert inputs.mask is not None
    assert torch.equal(inputs.mask[:, :6, :6], visibility(trees))
    assert not inputs.mask[:, :6, 6:].any()
    assert not inputs.mask[:, 6:, :6].any()
    # A row without a key to see would be NaN.
    assert torch.equal(inputs.mask[:, 6:, 6:], torch.eye(3, dtype=torch.bool).expand(2, 3, 3))
    position = inputs.position.view(2, 9)[:, :6]
    assert torch.equal(position, torch.tensor([[3], [7]]) + trees.depth_RN)
    assert torch.equal(inputs.token_id.view(2, 9)[:, :6], trees.token_id_RN)
    rows = torch.arange(2 * 9)[:, None]
    assert live_rows(rows, 2, 6).flatten().tolist() == [*range(6), *range(9, 15)]


def test_chains_need_a_mask_only_where_a_graph_reads_one() -> None:
    chain = chain_trees(torch.tensor([1]), torch.tensor([[2, 3]]))
    made = windows("TritonAttnBackend")
    assert made.inputs(chain, torch.tensor([4]), 3, key_lengths_sum=7).mask is None
    made.is_always_masked = True
    mask = made.inputs(chain, torch.tensor([4]), 3, key_lengths_sum=7).mask
    assert mask is not None
    assert mask.view(3, 7)[:, 4:].tolist() == torch.ones(3, 3).tril().bool().tolist()


def test_a_mask_never_outgrows_what_a_graph_reserves_for_it() -> None:
    made = windows("TritonAttnBackend")
    # Host lengths may count reserved room beyond the context of 100.
    mask = made.inputs(grow(2, 3), torch.tensor([90, 96]), 4, key_lengths_sum=10_000).mask
    assert mask is not None
    assert mask.shape == (4 * 2 * 104,)


@pytest.mark.parametrize(
    ("backend", "max_nodes", "window", "flags", "reason"),
    [
        ("BatchedTorchAttnBackend", "0", 64, {}, None),
        ("TritonAttnBackend", "16", None, {}, None),
        ("FlashInferAttnBackend", "16", None, {}, None),
        ("FlashAttentionBackend", "16", None, {}, "--attention-backend triton"),
        ("TritonAttnBackend", "0", None, {}, "--max-nodes"),
        ("TritonAttnBackend", "16", 64, {}, "sliding windows"),
        ("TritonAttnBackend", "16", None, {"use_verify_splitkv": True}, "for a chain"),
        ("TritonAttnBackend", "16", None, {"use_verify_shared_kv": True}, "for a chain"),
    ],
)
def test_trees_are_refused_with_a_reason_where_no_mask_is_read(
    monkeypatch: pytest.MonkeyPatch,
    backend: str,
    max_nodes: str,
    window: int | None,
    flags: dict[str, bool],
    reason: str | None,
) -> None:
    monkeypatch.setenv(MAX_NODES_ENV, max_nodes)
    made = windows(backend)
    made.attn_backend = SimpleNamespace(**flags)
    refusal = made.why_no_mask(SimpleNamespace(sliding_window_size=window))
    assert refusal is None if reason is None else reason in (refusal or "")


@pytest.mark.parametrize("width", [0, 18])
def test_a_width_that_no_memory_is_reserved_for_is_refused(width: int) -> None:
    with pytest.raises(ConfigError) as refused:
        check_widths([8, width], max_width=17)
    assert (refused.value.field, refused.value.value) == ("verify_widths", width)
    assert "1..17" in str(refused.value)
    assert check_widths([17, 1, 17], max_width=17) == (1, 17)


def test_widths_come_from_the_environment_or_are_left_open(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VERIFY_WIDTHS_ENV, raising=False)
    assert widths_from_environment() is None
    monkeypatch.setenv(VERIFY_WIDTHS_ENV, "")
    assert widths_from_environment() == []
    monkeypatch.setenv(VERIFY_WIDTHS_ENV, "1,9")
    assert widths_from_environment() == [1, 9]


@pytest.mark.parametrize(
    ("backend", "max_nodes", "expected"),
    [
        ("TritonAttnBackend", "0", False),
        ("TritonAttnBackend", "16", True),
        ("FlashAttentionBackend", "16", False),
    ],
)
def test_graphs_read_a_mask_where_trees_may_come(
    monkeypatch: pytest.MonkeyPatch, backend: str, max_nodes: str, expected: bool
) -> None:
    monkeypatch.setenv(MAX_NODES_ENV, max_nodes)
    assert read_mask_in_graphs((backend, False)) == (backend, expected)
    assert read_mask_in_graphs((backend, True)) == (backend, True)


def test_the_graphs_of_a_width_serve_one_pass_and_no_other() -> None:
    runner: Any = SimpleNamespace(attn_backend="own", decode_cuda_graph_runner="own graphs")
    graphs = VerifyGraphs(runner)
    graphs._captured = {8: ("of 8", "graphs of 8")}
    with graphs.using(17):
        assert (runner.attn_backend, runner.decode_cuda_graph_runner) == ("own", "own graphs")

    def fail_inside() -> None:
        with graphs.using(8):
            assert (runner.attn_backend, runner.decode_cuda_graph_runner) == ("of 8", "graphs of 8")
            raise RuntimeError("a pass that failed")

    with pytest.raises(RuntimeError, match="failed"):
        fail_inside()
    assert (runner.attn_backend, runner.decode_cuda_graph_runner) == ("own", "own graphs")
