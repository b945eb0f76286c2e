"""Which keys the nodes of a draft tree see, in the layout that GPU attention backends read. Pure torch.

    visibility of the trees [R, W, W] --flat_mask--> one row of cells: request by request, W * (L + W) each

The prefix is visible to every node. No value is read on the host: the number of cells is an upper bound that
the caller knows there, and the cells beyond the last request stay unread.

Shape letters: R = requests, W = width of the verify window, L = committed tokens of a request.
"""

from __future__ import annotations

import torch

from dflash_online.errors import ShapeError


def flat_mask(prefix_R: torch.Tensor, visible_RWW: torch.Tensor, num_cells: int) -> torch.Tensor:
    """The mask of a verify pass, SGLang's FULL_MASK layout.

    One request, one committed token, a root with one child (W = 2): rows `[1, 1, 0]` and `[1, 1, 1]`.

    Args:
        prefix_R: [R] int, L of each request.
        visible_RWW: [R, W, W] bool, entry (i, j) True when node i sees node j.
        num_cells: at least the sum of `W * (L + W)`.

    Returns:
        [num_cells] bool, True = visible.

    Raises:
        ShapeError: prefixes and trees are of different batches.
    """
    num_requests, width, _ = visible_RWW.shape
    if prefix_R.shape != (num_requests,):
        raise ShapeError(f"prefix {tuple(prefix_R.shape)}, visibility {tuple(visible_RWW.shape)}")
    slot_W = torch.arange(width, device=prefix_R.device)
    row_length_R = prefix_R.to(torch.int64) + width
    first_cell_R = (width * row_length_R).cumsum(0) - width * row_length_R
    first_window_RW = first_cell_R[:, None] + slot_W * row_length_R[:, None] + prefix_R[:, None]
    cell_RWW = first_window_RW[:, :, None] + slot_W
    mask = torch.ones(num_cells, dtype=torch.bool, device=prefix_R.device)
    return mask.scatter_(0, cell_RWW.flatten(), visible_RWW.flatten())
