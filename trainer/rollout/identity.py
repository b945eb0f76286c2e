"""Is this still the target that the run started with?

    every /dflash/info, every record header, every commit's answer --> check --> TargetIdentityError -> alarm

Compared: weight checksum, hooked layers, hidden size. Not compared: the path, which may differ between hosts.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dflash_online.errors import TargetIdentityError, TargetRefusedError
from dflash_online.wire.record import RecordHeader
from trainer.store.run_rows import ResolvedTarget


def check_info(expected: ResolvedTarget, info: Mapping[str, Any], url: str) -> None:
    """Compare a target's /dflash/info.

    Raises:
        TargetIdentityError: names the field, what was expected and what was found.
        TargetRefusedError: the answer lacks the fields.
    """
    try:
        found = {
            "weight_checksum": info["target"]["weight_checksum"],
            "layer_ids": list(info["layer_ids"]),
            "hidden_size": info["model"]["hidden_size"],
        }
    except (KeyError, TypeError) as exc:
        raise TargetRefusedError(url, 200, f"/dflash/info lacks {exc}") from exc
    wanted = {
        "weight_checksum": expected.weight_checksum,
        "layer_ids": list(expected.layer_ids),
        "hidden_size": expected.hidden_size,
    }
    for name, value in wanted.items():
        _check(name, value, found[name])


def check_header(expected: ResolvedTarget, header: RecordHeader) -> None:
    """Compare a record's header. Raises `TargetIdentityError`."""
    _check("weight_checksum", expected.weight_checksum, header.target.weight_checksum)
    _check("layer_ids", list(expected.layer_ids), list(header.layer_ids))
    _check("hidden_size", expected.hidden_size, header.row_width // len(header.layer_ids))


def check_checksum(expected: ResolvedTarget, found: object) -> None:
    """Compare the checksum in a commit's answer; absent is not different. Raises `TargetIdentityError`."""
    if found is not None:
        _check("weight_checksum", expected.weight_checksum, found)


def _check(field: str, expected: object, found: object) -> None:
    if expected != found:
        raise TargetIdentityError(field, str(expected), str(found))
