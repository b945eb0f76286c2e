"""The window of a verify pass: trees of N nodes in W >= N positions, W being a width that is prepared for.

    DraftTrees --inputs--> token ids, positions, mask of W nodes --target--> rows of W --live--> rows of N

A CUDA graph serves one width only, so a tree is widened to the next one that was captured (`verify_graphs`).
The nodes that are added see themselves alone, nobody sees them, and their rows are cut off before the walk:
they cost time and change nothing. Where no width fits, the window is as wide as the tree. One per worker.

Shape letters: R = requests, N = nodes, W = width of the window.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from dflash_online.errors import ConfigError
from dflash_online.tree.draft_tree import DraftTrees, visibility
from server_patches.compat import MAX_NODES_ENV, VERIFY_WIDTHS_ENV
from server_patches.verify_graphs import VerifyGraphs
from server_patches.verify_mask import flat_mask

FLAT_MASK_BACKENDS = frozenset({"TritonAttnBackend", "FlashInferAttnBackend"})
WINDOW_MASK_BACKENDS = frozenset({"BatchedTorchAttnBackend"})


@dataclass(frozen=True, slots=True)
class WindowInputs:
    """What the target reads of a window."""

    token_id: torch.Tensor  # [R*W] int64
    position: torch.Tensor  # [R*W] int64
    mask: torch.Tensor | None  # as the attention backend wants it; None: causal within the window


class VerifyWindows:
    """Widths and masks of one worker's verify passes."""

    def __init__(self, max_width: int, context_length: int) -> None:
        self.widths: tuple[int, ...] = ()
        self.attn_backend: Any = None
        self.backend_name = ""
        self.is_always_masked = False
        """Whether chains need a mask too: a graph that was captured with one always reads it."""
        self._max_width, self._context_length = max_width, context_length

    def prepare(self, widths: Sequence[int], attn_backend: Any, graphs: VerifyGraphs) -> None:
        """Once the target's attention and SGLang's own graphs are there; captures the other widths.

        Raises:
            ConfigError: a width is below 1 or above the widest window that memory is reserved for.
        """
        from sglang.srt.speculative.dflash_utils import resolve_dflash_verify_mask_policy

        self.widths = check_widths(widths, self._max_width)
        self.attn_backend = attn_backend
        self.backend_name, reads_mask_in_graph = resolve_dflash_verify_mask_policy(attn_backend)
        self.is_always_masked = graphs.has_graphs and reads_mask_in_graph
        graphs.capture(self.widths)

    def describe(self) -> dict[str, Any]:
        """The `verify` object of /dflash/info."""
        return {"attention_backend": self.backend_name, "widths": list(self.widths)}

    def why_no_mask(self, model_runner: Any) -> str | None:
        """Why the target's attention cannot verify a tree; None when it can."""
        name = self.backend_name
        if name in WINDOW_MASK_BACKENDS:
            return None
        if name not in FLAT_MASK_BACKENDS:
            return f"attention backend {name} reads no tree mask: serve with --attention-backend triton"
        if int(os.environ.get(MAX_NODES_ENV, "0")) == 0:
            return "the server was started without --max-nodes"
        if model_runner.sliding_window_size is not None:
            return f"{name} measures sliding windows by slot, and a tree's nodes stand at their depth"
        if getattr(self.attn_backend, "use_verify_splitkv", False) or getattr(
            self.attn_backend, "use_verify_shared_kv", False
        ):
            return f"{name} verifies with a kernel that takes every window for a chain"
        return None

    def width_of(self, num_nodes: int) -> int:
        """The smallest width that was prepared for and holds the nodes; else their number."""
        return min((width for width in self.widths if width >= num_nodes), default=num_nodes)

    def inputs(
        self, trees: DraftTrees, prefix_R: torch.Tensor, width: int, key_lengths_sum: int
    ) -> WindowInputs:
        """Trees as the target reads them; `key_lengths_sum` bounds the sum of prefix and window lengths."""
        num_added = width - trees.num_nodes
        token_id_RW = F.pad(trees.token_id_RN, (0, num_added))
        depth_RW = F.pad(trees.depth_RN, (0, num_added))
        return WindowInputs(
            token_id=token_id_RW.reshape(-1),
            position=(prefix_R[:, None] + depth_RW).reshape(-1),
            mask=self._mask(trees, prefix_R, width, key_lengths_sum),
        )

    def _mask(
        self, trees: DraftTrees, prefix_R: torch.Tensor, width: int, key_lengths_sum: int
    ) -> torch.Tensor | None:
        # Added nodes come last, so that causal order hides them from a chain.
        if trees.is_chain and not self.is_always_masked:
            return None
        visible_RWW = pad_visibility(visibility(trees), width)
        if self.backend_name in WINDOW_MASK_BACKENDS:
            return visible_RWW
        # Host lengths count what is reserved, which may reach beyond the context, and a graph's buffer
        # does not.
        longest = prefix_R.shape[0] * (self._context_length + width)
        return flat_mask(prefix_R, visible_RWW, width * min(key_lengths_sum, longest))


def check_widths(widths: Sequence[int], max_width: int) -> tuple[int, ...]:
    """Rising and distinct.

    Raises:
        ConfigError: a width is below 1 or above the widest window that memory is reserved for.
    """
    for width in widths:
        if not 1 <= width <= max_width:
            raise ConfigError("verify_widths", width, f"in 1..{max_width} (--max-nodes and block size)")
    return tuple(sorted(set(widths)))


def widths_from_environment() -> list[int] | None:
    """What the launcher was asked for; None: nothing was said."""
    said = os.environ.get(VERIFY_WIDTHS_ENV)
    return None if said is None else [int(width) for width in said.split(",") if width]


def read_mask_in_graphs(result: tuple[str, bool], *_args: object, **_kwargs: object) -> tuple[str, bool]:
    """AFTER dflash_utils.resolve_dflash_verify_mask_policy: graphs get a mask where trees may come."""
    backend_name, reads_mask = result
    may_have_trees = int(os.environ.get(MAX_NODES_ENV, "0")) > 0
    return backend_name, reads_mask or (may_have_trees and backend_name in FLAT_MASK_BACKENDS)


def pad_visibility(visible_RNN: torch.Tensor, width: int) -> torch.Tensor:
    """Nodes that see themselves alone, up to the width. [R, W, W] bool."""
    num_added = width - visible_RNN.shape[1]
    if num_added == 0:
        return visible_RNN
    padded_RWW = F.pad(visible_RNN, (0, num_added, 0, num_added))
    return padded_RWW | torch.eye(width, dtype=torch.bool, device=visible_RNN.device)


def live_rows(rows_WX: torch.Tensor, num_requests: int, num_nodes: int) -> torch.Tensor:
    """The rows of the trees' own nodes: [R*W, X] to [R*N, X], a view where nothing was added."""
    rows_RWX = rows_WX.view(num_requests, -1, rows_WX.shape[-1])
    return rows_RWX[:, :num_nodes].reshape(num_requests * num_nodes, -1)
