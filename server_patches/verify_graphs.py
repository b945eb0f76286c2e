"""CUDA graphs of the target's verify pass, one set per width. Written for GPUs and not yet proved on one.

SGLang captures one width, the widest. Every other width gets an attention backend and a runner of its own,
captured when the server starts, and a verify pass swaps them in for itself alone. Without graphs (a CPU, or
`--disable-cuda-graph`) there is nothing to capture and nothing to swap.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any


class VerifyGraphs:
    """Of one worker's target."""

    def __init__(self, model_runner: Any) -> None:
        self._runner = model_runner
        self._captured: dict[int, tuple[Any, Any]] = {}

    @property
    def has_graphs(self) -> bool:
        """Whether the target's verify pass runs in CUDA graphs at all."""
        return self._runner.decode_cuda_graph_runner is not None

    def capture(self, widths: Sequence[int]) -> None:
        """Capture each width that SGLang's own graphs do not serve: slow, takes memory, once at the start."""
        if not self.has_graphs:
            return
        from sglang.srt.runtime_context import get_spec

        own = self._runner.decode_cuda_graph_runner
        make_runner = type(own)
        for width in widths:
            if width == own.captured_req_width:
                continue
            with get_spec().override(speculative_num_draft_tokens=width):
                makes_workspace = self._runner.init_new_workspace
                try:
                    backend = self._runner._get_attention_backend(init_new_workspace=True)
                finally:
                    self._runner.init_new_workspace = makes_workspace
                graphs = make_runner(self._runner, attn_backend=backend, speculative_num_draft_tokens=width)
            self._captured[width] = (backend, graphs)

    @contextmanager
    def using(self, width: int) -> Iterator[None]:
        """While open, the target verifies windows of this width."""
        captured = self._captured.get(width)
        if captured is None:
            yield
            return
        before = self._runner.attn_backend, self._runner.decode_cuda_graph_runner
        self._runner.attn_backend, self._runner.decode_cuda_graph_runner = captured
        try:
            yield
        finally:
            self._runner.attn_backend, self._runner.decode_cuda_graph_runner = before
