"""The mask of CPU verify against the rule, key by key."""

from __future__ import annotations

import pytest
import torch

from server_patches.cpu.window_mask import window_mask


def is_visible(key: int, prefix: int, longest: int, query: int, *, sees_window: bool, window: int) -> bool:
    """The rule in words: committed keys; in the window itself and before, or all; at most `window` back."""
    if key < longest:
        if key >= prefix:
            return False
        position = key
    else:
        slot = key - longest
        if slot > query and not sees_window:
            return False
        position = prefix + slot
    return window < 0 or position >= prefix + query - window


@pytest.mark.parametrize("sees_window", [True, False])
@pytest.mark.parametrize("window", [-1, 0, 2, 5])
def test_window_mask_follows_the_rule_for_every_key(sees_window: bool, window: int) -> None:
    prefixes, width = [4, 1, 6], 3
    mask = window_mask(
        torch.tensor(prefixes),
        width=width,
        num_keys=max(prefixes) + width,
        sees_window=sees_window,
        sliding_window=window,
        tree_RQQ=None,
    )
    for request, prefix in enumerate(prefixes):
        for query in range(width):
            for key in range(max(prefixes) + width):
                wanted = is_visible(key, prefix, 6, query, sees_window=sees_window, window=window)
                assert bool(mask[request, query, key]) == wanted


def test_a_tree_replaces_the_causal_triangle() -> None:
    tree = torch.tensor([[[1, 0, 0], [1, 1, 0], [1, 0, 1]]], dtype=torch.bool)
    mask = window_mask(
        torch.tensor([2]), width=3, num_keys=5, sees_window=False, sliding_window=-1, tree_RQQ=tree
    )
    assert torch.equal(mask[0, :, 2:], tree[0])
    assert bool(mask[0, :, :2].all())


def test_a_sliding_layer_measures_a_tree_by_depth_not_by_slot() -> None:
    """Node 2 is a sibling of node 1: at depth 1 it sees as far back as node 1 does."""
    tree = torch.tensor([[[1, 0, 0], [1, 1, 0], [1, 0, 1]]], dtype=torch.bool)
    prefix = 4
    mask = window_mask(
        torch.tensor([prefix]),
        width=3,
        num_keys=prefix + 3,
        sees_window=False,
        sliding_window=2,
        tree_RQQ=tree,
        tree_position_RQ=torch.tensor([[prefix, prefix + 1, prefix + 1]]),
    )
    assert mask[0].tolist() == [
        [False, False, True, True, True, False, False],
        [False, False, False, True, True, True, False],
        [False, False, False, True, True, False, True],
    ]
