"""The demo's own numbers, and the run config that it sends to the trainer.

    command line --> DemoConfig        examples/smollm2-cpu/run.json --fill_run_config--> POST /train/start

The run config is the example's file, so that the demo shows what a user would run; only what is known no
sooner than at run time is filled in.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflash_online.errors import ConfigError
from dflash_online.prompts.item import PromptItem
from dflash_online.prompts.read import open_prompts, split_prompts

EXAMPLE_CONFIG = Path(__file__).resolve().parents[2] / "examples" / "smollm2-cpu" / "run.json"
MODEL_NAME = "smollm2-135m"


@dataclass(frozen=True, kw_only=True, slots=True)
class DemoConfig:
    """One demo."""

    minutes: float = 8.0
    """Of training."""
    workdir: Path = Path("demo-out")
    """Logs, checkpoints and records; emptied at the start."""
    models_dir: Path = Path("models")
    """Where the model is kept for the next time."""
    run_config: Path = EXAMPLE_CONFIG
    num_prompts: int = 20
    """Held-out prompts of the comparison of first and last version."""
    max_tokens: int = 40
    """Per answer of that comparison."""
    concurrency: int = 4
    """Requests in flight in that comparison."""
    num_latency_prompts: int = 3
    """Held-out prompts of the speed passes, sent one at a time: where speculation pays on a small machine."""
    ready_timeout_s: float = 420.0
    """For a service to answer after its start."""
    stop_timeout_s: float = 180.0
    """For the run to write, check and publish its last version."""

    def __post_init__(self) -> None:
        bounds: dict[str, float] = {"minutes": 0.0, "ready_timeout_s": 0.0, "stop_timeout_s": 0.0}
        for name, bound in bounds.items():
            if not getattr(self, name) > bound:
                raise ConfigError(name, getattr(self, name), f"> {bound:g}")
        for name in ("num_prompts", "max_tokens", "concurrency", "num_latency_prompts"):
            if getattr(self, name) < 1:
                raise ConfigError(name, getattr(self, name), ">= 1")


def read_example(path: Path) -> dict[str, Any]:
    """The run config file as JSON.

    Raises:
        ConfigError: it is not there (an installed package has no examples folder), or no JSON object.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError("run config", str(path), f"a readable JSON file ({error})") from error
    if not isinstance(value, dict):
        raise ConfigError("run config", str(path), "a JSON object")
    return value


def fill_run_config(example: Mapping[str, Any], *, target_url: str, target_path: Path) -> dict[str, Any]:
    """The example with the target of this demo in it."""
    return {**example, "target_urls": [target_url], "target_path": str(target_path.resolve())}


def bench_prompts(run_config: Mapping[str, Any], num_prompts: int) -> list[PromptItem]:
    """Held-out prompts that the run neither trains on nor gates by, split exactly as the run splits them.

    Raises:
        ConfigError: fewer than asked for are left.
    """
    share, seed = float(run_config["held_out_share"]), int(run_config["seed"])
    _, held_out = split_prompts(open_prompts(run_config["prompts"]), share, seed)
    left = held_out[int(run_config["held_out_records"]) :]
    if len(left) < num_prompts:
        raise ConfigError(
            "num_prompts", num_prompts, f"at most {len(left)}: the held-out prompts without a use"
        )
    return left[:num_prompts]
