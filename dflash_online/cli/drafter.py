"""`dflash-online drafter`: make the first drafter of a target."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from dflash_online.cli.output import JsonOption, console_for, finish

app = typer.Typer(help="Make a drafter.", no_args_is_help=True)


@app.callback()
def _group() -> None:
    """Keep `init` a command of its own although it is the only one."""


@app.command(
    epilog="Example: dflash-online drafter init --target models/smollm2-135m --to runs/first --block-size 8"
)
def init(
    target: Annotated[Path, typer.Option(help="Hugging Face folder of the target model.")],
    to: Annotated[Path, typer.Option(help="Folder to make; must not exist.")],
    layers: Annotated[int, typer.Option(min=1, help="Draft layers.")] = 2,
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

    With --warm-start the drafter's own shape is kept, and --layers, --block-size, --features, --mask-id
    and --seed have no say.
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
            info, num_layers=layers, block_size=block_size, num_features=features, mask_token_id=mask_id
        )
        drafter = initialize(config, seed=seed)
    else:
        drafter = load_warm(warm_start, target=info)
        config = drafter.config
    tensors = export_tensors(drafter, config)
    version = save_checkpoint(to, config, tensors, training=TrainingInfo(number=number))
    num_parameters = sum(tensor.numel() for tensor in tensors.values())
    result = {
        "path": str(to),
        "version": str(version),
        "num_parameters": num_parameters,
        "layer_ids": list(config.target_layer_ids),
        "block_size": config.block_size,
        "mask_token_id": config.mask_token_id,
    }
    text = (
        f"drafter {version} is in {to}: {num_parameters / 1e6:.1f} M parameters, "
        f"{config.num_layers} layers, block {config.block_size}, "
        f"hooked layers {list(config.target_layer_ids)}, mask id {config.mask_token_id}"
    )
    finish(console, result, as_json=as_json, text=text)
