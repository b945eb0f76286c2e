"""Checksums of what is in the server's memory: the target's identity, and the drafter as it is live.

The target's is an xxh3-128 over every parameter and buffer (name, dtype, shape, bytes), so it is equal on two
servers only for equal weights, dtype and quantization. The drafter's is `weights_digest` of the unfused
tensors, hence comparable with a checkpoint's. Both run in a background thread, beside serving; torch and
xxhash release the interpreter lock while they work.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import xxhash

from dflash_online.drafter.checkpoint import weights_digest

_CHUNK_BYTES = 64 << 20


def _byte_chunks(tensor: torch.Tensor) -> Iterator[memoryview]:
    flat = tensor.detach().contiguous().view(torch.uint8).reshape(-1)
    for start in range(0, flat.numel(), _CHUNK_BYTES):
        yield flat[start : start + _CHUNK_BYTES].cpu().numpy().data


def target_checksum(model: torch.nn.Module) -> str:
    """Hex digest over the model's parameters and buffers, in order of name; 32 characters.

    On several ranks each hashes its own shard; rank 0's is the one reported.
    """
    digest = xxhash.xxh3_128()
    tensors = dict(model.named_parameters()) | dict(model.named_buffers())
    for name in sorted(tensors):
        tensor = tensors[name]
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        if tensor.numel():
            for chunk in _byte_chunks(tensor.reshape(-1)):
                digest.update(chunk)
    return digest.hexdigest()


def live_drafter_tensors(model: Any) -> dict[str, torch.Tensor]:
    """The drafter's weights as SGLang holds them now, unfused to checkpoint names. One rank only.

    Returns:
        Views of the live parameters, on their device.
    """
    tensors: dict[str, torch.Tensor] = {}
    for name, parameter in model.named_parameters():
        if ".qkv_proj." in name:
            attention = model.get_submodule(name.split(".qkv_proj.")[0])
            sizes = [attention.q_size, attention.kv_size, attention.kv_size]
            for part, tensor in zip(
                ("q_proj", "k_proj", "v_proj"), parameter.split(sizes, dim=0), strict=True
            ):
                tensors[name.replace("qkv_proj", part)] = tensor
        elif ".gate_up_proj." in name:
            for part, tensor in zip(("gate_proj", "up_proj"), parameter.chunk(2, dim=0), strict=True):
                tensors[name.replace("gate_up_proj", part)] = tensor
        else:
            tensors[name] = parameter
    return tensors


def live_drafter_digest(model: Any, dtypes: dict[str, torch.dtype]) -> str:
    """Digest of the live drafter in the dtypes of its checkpoint, so that the two compare equal.

    Exact when the server's dtype holds every value of the checkpoint's (bf16 served in float32 does).
    """
    live = live_drafter_tensors(model)
    return weights_digest({name: live[name].detach().to(device="cpu", dtype=dtypes[name]) for name in dtypes})
