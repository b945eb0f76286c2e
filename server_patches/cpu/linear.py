"""Linear layers of few rows in float32: weights are read once, whatever the number of rows.

A decode step multiplies one row per request by every weight, a verify step one per node. Either is bound by
reading the weights, so a few rows more should cost little, but the matrix products of BLAS libraries are made
for many: they copy their operands into panels first, and two rows take about twice the time of one. Here a
tile of up to six rows meets the weights of two outputs where they lie, and the weights ahead are fetched in
the meantime. `benchmarks/verify_width.py` measures both.

Every element is summed in one order, whatever the tile: a row's result does not depend on the rows beside
it, so a verify step of any width computes what a decode step computes, to the bit.

One thread, x86 with AVX2 and FMA, float32; `linear` leaves everything else to torch. The machine code comes
from numba at the first use, which takes about a second.

Shape letters: R = rows, I = inputs, O = outputs.
"""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

MAX_ROWS = 64
"""Above it, torch's product is faster."""

_log = logging.getLogger(__name__)


def linear(rows: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None) -> Tensor:
    """What `torch.nn.functional.linear` returns, to rounding; [..., I] to [..., O]."""
    multiply = _compiled() if is_covered(rows, weight_OI) else None
    if multiply is None:
        return torch.nn.functional.linear(rows, weight_OI, bias_O)
    num_outputs, num_inputs = weight_OI.shape
    row_RI = rows.reshape(-1, num_inputs).contiguous()
    result_RO = row_RI.new_empty(len(row_RI), num_outputs)
    multiply(
        row_RI.data_ptr(), weight_OI.data_ptr(), result_RO.data_ptr(), len(row_RI), num_inputs, num_outputs
    )
    if bias_O is not None:
        result_RO += bias_O
    return result_RO.view(*rows.shape[:-1], num_outputs)


def is_covered(rows: Tensor, weight_OI: Tensor) -> bool:
    """Whether a product is one for the machine code, if there is any."""
    return (
        rows.device.type == weight_OI.device.type == "cpu"
        and rows.dtype == weight_OI.dtype == torch.float32
        and 0 < math.prod(rows.shape[:-1]) <= MAX_ROWS
        and weight_OI.is_contiguous()
        and weight_OI.shape[1] % 16 == 0
        and weight_OI.shape[0] % 2 == 0
        and torch.get_num_threads() == 1
        and not (torch.is_grad_enabled() and (rows.requires_grad or weight_OI.requires_grad))
    )


@functools.cache
def _compiled() -> Callable[..., None] | None:
    """The machine code; None, and a line in the log, where it cannot be had."""
    try:
        from server_patches.cpu.linear_code import multiply
    except ImportError as error:
        _log.warning("linear layers stay with torch: %s", error)
        return None
    return multiply


def apply_linear(
    original: Callable[..., Tensor], method: Any, layer: Any, x: Tensor, bias: Any = None
) -> Tensor:
    """In place of the unquantized linear layers' and heads' `apply`, where the product is covered."""
    if is_covered(x, layer.weight):
        return linear(x, layer.weight, bias)
    return original(method, layer, x, bias)


def compute_head(
    original: Callable[..., Tensor],
    processor: Any,
    hidden_states: Tensor,
    lm_head: Any,
    *args: Any,
    **kwargs: Any,
) -> Tensor:
    """In place of the logits of a dense head without adapters, where the product is covered."""
    weight = getattr(lm_head, "weight", None)
    is_plain = processor.rl_on_policy_target is None and not hasattr(lm_head, "apply_lora")
    if is_plain and isinstance(weight, Tensor) and is_covered(hidden_states, weight):
        return linear(hidden_states, weight)
    return original(processor, hidden_states, lm_head, *args, **kwargs)
