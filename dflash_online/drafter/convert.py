"""From one checkpoint layout to the other, every tensor byte and every config field kept.

    FOLDER (zlab or speculators) --convert_checkpoint--> another FOLDER (zlab or speculators)

Writes a new folder, whole or not at all, and never touches the source. A checkpoint of ours keeps its version
and its `training.json`. What only one layout has travels along: `num_target_layers` in a speculators config,
`verifier` (the target's name) in a z-lab one. Raises CheckpointError and ConfigError.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dflash_online.drafter.checkpoint import (
    Checkpoint,
    check_against_target,
    check_servable,
    load_checkpoint,
    read_fields,
    save_checkpoint,
)
from dflash_online.drafter.config import DrafterConfig
from dflash_online.drafter.folder import refuse_existing
from dflash_online.drafter.hf_config import ConfigFields, config_from_json, config_to_json
from dflash_online.drafter.speculators import (
    BORROWED_TENSORS,
    Layout,
    Verifier,
    from_speculators,
    layout_of,
    to_speculators,
    verifier_from,
    verifier_of,
)
from dflash_online.target.model_info import TargetModelInfo, read_architectures
from dflash_online.target.weight_files import WeightFiles

_VERIFIER = "verifier"


@dataclass(frozen=True, slots=True)
class Conversion:
    """What was read and written."""

    checkpoint: Checkpoint  # the source
    source_layout: Layout
    verifier: Verifier
    left_out: tuple[str, ...]  # copies of the target's tensors that the source held


def convert_checkpoint(
    source: Path, to: Path, layout: Layout, *, target: Path | None = None, verifier: str | None = None
) -> Conversion:
    """Write a drafter folder anew in a layout.

    Args:
        to: the folder to make.
        target: the target's folder. Its number of layers is needed where a speculators config lacks it, and
            the drafter must fit it.
        verifier: name or path of the target to write into a speculators config. None keeps the source's own,
            else names `target`.

    Raises:
        CheckpointError: the source cannot be used, or `to` exists or cannot be written.
        ConfigError: a value is out of bounds, or the drafter does not fit the target.
    """
    refuse_existing(to)
    fields = read_fields(source)
    source_layout = layout_of(fields)
    info = None if target is None else TargetModelInfo.from_folder(target)
    if source_layout is Layout.ZLAB:
        checkpoint, borrowed = load_checkpoint(source), frozenset[str]()
        named = verifier_from(ConfigFields(fields, {}, str(source)).object(_VERIFIER), str(source))
    else:
        checkpoint = _load_speculators(source, None if info is None else info.num_layers)
        borrowed = WeightFiles(source).names & BORROWED_TENSORS
        named = verifier_of(fields, str(source))
    check_servable(checkpoint)
    if info is not None:
        check_against_target(checkpoint.config, info)
    named = _name_verifier(named, target, verifier)
    if layout is Layout.SPECULATORS:
        written = to_speculators(checkpoint.config, named)
    else:
        carried = {} if named == Verifier() else {_VERIFIER: asdict(named)}
        written = config_to_json(checkpoint.config) | carried
    save_checkpoint(to, checkpoint.config, checkpoint.tensors, training=checkpoint.training, fields=written)
    return Conversion(checkpoint, source_layout, named, tuple(sorted(borrowed)))


def _load_speculators(source: Path, num_target_layers: int | None) -> Checkpoint:
    def read_config(fields: Mapping[str, Any], /, *, path: str, num_features: int | None) -> DrafterConfig:
        zlab = from_speculators(fields, path=path, num_target_layers=num_target_layers)
        return config_from_json(zlab, path=path)

    return load_checkpoint(source, read_config=read_config, without=BORROWED_TENSORS)


def _name_verifier(named: Verifier, target: Path | None, verifier: str | None) -> Verifier:
    name = verifier or named.name_or_path or (None if target is None else str(target))
    return Verifier(name, named.architectures if target is None else read_architectures(target))
