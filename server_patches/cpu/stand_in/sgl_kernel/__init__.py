"""Stand-in for SGLang's kernel package on machines without a GPU: plain torch, only what is called.

SGLang imports many names from this package that a CPU server never uses. Each other name resolves to a
function that raises when it is called, so that a wrong path is loud. Arguments and in-place results
follow the calls in SGLang 0.5.23 (`kernels/ops/speculative/cache_locs.py`,
`kernels/ops/kvcache/cache_move.py`, `srt/mem_cache/allocation.py`).
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import NoReturn

import torch

__version__ = "0.0.0+dflash.stand.in"
IS_STAND_IN = True


def assign_req_to_token_pool_cpu(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    start: torch.Tensor,
    end: torch.Tensor,
    cache_locs: torch.Tensor,
    row_width: int,
) -> None:
    """Write the flat list of cache slots into columns `[start, end)` of each request's row, in place."""
    offset = 0
    for row, first, last in zip(req_pool_indices.tolist(), start.tolist(), end.tolist(), strict=True):
        count = last - first
        req_to_token[row, first:last] = cache_locs[offset : offset + count].to(req_to_token.dtype)
        offset += count


def assign_extend_cache_locs_cpu(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    start: torch.Tensor,
    end: torch.Tensor,
    out_cache_locs: torch.Tensor,
    row_width: int,
) -> None:
    """Read columns `[start, end)` of each request's row into the flat list, in place."""
    offset = 0
    for row, first, last in zip(req_pool_indices.tolist(), start.tolist(), end.tolist(), strict=True):
        count = last - first
        out_cache_locs[offset : offset + count] = req_to_token[row, first:last].to(out_cache_locs.dtype)
        offset += count


def copy_all_layer_kv_cache_cpu(
    data_ptrs: torch.Tensor, strides: torch.Tensor, target_locs: torch.Tensor, source_locs: torch.Tensor
) -> None:
    """Copy whole rows of every K and V buffer; strides in bytes. All sources are read before any write."""
    targets, sources = target_locs.tolist(), source_locs.tolist()
    for base, stride in zip(data_ptrs.tolist(), strides.tolist(), strict=True):
        rows = [ctypes.string_at(base + loc * stride, stride) for loc in sources]
        for loc, row in zip(targets, rows, strict=True):
            ctypes.memmove(base + loc * stride, row, stride)


def __getattr__(name: str) -> Callable[..., NoReturn]:
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*_args: object, **_kwargs: object) -> NoReturn:
        raise NotImplementedError(f"sgl_kernel.{name} has no stand-in on a machine without a GPU")

    return missing
