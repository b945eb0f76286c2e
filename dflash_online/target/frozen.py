"""The three tensors of a target that training needs: embedding, head, final norm. Never trained.

    target folder --WeightFiles--> [ FrozenHead ] --embed--> blocks, --logits--> drafts, labels

Read by name from safetensors, so the target itself is never loaded. Understands sharded folders, tied
heads and nested prefixes (`model.language_model.`). Raises ConfigError that names the folder and the tensor.

Shape letters: V = rows of the embedding, H = hidden size, T = tokens.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from torch import Tensor

from dflash_online.errors import ConfigError
from dflash_online.target.model_info import TargetModelInfo
from dflash_online.target.weight_files import WeightFiles

_EMBEDDING, _FINAL_NORM, _HEAD = "embed_tokens.weight", "norm.weight", "lm_head.weight"
# In the order of preference: the first whose embedding exists names the text model.
_PREFIXES = ("model.", "model.language_model.", "language_model.model.", "language_model.", "")


@dataclass(frozen=True, slots=True)
class FrozenHead:
    """The target's embedding, head and final norm. Tied: embedding and head are one tensor.

    `weight_VH.dtype` decides in which type `logits` and the loss multiply, and through `autocast` the drafter
    too; sums are in float32 always.
    """

    embedding_VH: Tensor
    weight_VH: Tensor  # the head
    final_norm_H: Tensor
    eps: float  # of the final norm

    @classmethod
    def from_folder(
        cls, path: Path, *, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
    ) -> FrozenHead:
        """Read a target folder; peak memory is the two matrices (one when tied) plus one copy on the way.

        Raises:
            ConfigError: a tensor is missing, or its shape is not the config's.
        """
        info = TargetModelInfo.from_folder(path)
        try:
            files = WeightFiles(path)
            prefix = next((p for p in _PREFIXES if p + _EMBEDDING in files.names), None)
            if prefix is None:
                raise ConfigError("target", str(path), f"a folder with a tensor *{_EMBEDDING}")
            embedding_VH = _floats(files, prefix + _EMBEDDING).to(device, dtype)
            norm_name = _existing(files, path, prefix + _FINAL_NORM)
            final_norm_H = files.read(norm_name).to(device, dtype)
            weight_VH = embedding_VH
            head_names = (_HEAD, "language_model." + _HEAD, prefix + _HEAD)
            is_stored = any(name in files.names for name in head_names)
            if info.tie_word_embeddings is False or (info.tie_word_embeddings is None and is_stored):
                weight_VH = _floats(files, _existing(files, path, *head_names)).to(device, dtype)
        except (OSError, SafetensorError, KeyError, ValueError) as exc:
            raise ConfigError("target", str(path), f"a folder of readable safetensors ({exc})") from exc
        for name, matrix in (("embedding", embedding_VH), ("head", weight_VH)):
            if matrix.ndim != 2 or matrix.shape[1] != info.hidden_size:
                raise ConfigError(f"target {name}", tuple(matrix.shape), f"[rows, {info.hidden_size}]")
            # Padded to more rows than the vocabulary: usual. Fewer: one rank's shard of it.
            if len(matrix) < info.vocab_size:
                raise ConfigError(f"target {name}", len(matrix), f"whole: {info.vocab_size} rows or more")
        return cls(embedding_VH, weight_VH, final_norm_H, info.rms_norm_eps)

    @property
    def vocab_size(self) -> int:
        """V: rows of the head."""
        return self.weight_VH.shape[0]

    def autocast(self) -> torch.autocast:
        """Context in which a float32 drafter multiplies in the head's type.

        Measured on one Zen 4 core, 128 blocks over 16 records: 0.7 s forward and backward in bfloat16,
        2.3 s in float32.
        """
        is_low = self.weight_VH.dtype == torch.bfloat16
        return torch.autocast(self.weight_VH.device.type, torch.bfloat16, enabled=is_low)

    def embed(self, ids_T: Tensor) -> Tensor:
        """Raw embedding rows, without any scale of the target's own forward pass: [*T, H]."""
        return F.embedding(ids_T, self.embedding_VH)

    def normed(self, hidden_TH: Tensor) -> Tensor:
        """The target's final norm, computed in float32: [*T, H] float32, ready for `logits`."""
        weight_H = self.final_norm_H.float()
        return F.rms_norm(hidden_TH.float(), weight_H.shape, weight_H, self.eps)

    def logits(self, hidden_TH: Tensor) -> Tensor:
        """[*T, V] in the head's type, of hidden states that are final-normed already."""
        return F.linear(hidden_TH.to(self.weight_VH.dtype), self.weight_VH)


def fastest_dtype(hidden_size: int, device: torch.device | str = "cpu") -> torch.dtype:
    """bfloat16 where this machine multiplies it faster than float32, else float32.

    Measured, about 50 ms, because CPUs without bfloat16 instructions emulate them many times slower. On
    a GPU the answer is bfloat16 without a measurement.
    """
    if torch.device(device).type != "cpu":
        return torch.bfloat16
    seconds = {}
    for dtype in (torch.float32, torch.bfloat16):
        left, right = torch.ones(64, hidden_size, dtype=dtype), torch.ones(2048, hidden_size, dtype=dtype)
        F.linear(left, right)
        start = time.perf_counter()
        for _ in range(3):
            F.linear(left, right)
        seconds[dtype] = time.perf_counter() - start
    return torch.bfloat16 if 1.2 * seconds[torch.bfloat16] < seconds[torch.float32] else torch.float32


def _floats(files: WeightFiles, name: str) -> Tensor:
    """A matrix of numbers; the codes of a quantized one would be taken for weights."""
    matrix = files.read(name)
    if matrix.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        kind = str(matrix.dtype).removeprefix("torch.")
        raise ConfigError(f"target {name} dtype", kind, "float32, bfloat16 or float16: not quantized")
    return matrix


def _existing(files: WeightFiles, path: Path, *names: str) -> str:
    for name in names:
        if name in files.names:
            return name
    raise ConfigError("target", str(path), f"a folder with a tensor {names[0]}")
