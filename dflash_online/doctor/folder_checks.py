"""Checks that need no text: the drafter's folder, what the server says of itself, the training records.

Each returns a Finding, or None where all is the same; raises Unknown where it cannot tell. In the order of
`doctor`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from dflash_online.doctor.finding import Finding
from dflash_online.doctor.served import Reference, Served
from dflash_online.drafter.checkpoint import CONFIG_FILE, load_checkpoint
from dflash_online.errors import CheckpointError, TensorMismatchError
from dflash_online.target.weight_files import WeightFiles
from dflash_online.wire.record import Record

_PROBE = "What does the doctor say?"


class Unknown(Exception):
    """The check cannot be made here; says why."""


def check_tensor_names(folder: Path) -> Finding | None:
    """Every tensor is one that a server loads, and none is missing."""
    try:
        load_checkpoint(folder)
    except TensorMismatchError as error:
        return Finding.of("tensor names", str(folder), error, "exactly the tensors of the config", 16)
    except CheckpointError:
        # Unreadable altogether; or with names from which the config cannot be completed.
        names = _names(folder)
        if names and "fc.weight" not in names and (folder / CONFIG_FILE).is_file():
            return Finding.of("tensor names", str(folder), f"no fc.weight among {names[:4]}", "fc.weight", 16)
        raise
    return None


def check_layer_ids(reference: Reference, info: dict[str, Any]) -> Finding | None:
    """The server hooks the layers that the drafter was trained on."""
    wanted, hooked = list(reference.checkpoint.config.target_layer_ids), list(info["layer_ids"])
    return None if wanted == hooked else Finding.of("hooked layers", "layer_ids", hooked, wanted, 1)


def check_version(reference: Reference, info: dict[str, Any]) -> Finding | None:
    """The server serves the drafter of this folder."""
    version, served = str(reference.checkpoint.version), str((info.get("drafter") or {}).get("version"))
    # A published folder has no number of its own; the digest says whether the weights are the same.
    if version.partition("-")[2] == served.partition("-")[2]:
        return None
    return Finding.of("served version", "drafter.version", served, version, 12)


def check_target_checksum(reference: Reference, info: dict[str, Any]) -> Finding | None:
    """The target's weights are those that the drafter was trained on."""
    training = reference.checkpoint.training
    trained = (training.target or {}).get("weight_checksum") if training else None
    if not trained:
        raise Unknown("the drafter's folder does not say which target it was trained on")
    served = info["target"]["weight_checksum"]
    return None if trained == served else Finding.of("target weights", "weight_checksum", served, trained, 10)


def check_chat_template(server: Served, records: Sequence[Record], tokenizer: Any) -> Finding | None:
    """Prompts of the training records end as the server renders a user turn: template, thinking mode."""
    prompts = [r.header for r in records if r.header.source.value == "prompt"]
    if not prompts:
        raise Unknown("no training record of a prompt (--records)")
    rendered = server.render(_PROBE)
    tail = _behind_content(rendered, tokenizer)
    if not tail:
        raise Unknown("the server's template adds nothing behind a message")
    for header in prompts:
        prompt = list(header.token_ids[: header.prompt_length])
        if prompt[-len(tail) :] != tail:
            found, wanted = tokenizer.decode(prompt[-len(tail) :]), tokenizer.decode(tail)
            return Finding.of("chat template", header.record_id, repr(found), repr(wanted), 8)
    return None


def _behind_content(rendered: list[int], tokenizer: Any) -> list[int]:
    """The tokens that the template puts behind the content; none where it cannot be found."""
    for length in range(1, len(rendered)):
        if _PROBE in tokenizer.decode(rendered[:length]):
            return rendered[length:]
    return []


def _names(folder: Path) -> list[str]:
    try:
        return sorted(WeightFiles(folder).names)
    except (OSError, SafetensorError, ValueError, KeyError):
        return []
