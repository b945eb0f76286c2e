"""A drafter on disk: the folder through which trainer and target meet.

    trainer --save_checkpoint--> FOLDER --load_checkpoint--> swap in the target, warm start, evaluation

    FOLDER/training.json      step, recipe, cursor, parent, gate (ours; absent in published folders)
           config.json        drafter.hf_config
           model.safetensors  spec A.1 names, nothing else
           COMPLETE           the version, written last: without it the folder does not exist

Written whole or not at all (`drafter.folder`). `training.json` comes first, so that a folder cut short at any
point is known as ours and unfinished, never mistaken for a published one. Loads only safetensors and JSON:
nothing in a folder can execute code.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from dflash_online.drafter.config import FC_ALL, DrafterConfig
from dflash_online.drafter.families import refuse_tensors
from dflash_online.drafter.folder import new_folder
from dflash_online.drafter.hf_config import config_from_json, config_to_json
from dflash_online.drafter.tensors import canonical_names, expected_shapes, export_tensors, validate_tensors
from dflash_online.drafter.version import DrafterVersion, weights_digest
from dflash_online.errors import (
    CheckpointError,
    ConfigError,
    IncompleteCheckpointError,
    UnsupportedCheckpointError,
)
from dflash_online.target.model_info import TargetModelInfo
from dflash_online.target.weight_files import INDEX_FILE, SINGLE_FILE, WeightFiles

__all__ = [
    "Checkpoint",
    "DrafterVersion",
    "TrainingInfo",
    "check_against_target",
    "check_servable",
    "config_from_json",
    "config_to_json",
    "expected_shapes",
    "export_tensors",
    "load_checkpoint",
    "save_checkpoint",
    "validate_tensors",
    "weights_digest",
]

CONFIG_FILE, TRAINING_FILE, MARKER_FILE = "config.json", "training.json", "COMPLETE"

# A side file that SGLang writes over the target's embedding row at start; our target never changes.
_MASK_EMBEDDING = "mask_embedding.pt"


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingInfo:
    """How a checkpoint came to be. JSON values only."""

    number: int
    """Of the version; rises by one per checkpoint of a run."""
    step: int = 0
    """Optimizer steps taken."""
    recipe: dict[str, Any] = field(default_factory=dict)
    cursor: int = 0
    """Place in the prompt stream up to which records were taken."""
    parent_version: str | None = None
    """Version of the weights that training started from; None for fresh ones."""
    gate: dict[str, Any] | None = None
    """What the gate measured; None before it ran."""
    target: dict[str, str] | None = None
    """Fields of the wire format's TargetIdentity."""
    tokens_seen: int = 0
    """Supervised tokens trained on, repetitions counted."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A loaded folder. `tensors` are on the CPU, validated against `config`."""

    config: DrafterConfig
    tensors: dict[str, Tensor]
    version: DrafterVersion
    training: TrainingInfo | None  # None for a published folder
    path: Path


class ReadConfig(Protocol):
    """Turns the fields of a `config.json` into a config; `config_from_json` is one."""

    def __call__(self, fields: Mapping[str, Any], /, *, path: str, num_features: int | None) -> DrafterConfig:
        """Read the fields. Raises CheckpointError or ConfigError."""


def save_checkpoint(
    path: Path,
    config: DrafterConfig,
    tensors: Mapping[str, Tensor],
    *,
    training: TrainingInfo | None,
    fields: Mapping[str, Any] | None = None,
) -> DrafterVersion:
    """Write a folder that SGLang, vLLM and z-lab's `dflash` load unchanged. All or nothing.

    Args:
        path: the folder to make; its parent is made when missing.
        tensors: as from `export_tensors`.
        training: None writes a folder like a published one: without our own two files, of number 0.
        fields: of `config.json`, where they are not those of `config_to_json`.

    Returns:
        The version, also in the folder's completion marker.

    Raises:
        TensorMismatchError: the tensors are not what the config says; nothing is written.
        CheckpointError: the folder exists already, or the disk refused (full, read-only, ...).
    """
    validate_tensors(config, tensors, path=str(path))
    version = DrafterVersion.of(training.number if training else 0, tensors)
    with new_folder(path) as scratch:
        if training is not None:
            _write(scratch / TRAINING_FILE, json.dumps(asdict(training), indent=2))
        _write(
            scratch / CONFIG_FILE, json.dumps(config_to_json(config) if fields is None else fields, indent=2)
        )
        # A memory map of the new file would turn a full disk into a bus error; save_file writes.
        save_file(
            {name: tensor.contiguous() for name, tensor in tensors.items()},
            scratch / SINGLE_FILE,
            metadata={"format": "pt"},
        )
        if training is not None:
            _write(scratch / MARKER_FILE, str(version))
    return version


