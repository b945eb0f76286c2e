"""What the config leaves to the target: asked once, before the run exists.

    RunConfig + GET /dflash/info of every target + target folder --resolve--> ResolvedTarget, RunInputs

Everything that can be wrong with a run is found here, so that POST /train/start can refuse it with a reason.
Fails with ConfigError, PromptError, CheckpointError, TargetUnavailableError, TargetIdentityError.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflash_online.distill.recipe import RECIPES
from dflash_online.drafter.config import FC_ALL, DrafterConfig
from dflash_online.drafter.version import DrafterVersion
from dflash_online.errors import ConfigError, TargetRefusedError
from dflash_online.prompts.template import ChatTokenizer, load_tokenizer
from dflash_online.target.client import TargetClient
from trainer.feed.prompts import LoadedPrompts, load_prompts
from trainer.loop.setup import drafter_config
from trainer.rollout.identity import check_info
from trainer.runs.config import RunConfig
from trainer.store.run_rows import ResolvedTarget

_DEFAULT_BLOCK_SIZE = 16


@dataclass(frozen=True, slots=True)
class RunInputs:
    """What a run holds in memory beside its row."""

    prompts: LoadedPrompts
    tokenizer: ChatTokenizer


async def load_inputs(config: RunConfig, folder: str) -> RunInputs:
    """Read prompts and tokenizer, in a thread."""
    prompts = await asyncio.to_thread(load_prompts, config)
    return RunInputs(prompts, await asyncio.to_thread(load_tokenizer, folder))


async def resolve(config: RunConfig) -> tuple[ResolvedTarget, RunInputs]:
    """Ask the targets, read the folders, check that all of it fits together."""
    if config.recipe not in RECIPES:
        raise ConfigError("recipe", config.recipe, f"one of {', '.join(sorted(RECIPES))}")
    _check_publishing(config)
    infos = [await _ask(url, config) for url in config.target_urls]
    folder = _target_folder(config, infos[0])
    inputs = await load_inputs(config, folder)
    resolved = _resolve_first(config, infos[0], folder, num_held_out=len(inputs.prompts.held_out))
    for url, info in zip(config.target_urls[1:], infos[1:], strict=True):
        check_info(resolved, info, url)
    fitted = await asyncio.to_thread(drafter_config, config, resolved)
    _check_drafter(config, resolved, fitted, infos)
    return resolved, inputs


def _check_publishing(config: RunConfig) -> None:
    """A drafter that cannot be served must not be on its way to a server."""
    fc_layers = RECIPES[config.recipe].fc_layers
    if fc_layers == FC_ALL:
        return
    for name in ("publish_every_s", "publish_every_steps", "publish_initial"):
        value = getattr(config, name)
        if value:
            bound = f"off: recipe {config.recipe} has fc_layers {fc_layers}, which no server can run"
            raise ConfigError(name, value, bound)


async def _ask(url: str, config: RunConfig) -> dict[str, Any]:
    client = TargetClient(url, api_key=config.api_key)
    try:
        return await client.info()
    finally:
        await client.aclose()


def _target_folder(config: RunConfig, info: dict[str, Any]) -> str:
    path = config.target_path or str(info.get("target", {}).get("path", ""))
    folder = Path(path).expanduser()
    if not (folder / "config.json").is_file():
        raise ConfigError(
            "target_path", path, "a folder on this machine with the target's config.json and weights"
        )
    return str(folder.resolve())


def _resolve_first(
    config: RunConfig, info: dict[str, Any], folder: str, *, num_held_out: int
) -> ResolvedTarget:
    served = info.get("drafter") or {}
    version = str(served.get("version") or "none")
    try:
        target = info["target"]
        usual_block_size = RECIPES[config.recipe].block_size or _DEFAULT_BLOCK_SIZE
        resolved = ResolvedTarget(
            path=str(target["path"]),
            revision=str(target.get("revision", "")),
            weight_checksum=str(target["weight_checksum"]),
            layer_ids=tuple(int(i) for i in info["layer_ids"]),
            hidden_size=int(info["model"]["hidden_size"]),
            folder=folder,
            block_size=config.drafter.block_size or int(served.get("block_size") or usual_block_size),
            mask_token_id=_first_given(config.drafter.mask_token_id, served.get("mask_token_id")),
            first_number=1 if version == "none" else DrafterVersion.parse(version).number + 1,
            num_held_out=num_held_out,
            served_version=version,
            served_path=served.get("path"),
        )
    except (KeyError, TypeError, ValueError) as exc:
        raise TargetRefusedError(config.target_urls[0], 200, f"/dflash/info makes no sense: {exc!r}") from exc
    return resolved


def _first_given(*values: int | None) -> int | None:
    return next((value for value in values if value is not None), None)


def _check_drafter(
    config: RunConfig, resolved: ResolvedTarget, fitted: DrafterConfig, infos: list[dict[str, Any]]
) -> None:
    """The drafter must read the layers that are hooked and fill the blocks that are verified."""
    wanted = fitted.target_layer_ids if config.warm_start else config.drafter.layer_ids or resolved.layer_ids
    if tuple(wanted) != resolved.layer_ids:
        raise ConfigError(
            "drafter.layer_ids", list(wanted), f"those that the target hooks: {list(resolved.layer_ids)}"
        )
    for info in infos:
        served = info.get("drafter") or {}
        for name, value in (("block_size", fitted.block_size), ("mask_token_id", fitted.mask_token_id)):
            if served.get(name) is not None and served[name] != value:
                raise ConfigError(
                    f"drafter.{name}", value, f"{served[name]}, as the drafter that the target serves"
                )
