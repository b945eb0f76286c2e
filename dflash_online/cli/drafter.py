"""`dflash-online drafter`: make the first drafter of a target, and convert one between checkpoint layouts."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from dflash_online.cli.output import JsonOption, console_for, finish
from dflash_online.drafter.config import DrafterConfig
from dflash_online.drafter.speculators import Layout

app = typer.Typer(help="Make or convert a drafter.", no_args_is_help=True)


_FRESH_LAYERS = 2


@app.command(
    epilog="Example: dflash-online drafter init --target models/smollm2-135m --to runs/first --block-size 8"
)
def init(
    target: Annotated[Path, typer.Option(help="Hugging Face folder of the target model.")],
    to: Annotated[Path, typer.Option(help="Folder to make; must not exist.")],
    layers: Annotated[
        int | None,
        typer.Option(min=1, help="Draft layers. Default: 2, or as many as the warm start has."),
    ] = None,
    block_size: Annotated[
        int, typer.Option(min=2, help="Slots per block: one anchor, the rest drafts.")
    ] = 16,
    features: Annotated[int, typer.Option(min=1, help="Target layers whose hidden states are read.")] = 5,
    mask_id: Annotated[
        int | None, typer.Option(help="Vocabulary id of the slots to draft. Default: chosen.")
    ] = None,
    warm_start: Annotated[
        Path | None, typer.Option(help="Take config and weights from this drafter folder.")
    ] = None,
    number: Annotated[int, typer.Option(min=0, help="Version number.")] = 1,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the fresh weights.")] = 0,
    as_json: JsonOption = False,
) -> None:
    """Make a new drafter for a target: fresh weights, or those of another drafter that fits.

    With --warm-start the drafter's own shape is kept, and --block-size, --features, --mask-id and --seed
    have no say. --layers still has: fewer keep the first layers, more add layers that change nothing yet.
    """
    from dflash_online.drafter.checkpoint import TrainingInfo, save_checkpoint
    from dflash_online.drafter.init import initialize, new_drafter_config
    from dflash_online.drafter.init import warm_start as load_warm
    from dflash_online.drafter.tensors import export_tensors
    from dflash_online.target.model_info import TargetModelInfo

    console = console_for(as_json=as_json)
    info = TargetModelInfo.from_folder(target)
    if warm_start is None:
        config = new_drafter_config(
            info,
            num_layers=layers or _FRESH_LAYERS,
            block_size=block_size,
            num_features=features,
            mask_token_id=mask_id,
        )
        drafter = initialize(config, seed=seed)
    else:
        drafter = load_warm(warm_start, target=info, num_layers=layers)
        config = drafter.config
    tensors = export_tensors(drafter, config)
    version = save_checkpoint(to, config, tensors, training=TrainingInfo(number=number))
    num_parameters = sum(tensor.numel() for tensor in tensors.values())
    result = {"path": str(to), "version": str(version), "num_parameters": num_parameters} | _shape(config)
    text = f"drafter {version} is in {to}: {num_parameters / 1e6:.1f} M parameters, " + (
        "{num_layers} layers, block {block_size}, hooked layers {layer_ids}, mask id {mask_token_id}"
    ).format_map(result)
    finish(console, result, as_json=as_json, text=text)


def _shape(config: DrafterConfig) -> dict[str, Any]:
    return {
        "num_layers": config.num_layers,
        "layer_ids": list(config.target_layer_ids),
        "block_size": config.block_size,
        "mask_token_id": config.mask_token_id,
    }


@app.command(epilog="Example: dflash-online drafter convert theirs ours --to zlab --target models/qwen3-8b")
def convert(
    source: Annotated[Path, typer.Argument(help="Drafter folder to read; is left as it is.")],
    to_folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="Folder to make; must not exist.")],
    to: Annotated[
        Layout,
        typer.Option(help="zlab: for everything here, SGLang, vLLM. speculators: for vLLM's speculators."),
    ],
    target: Annotated[
        Path | None,
        typer.Option(
            help="Hugging Face folder of the target: the drafter must fit it. A folder of speculators' own "
            "making needs it, because that layout does not say how many layers the target has."
        ),
    ] = None,
    verifier: Annotated[
        str | None,
        typer.Option(
            help="Name or path of the target to write down for speculators. Default: what the source names, "
            "else --target."
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Write a drafter folder in another layout: every tensor byte and every config field is kept."""
    from dflash_online.drafter.convert import convert_checkpoint

    console = console_for(as_json=as_json)
    with console.status(f"converting {source}"):
        done = convert_checkpoint(source, to_folder, to, target=target, verifier=verifier)
    tensors = done.checkpoint.tensors.values()
    num_bytes = sum(tensor.nbytes for tensor in tensors)
    result = {
        "path": str(to_folder),
        "from": done.source_layout,
        "to": to,
        "version": str(done.checkpoint.version),
        "num_tensors": len(tensors),
        "num_bytes": num_bytes,
        "verifier": done.verifier.name_or_path,
        "left_out": list(done.left_out),
    }
    text = (
        f"drafter {done.checkpoint.version} is in {to_folder}: {done.source_layout} to {to}, "
        f"{len(tensors)} tensors, {num_bytes / 1e6:.1f} MB"
    )
    if done.left_out:
        text += f"; left out, as copies of the target's: {', '.join(done.left_out)}"
    if to is Layout.SPECULATORS:
        text += f"; verifier: {done.verifier.name_or_path or 'none named, see --verifier'}"
    finish(console, result, as_json=as_json, text=text)
