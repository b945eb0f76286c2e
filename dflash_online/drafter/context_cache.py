"""Keys and values of the committed context, one pair per draft layer, growing while a sequence decodes.

    drafter.extend_context --append, advance--> [ ContextCache ] --layer--> drafter.draft_block

Full: the buffers double. One sequence, one thread. Knows nothing of features or weights.

Shape letters: S = cached rows, C = new rows, M = key/value heads, d = head size.
"""

from __future__ import annotations

import torch
from torch import Tensor

_FIRST_ROWS = 256


class ContextCache:
    """Invariant between two calls of `advance`: every layer holds the same `num_rows` rows."""

    def __init__(
        self, num_layers: int, num_kv_heads: int, head_dim: int, *, dtype: torch.dtype, device: torch.device
    ) -> None:
        shape = (2 * num_layers, _FIRST_ROWS, num_kv_heads, head_dim)
        self._rows = torch.empty(shape, dtype=dtype, device=device)
        self._positions = torch.empty(_FIRST_ROWS, dtype=torch.int64, device=device)
        self.num_rows = 0

    @property
    def positions_S(self) -> Tensor:
        """[S] int64, rising."""
        return self._positions[: self.num_rows]

    def append(self, layer: int, key_CMd: Tensor, value_CMd: Tensor) -> None:
        """Write one layer's new rows; they count once `advance` is called."""
        end = self.num_rows + len(key_CMd)
        self._reserve(end)
        self._rows[2 * layer, self.num_rows : end] = key_CMd
        self._rows[2 * layer + 1, self.num_rows : end] = value_CMd

    def advance(self, positions_C: Tensor) -> None:
        """Make the rows that every layer has appended part of the context."""
        end = self.num_rows + len(positions_C)
        self._reserve(end)
        self._positions[self.num_rows : end] = positions_C
        self.num_rows = end

    def layer(self, layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values of one layer: [S, M, d] views."""
        return self._rows[2 * layer, : self.num_rows], self._rows[2 * layer + 1, : self.num_rows]

    def _reserve(self, num_rows: int) -> None:
        capacity = self._rows.shape[1]
        if num_rows <= capacity:
            return
        larger = max(2 * capacity, num_rows)
        rows = self._rows.new_empty(self._rows.shape[0], larger, *self._rows.shape[2:])
        rows[:, :capacity] = self._rows
        positions = self._positions.new_empty(larger)
        positions[:capacity] = self._positions
        self._rows, self._positions = rows, positions
