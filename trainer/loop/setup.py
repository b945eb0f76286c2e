"""What a worker holds while it trains, and how it comes about: fresh, warm start, or after a restart.

    run row, target folder, last complete checkpoint --prepare--> Training

Fails with ConfigError or CheckpointError when a restart cannot help: the caller then ends for good.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from dflash_online.distill.recipe import RECIPES, Recipe
from dflash_online.drafter.checkpoint import check_against_target, load_checkpoint
from dflash_online.drafter.config import DrafterConfig
from dflash_online.drafter.init import initialize, new_drafter_config, warm_start
from dflash_online.drafter.model import DFlashDrafter
from dflash_online.errors import CheckpointError, ConfigError
from dflash_online.target.frozen import FrozenHead, fastest_dtype
from dflash_online.target.model_info import TargetModelInfo
from trainer.loop.optimizer import make_optimizer
from trainer.loop.state_files import Progress, load_state
from trainer.runs.config import RunConfig
from trainer.store.checkpoint_rows import CheckpointRow
from trainer.store.run_rows import ResolvedTarget, RunRow
from trainer.store.store import Store


@dataclass(slots=True)
class Training:
    """Everything that changes while training, and the frozen parts beside it. Owned by the worker loop."""

    drafter: DFlashDrafter
    frozen: FrozenHead
    optimizer: torch.optim.Optimizer
    recipe: Recipe
    pick: torch.Generator
    """Chance of choosing records; rank 0 alone draws from it."""
    progress: Progress
    parent_version: str | None


def choose_device(config: RunConfig, local_rank: int) -> torch.device:
    """The rank's device.

    Raises:
        ConfigError: cuda is asked for and there is none.
    """
    has_cuda = torch.cuda.is_available()
    if config.device == "cuda" and not has_cuda:
        raise ConfigError("device", "cuda", "cpu or auto: this machine has no CUDA device")
    if config.device == "cpu" or not has_cuda:
        return torch.device("cpu")
    torch.cuda.set_device(local_rank)
    return torch.device("cuda", local_rank)


def drafter_config(config: RunConfig, resolved: ResolvedTarget) -> DrafterConfig:
    """Architecture of the run's drafter. Reads small files only; the service checks with it at the start.

    Raises:
        ConfigError, CheckpointError: it does not fit the target, or a folder cannot be used.
    """
    target = TargetModelInfo.from_folder(Path(resolved.folder))
    if config.warm_start is None:
        return new_drafter_config(
            target,
            num_layers=config.drafter.num_layers,
            block_size=resolved.block_size,
            target_layer_ids=resolved.layer_ids,
            mask_token_id=resolved.mask_token_id,
            intermediate_size=config.drafter.intermediate_size,
            fc_layers=RECIPES[config.recipe].fc_layers,
        )
    found = load_checkpoint(Path(config.warm_start)).config
    check_against_target(found, target)
    fc_layers = RECIPES[config.recipe].fc_layers
    if found.fc_layers != fc_layers:
        bound = f"one with the warm start's fc_layers, {found.fc_layers}; it has {fc_layers}"
        raise ConfigError("recipe", config.recipe, bound)
    return found


def prepare(store: Store, run: RunRow, device: torch.device) -> Training:
    """Build the drafter and put the last complete checkpoint into it.

    Raises:
        ConfigError, CheckpointError: target folder or warm start cannot be used.
    """
    config, resolved = run.config, run.resolved
    folder = Path(resolved.folder)
    target = TargetModelInfo.from_folder(folder)
    parent: str | None = None
    if config.warm_start is None:
        drafter = initialize(drafter_config(config, resolved), seed=config.seed)
    else:
        drafter = warm_start(Path(config.warm_start), target=target)
        parent = str(load_checkpoint(Path(config.warm_start)).version)
    drafter = drafter.to(device).train()
    head_dtype = {"float32": torch.float32, "bfloat16": torch.bfloat16}.get(config.head_dtype)
    frozen = FrozenHead.from_folder(
        folder, dtype=head_dtype or fastest_dtype(target.hidden_size, device), device=device
    )
    training = Training(
        drafter=drafter,
        frozen=frozen,
        optimizer=make_optimizer(drafter, config),
        recipe=RECIPES[config.recipe],
        pick=torch.Generator().manual_seed(config.seed),
        progress=Progress(),
        parent_version=parent,
    )
    _restore_last(store, run, training)
    return training


def _restore_last(store: Store, run: RunRow, training: Training) -> None:
    """Load the newest checkpoint that is whole; a damaged one is passed over for the one before it."""
    folder = store.folder(run.run_id)
    errors: list[CheckpointError] = []
    rows: list[CheckpointRow] = [row for row in store.checkpoints.all(run.run_id) if row.path]
    for row in reversed(rows):
        path = folder.optimizer_state(row.number)
        if not path.exists() and row is not rows[-1]:
            continue  # only the newest states are kept
        try:
            training.progress = load_state(path, training.drafter, training.optimizer, training.pick)
        except CheckpointError as exc:
            errors.append(exc)
            continue
        training.parent_version = row.version
        return
    if errors:
        raise errors[0]
