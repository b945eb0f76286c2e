"""Tensors of a Hugging Face folder by name, one file or sharded, without loading the rest.

    model.safetensors, or its index and shards --> [ WeightFiles ] --> target.frozen, drafter.checkpoint

Only safetensors: nothing that is read here can execute code. Raises OSError, SafetensorError, KeyError or
ValueError as they come; the caller knows what the folder was meant to be and translates.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from safetensors import safe_open
from torch import Tensor

SINGLE_FILE, INDEX_FILE = "model.safetensors", "model.safetensors.index.json"


class WeightFiles:
    """Where each tensor of a folder lies. Usage: `WeightFiles(path).read("model.norm.weight")`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file_of: dict[str, Path] = dict(self._scan())

    @property
    def names(self) -> frozenset[str]:
        """All tensor names."""
        return frozenset(self._file_of)

    def read(self, name: str) -> Tensor:
        """One tensor, on the CPU, in its stored type. KeyError when the folder lacks it."""
        with safe_open(self._file_of[name], framework="pt") as file:
            tensor: Tensor = file.get_tensor(name)
        return tensor

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape from the file's header; reads no data."""
        with safe_open(self._file_of[name], framework="pt") as file:
            return tuple(file.get_slice(name).get_shape())

    def _scan(self) -> Iterator[tuple[str, Path]]:
        index = self.path / INDEX_FILE
        if index.is_file():
            weight_map = json.loads(index.read_text())["weight_map"]
            if not isinstance(weight_map, dict) or not all(isinstance(i, str) for i in weight_map.values()):
                raise ValueError(f"{INDEX_FILE}: weight_map must map names to file names")
            for name, file in weight_map.items():
                # A shard beside the index only: a name with a path in it could point anywhere.
                yield name, self.path / Path(file).name
            return
        single = self.path / SINGLE_FILE
        with safe_open(single, framework="pt") as file:
            for name in file.keys():
                yield name, single
