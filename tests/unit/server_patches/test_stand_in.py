"""The stand-in kernels do what SGLang's calls expect, and never hide a missing one."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

import server_patches


@pytest.fixture(scope="module")
def kernels() -> ModuleType:
    """The stand-in, loaded under a name of its own so that no other test sees it as `sgl_kernel`."""
    folder = Path(server_patches.__file__).parent / "cpu" / "stand_in" / "sgl_kernel"
    spec = importlib.util.spec_from_file_location("stand_in_under_test", folder / "__init__.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_slots_are_scattered_into_rows_and_gathered_back(kernels: ModuleType) -> None:
    table = torch.full((3, 8), -1, dtype=torch.int32)
    rows, start, end = torch.tensor([2, 0]), torch.tensor([1, 4]), torch.tensor([4, 6])
    slots = torch.tensor([10, 11, 12, 20, 21])
    kernels.assign_req_to_token_pool_cpu(rows, table, start, end, slots, 8)
    assert table[2].tolist() == [-1, 10, 11, 12, -1, -1, -1, -1]
    assert table[0].tolist() == [-1, -1, -1, -1, 20, 21, -1, -1]
    assert table[1].tolist() == [-1] * 8
    out = torch.zeros(5, dtype=torch.int64)
    kernels.assign_extend_cache_locs_cpu(rows, table, start, end, out, 8)
    assert torch.equal(out, slots)


def test_rows_that_overlap_are_all_read_before_any_is_written(kernels: ModuleType) -> None:
    buffers = [torch.arange(12.0).view(6, 2), torch.arange(100.0, 118.0).view(6, 3)]
    wanted = [buffer.clone() for buffer in buffers]
    targets, sources = torch.tensor([1, 2, 3]), torch.tensor([2, 3, 1])
    for buffer in wanted:
        buffer[targets] = buffer[sources].clone()
    pointers = torch.tensor([buffer.data_ptr() for buffer in buffers])
    strides = torch.tensor([buffer.stride(0) * buffer.element_size() for buffer in buffers])
    kernels.copy_all_layer_kv_cache_cpu(pointers, strides, targets, sources)
    for buffer, expected in zip(buffers, wanted, strict=True):
        assert torch.equal(buffer, expected)


def test_a_kernel_without_a_stand_in_raises_when_it_is_called(kernels: ModuleType) -> None:
    missing = kernels.some_gpu_kernel
    with pytest.raises(NotImplementedError, match="some_gpu_kernel"):
        missing(torch.zeros(1))