def load_checkpoint(
    path: Path, *, read_config: ReadConfig = config_from_json, without: Collection[str] = ()
) -> Checkpoint:
    """Read an own or a published folder and check it whole: names, shapes, types, finiteness, digest.

    A folder with neither `training.json` nor marker is a published one; its version has number 0.

    Args:
        read_config: for a folder in another layout.
        without: tensors that the folder may hold and that are not the drafter's; left out.

    Raises:
        IncompleteCheckpointError: no folder, no weights, or ours without its completion marker.
        UnsupportedCheckpointError: a drafter of another family.
        TensorMismatchError: tensors missing, unexpected, misshapen, of another type, not finite.
        CheckpointError: unreadable, or changed since it was written.
        ConfigError: a config value is out of bounds.
    """
    training = _load_training(path)
    fields = read_fields(path)
    if (path / _MASK_EMBEDDING).exists():
        raise UnsupportedCheckpointError(
            str(path), f"DFlash with a mask embedding of its own: {_MASK_EMBEDDING}"
        )
    if not (path / SINGLE_FILE).is_file() and not (path / INDEX_FILE).is_file():
        raise IncompleteCheckpointError(str(path), f"{SINGLE_FILE} is missing")
    try:
        files = WeightFiles(path)
        tensors = canonical_names({name: files.read(name) for name in sorted(files.names - set(without))})
    except (OSError, SafetensorError, KeyError, ValueError) as exc:
        raise CheckpointError(str(path), f"weights cannot be read: {exc}") from exc
    fc = tensors.get("fc.weight")
    num_features = None if fc is None or fc.ndim != 2 else fc.shape[1] // max(fc.shape[0], 1)
    config = read_config(fields, path=str(path), num_features=num_features)
    refuse_tensors(tensors, str(path))
    validate_tensors(config, tensors, path=str(path))
    version = DrafterVersion.of(training.number if training else 0, tensors)
    if training is not None:
        written = _read_text(path / MARKER_FILE).strip()
        if written != str(version):
            raise CheckpointError(str(path), f"weights are {version}, the completion marker says {written}")
    return Checkpoint(config, tensors, version, training, path)


def read_fields(path: Path) -> dict[str, Any]:
    """The fields of a folder's `config.json`, in whatever layout.

    Raises:
        IncompleteCheckpointError: no folder, or no such file in it.
        CheckpointError: unreadable.
    """
    if not path.is_dir():
        raise IncompleteCheckpointError(str(path), "no such folder")
    return _read_json(path / CONFIG_FILE)


def check_against_target(config: DrafterConfig, target: TargetModelInfo) -> None:
    """Refuse a drafter that cannot draft for this target.

    Raises:
        ConfigError: hidden size, vocabulary, hooked layers or mask id do not fit.
    """
    if config.hidden_size != target.hidden_size:
        raise ConfigError("drafter hidden_size", config.hidden_size, f"the target's {target.hidden_size}")
    last = target.num_layers - 2
    if max(config.target_layer_ids) > last:
        bound = f"in 0..{last} (the target has {target.num_layers} layers)"
        raise ConfigError("drafter target_layer_ids", config.target_layer_ids, bound)
    if config.mask_token_id >= target.vocab_size:
        bound = f"in 0..{target.vocab_size - 1} (the target's vocabulary)"
        raise ConfigError("drafter mask_token_id", config.mask_token_id, bound)


def check_servable(checkpoint: Checkpoint) -> None:
    """Refuse a drafter that can be trained and measured, but that no server can run.

    Raises:
        UnsupportedCheckpointError: its `fc` does not read every hooked layer.
    """
    if checkpoint.config.fc_layers != FC_ALL:
        reason = (
            f"DFlash with fc_layers = {checkpoint.config.fc_layers}: servers feed every hooked layer into "
            "fc, this one reads one less; train it anew with a recipe whose fc_layers is all"
        )
        raise UnsupportedCheckpointError(str(checkpoint.path), reason)


def _load_training(path: Path) -> TrainingInfo | None:
    if not path.is_dir():
        raise IncompleteCheckpointError(str(path), "no such folder")
    has_marker, has_training = (path / MARKER_FILE).is_file(), (path / TRAINING_FILE).is_file()
    if not has_marker and not has_training:
        return None
    for name, exists in ((TRAINING_FILE, has_training), (MARKER_FILE, has_marker)):
        if not exists:
            raise IncompleteCheckpointError(str(path), f"{name} is missing")
    fields = _read_json(path / TRAINING_FILE)
    try:
        return TrainingInfo(**fields)
    except TypeError as exc:
        raise CheckpointError(str(path), f"{TRAINING_FILE}: {exc}") from exc


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise IncompleteCheckpointError(str(path.parent), f"{path.name} is missing")
    try:
        value = json.loads(_read_text(path))
    except ValueError as exc:
        raise CheckpointError(str(path.parent), f"{path.name} cannot be read: {exc}") from exc
    if not isinstance(value, dict):
        raise CheckpointError(str(path.parent), f"{path.name} must hold an object")
    return value


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError) as exc:
        raise CheckpointError(str(path.parent), f"{path.name} cannot be read: {exc}") from exc


def _write(path: Path, text: str) -> None:
    path.write_text(text + "\n", encoding="utf-8")
