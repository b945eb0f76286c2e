"""Ranks of one worker: one is the same code as n.

    torchrun --environment--> [ Ranks ] --sum_--> gradients and totals of all ranks
                                        --share--> orders of rank 0

Orders travel as JSON over gloo, tensors over nccl on GPUs and gloo on CPUs. Without torchrun there is one
rank and no process group. Every call is made by all ranks, in the same order.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

_TIMEOUT = timedelta(hours=2)  # a gate on a large target may take long while the other ranks wait
_BUCKET_ELEMENTS = 16 << 20


class Ranks:
    """This process among the worker's processes."""

    def __init__(self, rank: int, world_size: int, device: torch.device) -> None:
        self.rank, self.world_size, self.device = rank, world_size, device
        self._control: dist.ProcessGroup | None = None

    @classmethod
    def alone(cls, device: torch.device) -> Ranks:
        """One rank without a process group."""
        return cls(0, 1, device)

    @classmethod
    def join(cls, environment: Mapping[str, str], device: torch.device) -> Ranks:
        """Join the group that torchrun described in the environment."""
        backend = "nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, timeout=_TIMEOUT)
        ranks = cls(int(environment["RANK"]), int(environment["WORLD_SIZE"]), device)
        control = dist.new_group(backend="gloo", timeout=_TIMEOUT)
        assert isinstance(control, dist.ProcessGroup)  # every rank is a member
        ranks._control = control
        return ranks

    @property
    def is_first(self) -> bool:
        """Rank 0 decides, saves and reports."""
        return self.rank == 0

    def share(self, order: Any) -> Any:
        """Rank 0's JSON value, on every rank."""
        if self._control is None:
            return order
        payload = json.dumps(order).encode() if self.is_first else b""
        length = torch.tensor([len(payload)])
        dist.broadcast(length, 0, group=self._control)
        data = torch.frombuffer(bytearray(payload) or bytearray(int(length)), dtype=torch.uint8)
        dist.broadcast(data, 0, group=self._control)
        return json.loads(bytes(data.numpy()))

    def gather(self, value: int) -> list[int]:
        """One integer of each rank, on every rank."""
        if self._control is None:
            return [value]
        values = torch.zeros(self.world_size, dtype=torch.int64)
        values[self.rank] = value
        dist.all_reduce(values, group=self._control)
        return [int(v) for v in values]

    def sum_(self, tensors: Sequence[Tensor]) -> None:
        """Replace each tensor by its sum over all ranks. Tensors of one call share their type."""
        if self.world_size == 1:
            return
        bucket: list[Tensor] = []
        num_elements = 0
        for tensor in tensors:
            bucket.append(tensor)
            num_elements += tensor.numel()
            if num_elements >= _BUCKET_ELEMENTS:
                _sum_bucket(bucket)
                bucket, num_elements = [], 0
        if bucket:
            _sum_bucket(bucket)

    def leave(self) -> None:
        """Leave the process group."""
        if self._control is not None:
            dist.destroy_process_group()


def _sum_bucket(bucket: list[Tensor]) -> None:
    flat = torch.cat([tensor.reshape(-1) for tensor in bucket])
    dist.all_reduce(flat)
    start = 0
    for tensor in bucket:
        tensor.copy_(flat[start : start + tensor.numel()].view_as(tensor))
        start += tensor.numel()
