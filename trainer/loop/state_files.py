"""What a restart needs beside the drafter's weights, as safetensors and JSON.

    worker --save_state--> <run>/state/v000004/ --load_state--> worker after a restart

    progress.json        step, tokens, training time, decay phase, data cursor
    optimizer.safetensors  master weights, both moments, step counts, random states
    COMPLETE             written last

Loading executes no code. Fails with CheckpointError (disk full leaves nothing behind).
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from dflash_online.drafter.folder import new_folder
from dflash_online.errors import CheckpointError, IncompleteCheckpointError

_TENSORS, _PROGRESS, _MARKER = "optimizer.safetensors", "progress.json", "COMPLETE"
_MASTER, _RANDOM_CPU, _RANDOM_PICK = "master.", "random.cpu", "random.pick"
_MOMENTS = ("exp_avg", "exp_avg_sq", "step")


@dataclass(frozen=True, kw_only=True, slots=True)
class Progress:
    """How far a run came."""

    step: int = 0
    tokens_seen: int = 0
    """Supervised tokens trained on, repetitions counted."""
    trained_s: float = 0.0
    """Wall time of training, pauses not counted."""
    cursor: int = 0
    """Of the prompt stream at that moment; for the record only, the store holds the live one."""
    decay_start: int | None = None
    decay_steps: int = 0


def save_state(
    path: Path,
    drafter: nn.Module,
    optimizer: torch.optim.Optimizer,
    pick: torch.Generator,
    progress: Progress,
) -> None:
    """Write the folder, whole or not at all; a leftover of that name is replaced.

    Raises:
        CheckpointError: the disk refused (full, read-only, ...).
    """
    with new_folder(path, replace=True, what="optimizer state ") as scratch:
        save_file(_collect(drafter, optimizer, pick), scratch / _TENSORS)
        (scratch / _PROGRESS).write_text(json.dumps(asdict(progress)), encoding="ascii")
        (scratch / _MARKER).write_text("1\n", encoding="ascii")


def load_state(
    path: Path, drafter: nn.Module, optimizer: torch.optim.Optimizer, pick: torch.Generator
) -> Progress:
    """Put a saved state back into drafter, optimizer and generators.

    Raises:
        IncompleteCheckpointError: no folder, or without its marker.
        CheckpointError: unreadable, or of another drafter.
    """
    if not (path / _MARKER).is_file():
        raise IncompleteCheckpointError(str(path), f"{_MARKER} is missing")
    try:
        tensors = load_file(path / _TENSORS)
        progress = Progress(**json.loads((path / _PROGRESS).read_text(encoding="ascii")))
        _restore(tensors, drafter, optimizer, pick)
    except (OSError, SafetensorError, ValueError, KeyError, TypeError, RuntimeError) as exc:
        raise CheckpointError(str(path), f"optimizer state cannot be read: {exc}") from exc
    return progress


def _collect(
    drafter: nn.Module, optimizer: torch.optim.Optimizer, pick: torch.Generator
) -> dict[str, Tensor]:
    tensors = {_RANDOM_CPU: torch.get_rng_state(), _RANDOM_PICK: pick.get_state()}
    for name, parameter in drafter.named_parameters():
        tensors[_MASTER + name] = parameter.detach().cpu().contiguous()
        moments: dict[str, Any] = optimizer.state.get(parameter, {})
        for kind in _MOMENTS:
            if kind in moments:  # absent before the first step
                tensors[f"{kind}.{name}"] = torch.as_tensor(moments[kind]).detach().cpu().contiguous()
    return tensors


def _restore(
    tensors: dict[str, Tensor], drafter: nn.Module, optimizer: torch.optim.Optimizer, pick: torch.Generator
) -> None:
    for name, parameter in drafter.named_parameters():
        with torch.no_grad():
            parameter.copy_(tensors[_MASTER + name])
        if f"step.{name}" in tensors:
            optimizer.state[parameter] = {
                kind: tensors[f"{kind}.{name}"].to("cpu" if kind == "step" else parameter.device)
                for kind in _MOMENTS
            }
    torch.set_rng_state(tensors[_RANDOM_CPU])
    pick.set_state(tensors[_RANDOM_PICK])
