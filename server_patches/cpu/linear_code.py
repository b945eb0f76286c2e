"""The machine code behind `cpu.linear`: one tile of rows times two outputs, and the loop over tiles.

A tile is written as LLVM instructions, for it has to keep its sums in registers (6 rows x 2 outputs of 8
lanes are 12 of the 16 that AVX2 has) and to fetch weights ahead, and neither can be said in Python.

Raises ImportError on import where the machine lacks AVX2 or FMA, or numba fails.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import llvmlite.binding
import numba
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.errors import NumbaError
from numba.extending import intrinsic

TILE_ROWS = 6
PANEL_OUTPUTS = 8
"""Outputs whose weights stay in the cache while all tiles of rows pass over them."""
LINES_AHEAD = 6
"""How many outputs ahead of the sums the weights are fetched."""
LANES, LINE = 8, 16
"""Floats of a register, and of a cache line."""

_INDEX = ir.IntType(64)
_LANES = ir.VectorType(ir.FloatType(), LANES)
_BYTES = 4


def _load(builder: ir.IRBuilder, address: ir.Value) -> ir.Value:
    value = builder.load(builder.inttoptr(address, _LANES.as_pointer()))
    value.align = _BYTES
    return value


def _fused(builder: ir.IRBuilder, one: ir.Value, other: ir.Value, total: ir.Value) -> ir.Value:
    """`one * other + total`, rounded once."""
    kind = ir.FunctionType(_LANES, [_LANES] * 3)
    function = cgutils.get_or_insert_function(builder.module, kind, f"llvm.fma.v{LANES}f32")
    return builder.call(function, [one, other, total])


def _fetch(builder: ir.IRBuilder, address: ir.Value) -> None:
    """Ask for a cache line that will be read. An address past the end does no harm."""
    pointer, word = ir.IntType(8).as_pointer(), ir.IntType(32)
    kind = ir.FunctionType(ir.VoidType(), [pointer, word, word, word])
    read, keep, data = word(0), word(3), word(1)
    function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
    builder.call(function, [builder.inttoptr(address, pointer), read, keep, data])


def _total(builder: ir.IRBuilder, sums: ir.Value) -> ir.Value:
    """The sum over the lanes, by halves."""
    width = LANES
    while width > 1:
        width //= 2
        word = ir.VectorType(ir.IntType(32), width)
        undefined = ir.Constant(sums.type, ir.Undefined)
        low = builder.shuffle_vector(sums, undefined, ir.Constant(word, list(range(width))))
        high = builder.shuffle_vector(sums, undefined, ir.Constant(word, list(range(width, 2 * width))))
        sums = builder.fadd(low, high)
    return builder.extract_element(sums, ir.IntType(32)(0))


def _write_tile(builder: ir.IRBuilder, num_rows: int, arguments: Any) -> None:
    """Instructions for the products of `num_rows` rows and two outputs.

    The arguments are three addresses in bytes (first row, weights of the first output, first result), the
    number of inputs and the number of outputs.
    """
    rows, weights, results, num_inputs, num_outputs = arguments
    row_bytes = builder.mul(num_inputs, _INDEX(_BYTES))
    starts = [builder.add(rows, builder.mul(row_bytes, _INDEX(row))) for row in range(num_rows)]
    outputs = [weights, builder.add(weights, row_bytes)]
    ahead = builder.mul(row_bytes, _INDEX(LINES_AHEAD))

    entry, loop = builder.basic_block, builder.append_basic_block("tile")
    builder.branch(loop)
    builder.position_at_end(loop)
    offset = builder.phi(_INDEX)
    offset.add_incoming(_INDEX(0), entry)
    before = [builder.phi(_LANES) for _ in range(2 * num_rows)]
    for output in outputs:
        _fetch(builder, builder.add(builder.add(output, offset), ahead))
    sums: list[ir.Value] = list(before)
    for part in range(0, LINE, LANES):
        place = builder.add(offset, _INDEX(part * _BYTES))
        weight = [_load(builder, builder.add(output, place)) for output in outputs]
        for row, start in enumerate(starts):
            values = _load(builder, builder.add(start, place))
            for output in range(2):
                number = 2 * row + output
                sums[number] = _fused(builder, values, weight[output], sums[number])
    following = builder.add(offset, _INDEX(LINE * _BYTES))
    offset.add_incoming(following, loop)
    for phi, total in zip(before, sums, strict=True):
        phi.add_incoming(ir.Constant(_LANES, [0.0] * LANES), entry)
        phi.add_incoming(total, loop)
    done = builder.append_basic_block("sums")
    builder.cbranch(builder.icmp_unsigned("<", following, row_bytes), loop, done)
    builder.position_at_end(done)
    for number, total in enumerate(sums):
        row, output = divmod(number, 2)
        place = builder.add(builder.mul(num_outputs, _INDEX(row)), _INDEX(output))
        address = builder.add(results, builder.mul(place, _INDEX(_BYTES)))
        builder.store(_total(builder, total), builder.inttoptr(address, ir.FloatType().as_pointer()))


def _tile(num_rows: int) -> Callable[..., None]:
    @intrinsic
    def tile(_context: Any, rows: Any, weights: Any, results: Any, num_inputs: Any, num_outputs: Any) -> Any:
        def generate(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
            _write_tile(builder, num_rows, arguments)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 5), generate

    return tile


_tile_1, _tile_2, _tile_3, _tile_4, _tile_5, _tile_6 = (_tile(rows + 1) for rows in range(TILE_ROWS))


def _multiply(
    rows: int, weights: int, results: int, num_rows: int, num_inputs: int, num_outputs: int
) -> None:
    num_tiles = (num_rows + TILE_ROWS - 1) // TILE_ROWS
    for panel in range(0, num_outputs, PANEL_OUTPUTS):
        first_row = 0
        for tile in range(num_tiles):
            # Tiles of much the same size.
            tile_rows = num_rows // num_tiles + (tile < num_rows % num_tiles)
            row = rows + 4 * first_row * num_inputs
            for output in range(panel, min(panel + PANEL_OUTPUTS, num_outputs), 2):
                weight = weights + 4 * output * num_inputs
                result = results + 4 * (first_row * num_outputs + output)
                if tile_rows == 6:
                    _tile_6(row, weight, result, num_inputs, num_outputs)
                elif tile_rows == 5:
                    _tile_5(row, weight, result, num_inputs, num_outputs)
                elif tile_rows == 4:
                    _tile_4(row, weight, result, num_inputs, num_outputs)
                elif tile_rows == 3:
                    _tile_3(row, weight, result, num_inputs, num_outputs)
                elif tile_rows == 2:
                    _tile_2(row, weight, result, num_inputs, num_outputs)
                else:
                    _tile_1(row, weight, result, num_inputs, num_outputs)
            first_row += tile_rows


def _compile() -> Callable[..., None]:
    features = llvmlite.binding.get_host_cpu_features()
    if not (features.get("avx2") and features.get("fma")):
        raise ImportError("the machine lacks AVX2 or FMA")
    try:
        signature = types.void(*[types.int64] * 6)
        return numba.njit(signature, nogil=True)(_multiply)
    except (NumbaError, RuntimeError) as error:
        raise ImportError(f"numba {numba.__version__} cannot compile a matrix product") from error


multiply = _compile()
