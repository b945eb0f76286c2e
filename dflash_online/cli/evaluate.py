"""`dflash-online eval`: how well a drafter drafts, without a server."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from dflash_online.cli.output import JsonOption, console_for, finish
from dflash_online.errors import ConfigError

EXAMPLE = (
    "Example: dflash-online eval --drafter runs/r1/checkpoints/v3 --target models/smollm2-135m --records held"
)


def evaluate(
    drafter: Annotated[Path, typer.Option(help="Drafter folder.")],
    target: Annotated[
        Path, typer.Option(help="Hugging Face folder of the target: embedding and head are read.")
    ],
    records: Annotated[Path, typer.Option(help="Folder of record files (wire format v1).")],
    limit: Annotated[int, typer.Option(min=1, help="Records to read at most.")] = 64,
    as_json: JsonOption = False,
) -> None:
    """tau and top-1 accuracy per slot on held-out records: a chain, walked as the server would."""
    from dflash_online.drafter.checkpoint import check_against_target, load_checkpoint
    from dflash_online.drafter.model import DFlashDrafter
    from dflash_online.evaluate.tau import evaluate_drafter
    from dflash_online.target.frozen import FrozenHead
    from dflash_online.target.model_info import TargetModelInfo
    from dflash_online.wire.codec import decode_record

    files = sorted(path for path in records.rglob("*") if path.is_file())[:limit] if records.is_dir() else []
    if not files:
        raise ConfigError("--records", str(records), "a folder that holds record files")
    checkpoint = load_checkpoint(drafter)
    check_against_target(checkpoint.config, TargetModelInfo.from_folder(target))
    model = DFlashDrafter.from_tensors(checkpoint.config, checkpoint.tensors).eval()
    console = console_for(as_json=as_json)
    with console.status(f"walking {len(files)} records"):
        held_out = [decode_record(path.read_bytes()) for path in files]
        measured = evaluate_drafter(model, FrozenHead.from_folder(target), held_out)
    result: dict[str, Any] = {
        "drafter_version": str(checkpoint.version),
        "num_records": len(held_out),
        "num_rounds": measured.num_rounds,
        "tau_chain": measured.tau,
        "tau_all_anchors": measured.tau_all_anchors,
        "histogram": list(measured.histogram),
        "top1_per_slot": measured.stats.accuracy() if measured.stats else [],
    }
    table = Table(
        title=f"drafter {checkpoint.version}, {len(held_out)} records: tau {measured.tau:.3f} (chain)"
    )
    table.add_column("slot", justify="right")
    table.add_column("top-1", justify="right")
    for slot, share in enumerate(result["top1_per_slot"], start=1):
        table.add_row(str(slot), f"{share:.3f}")
    console.print(table)
    finish(console, result, as_json=as_json)
