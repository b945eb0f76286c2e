"""Which keys a query sees in a decode, verify or prefill window on CPU. Pure torch; knows no SGLang.

Shape letters: R = requests, Q = queries of a window, L = keys.
"""

from __future__ import annotations

import torch


def window_mask(
    prefix_R: torch.Tensor,
    *,
    width: int,
    num_keys: int,
    sees_window: bool,
    sliding_window: int,
    tree_RQQ: torch.Tensor | None,
    tree_position_RQ: torch.Tensor | None = None,
) -> torch.Tensor:
    """Which keys each query of a window sees. Keys are `num_keys - width` prefix columns, then the window.

    Args:
        prefix_R: [R] int, committed tokens of each request; columns at and beyond it are padding.
        width: Q.
        sees_window: True when every query sees the whole window (bidirectional drafter layers).
        sliding_window: tokens before the current one that a sliding layer sees (SGLang's convention,
            W - 1); negative for full attention.
        tree_RQQ: [R, Q, Q] bool visibility within the window, instead of the causal triangle.
        tree_position_RQ: [R, Q] int, positions of the nodes; required with a tree and a sliding window, since
            nodes of a branch do not stand at their slot's position.

    Returns:
        [R, Q, num_keys] bool, True = visible. No row is empty: a query sees itself.
    """
    device, longest = prefix_R.device, num_keys - width
    column_L = torch.arange(longest, device=device)
    prefix_RQL = (column_L < prefix_R[:, None])[:, None, :].expand(-1, width, -1)
    slot_Q = torch.arange(width, device=device)
    if tree_RQQ is not None:
        window_RQQ = tree_RQQ.view(-1, width, width)
    elif sees_window:
        window_RQQ = torch.ones(1, width, width, dtype=torch.bool, device=device)
    else:
        window_RQQ = (slot_Q[None, :] <= slot_Q[:, None])[None]
    window_RQQ = window_RQQ.expand(prefix_R.shape[0], -1, -1)
    mask_RQL = torch.cat([prefix_RQL, window_RQQ], dim=2)
    if sliding_window >= 0:
        position_RQ = prefix_R[:, None] + slot_Q if tree_position_RQ is None else tree_position_RQ
        key_RL = torch.cat([column_L.expand(prefix_R.shape[0], -1), position_RQ], dim=1)
        mask_RQL = mask_RQL & (key_RL[:, None, :] >= position_RQ[:, :, None] - sliding_window)
    return mask_RQL
