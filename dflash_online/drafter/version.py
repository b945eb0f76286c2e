"""Names of drafter weights: a rising number and a digest, `7-ab12cd34ef56`.

Carried by every record, checkpoint, verify step and measurement. Knows neither files nor configs.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from dflash_online.errors import ConfigError

DIGEST_LENGTH = 12
_PATTERN = re.compile(rf"(\d+)-([0-9a-f]{{{DIGEST_LENGTH}}})")


@dataclass(frozen=True, slots=True, order=True)
class DrafterVersion:
    """Which weights. Two versions of equal digest have equal weights; the number orders them."""

    number: int
    digest: str  # first 12 hex digits of `weights_digest`

    def __str__(self) -> str:
        return f"{self.number}-{self.digest}"

    @classmethod
    def parse(cls, text: str) -> DrafterVersion:
        """Read `str(version)` back.

        Raises:
            ConfigError: any other text.
        """
        match = _PATTERN.fullmatch(text)
        if match is None:
            raise ConfigError("drafter_version", text, "<number>-<12 hex digits>, such as 7-ab12cd34ef56")
        return cls(int(match[1]), match[2])

    @classmethod
    def of(cls, number: int, tensors: Mapping[str, Tensor]) -> DrafterVersion:
        """The version that these weights have under this number."""
        return cls(number, weights_digest(tensors)[:DIGEST_LENGTH])


def weights_digest(tensors: Mapping[str, Tensor]) -> str:
    """sha256, in hex, over names, types, shapes and raw bytes, in the order of the names.

    Independent of device and file layout: a server computes it from its memory, a trainer from its file.
    """
    digest = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name].detach().to("cpu").contiguous()
        digest.update(f"{name} {str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}\n".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
