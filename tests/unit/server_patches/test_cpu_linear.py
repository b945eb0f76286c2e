"""Linear layers of few rows: torch's result, the same for any number of rows, and what is left alone."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest
import torch

from server_patches.cpu import linear as module
from server_patches.cpu.linear import MAX_ROWS, is_covered, linear


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    module._compiled.cache_clear()
    yield
    module._compiled.cache_clear()
    torch.set_num_threads(before)


def rows_and_weight(num_rows: int, num_inputs: int, num_outputs: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(num_rows)
    rows = torch.randn(num_rows, num_inputs, generator=generator)
    return rows, torch.randn(num_outputs, num_inputs, generator=generator)


def is_compiled() -> bool:
    return module._compiled() is not None


@pytest.mark.parametrize(("num_inputs", "num_outputs"), [(16, 2), (48, 6), (576, 50), (1536, 16)])
def test_results_are_as_near_to_the_exact_ones_as_torchs(num_inputs: int, num_outputs: int) -> None:
    for num_rows in range(1, MAX_ROWS + 1):
        rows, weight = rows_and_weight(num_rows, num_inputs, num_outputs)
        assert is_covered(rows, weight)
        exact = rows.double() @ weight.double().T
        bound = 8 * torch.finfo(torch.float32).eps * (rows.double().abs() @ weight.double().abs().T)
        assert bool(((linear(rows, weight).double() - exact).abs() <= bound).all()), num_rows


def test_a_row_does_not_depend_on_the_rows_beside_it() -> None:
    """To the bit: a verify step of any width computes what a decode step computes."""
    if not is_compiled():
        pytest.skip("this machine lacks AVX2 or FMA, or numba cannot compile")
    rows, weight = rows_and_weight(MAX_ROWS, 576, 130)
    wide = linear(rows, weight)
    for first in range(0, MAX_ROWS, 7):
        for last in range(first + 1, MAX_ROWS + 1):
            assert torch.equal(linear(rows[first:last], weight), wide[first:last])


def test_bias_leading_dimensions_and_strided_rows() -> None:
    rows, weight = rows_and_weight(12, 64, 10)
    bias = torch.arange(10.0)
    wanted = torch.nn.functional.linear(rows, weight, bias)
    torch.testing.assert_close(linear(rows, weight, bias), wanted)
    torch.testing.assert_close(linear(rows.view(3, 4, 64), weight, bias), wanted.view(3, 4, 10))
    strided = torch.cat([rows, rows], dim=1)[:, :64]
    assert not strided.is_contiguous()
    torch.testing.assert_close(linear(strided, weight, bias), wanted)


def test_rows_after_the_weights_of_a_larger_table_are_not_read_as_outputs() -> None:
    """A head may be the first rows of a padded table."""
    rows, table = rows_and_weight(5, 32, 20)
    table[12:] = torch.nan
    result = linear(rows, table[:12])
    assert result.shape == (5, 12)
    assert bool(result.isfinite().all())


@pytest.mark.parametrize(
    "case", ["bfloat16", "many rows", "no rows", "odd outputs", "inputs", "transposed", "grad"]
)
def test_everything_else_is_torchs(case: str) -> None:
    rows, weight = rows_and_weight(4, 32, 32)
    if case == "bfloat16":
        rows, weight = rows.bfloat16(), weight.bfloat16()
    elif case == "many rows":
        rows = rows.repeat(MAX_ROWS, 1)
    elif case == "no rows":
        rows = rows[:0]
    elif case == "odd outputs":
        weight = weight[:31]
    elif case == "inputs":
        rows, weight = rows[:, :24].contiguous(), weight[:, :24].contiguous()
    elif case == "transposed":
        weight = weight.T
    else:
        weight.requires_grad_()
    assert not is_covered(rows, weight)
    assert torch.equal(linear(rows, weight), torch.nn.functional.linear(rows, weight))


def test_several_threads_are_torchs() -> None:
    rows, weight = rows_and_weight(4, 32, 32)
    torch.set_num_threads(2)
    assert not is_covered(rows, weight)


def test_without_machine_code_torch_multiplies_and_the_log_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "server_patches.cpu.linear_code", None)
    rows, weight = rows_and_weight(4, 32, 32)
    for _ in range(2):
        assert torch.equal(linear(rows, weight), torch.nn.functional.linear(rows, weight))
    assert [record.getMessage()[:35] for record in caplog.records] == ["linear layers stay with torch: impo"]
