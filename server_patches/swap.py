"""The drafter swap in two phases: stage beside serving, commit between two steps, roll back the same way.

    POST stage --> read and validate in a background thread --> staged
    POST commit --> copy into the live drafter between two steps --> live; the one before is kept for rollback

Only the drafter's parameters are written. Everything derived from them is refreshed in the same pause: on a
GPU the fused context projection is a copy (specification E.6, danger 4). A swap neither drains nor aborts:
verification keeps the output lossless whatever the drafter is. Runs in the scheduler; each TP rank loads its
own shard. Holds at most three sets of weights on the host: live, previous, staged.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from dflash_online.drafter.checkpoint import (
    Checkpoint,
    check_servable,
    load_checkpoint,
    validate_tensors,
    weights_digest,
)
from dflash_online.drafter.config import DrafterConfig
from dflash_online.errors import CheckpointError, ConfigError, PluginError, TensorMismatchError
from server_patches.checksum import live_drafter_digest, live_drafter_tensors, target_checksum
from server_patches.control import ControlHandler, StateConflictError, now_ms


@dataclass(frozen=True, slots=True)
class ReadCheckpoint:
    """A checkpoint in host memory, with the full digest that its live copy is compared with."""

    checkpoint: Checkpoint
    digest: str  # sha256, 64 hex digits

    @classmethod
    def read(cls, path: Path) -> ReadCheckpoint:
        """Load and validate a folder. Raises CheckpointError."""
        checkpoint = load_checkpoint(path)
        check_servable(checkpoint)
        return cls(checkpoint, weights_digest(checkpoint.tensors))

    @property
    def version(self) -> str:
        return str(self.checkpoint.version)

    @property
    def config(self) -> DrafterConfig:
        return self.checkpoint.config

    @property
    def path(self) -> str:
        return str(self.checkpoint.path)


@dataclass(slots=True)
class SwapCounters:
    """What /dflash/drafter reports about swaps since start."""

    num_swaps: int = 0
    num_rollbacks: int = 0
    max_pause_ms: float = 0.0


class DrafterSwap:
    """Owner of the drafter's versions in one scheduler process. Methods run in its loop."""

    def __init__(self, worker: Any, control: ControlHandler, drafter_path: str) -> None:
        self._worker = worker
        self._control = control
        self.live = ReadCheckpoint.read(Path(drafter_path))
        self.staged: ReadCheckpoint | None = None
        self.previous: ReadCheckpoint | None = None
        self.counters = SwapCounters()
        self._target_model = worker.target_worker.model_runner.model
        self.target_checksum = target_checksum(self._target_model)
        worker.drafter_version = self.live.version
        for name, method in (
            ("stage", self.stage),
            ("commit", self.commit),
            ("rollback", self.rollback),
            ("checksums", self.checksums),
        ):
            control.register(name, method)

    def describe(self) -> dict[str, Any]:
        """The `drafter` object of /dflash/info."""
        config = self.live.config
        return {
            "version": self.live.version,
            "path": self.live.path,
            "staged": self.staged.version if self.staged else None,
            "previous": self.previous.version if self.previous else None,
            "block_size": config.block_size,
            "mask_token_id": config.mask_token_id,
            "num_swaps": self.counters.num_swaps,
            "num_rollbacks": self.counters.num_rollbacks,
            "max_pause_ms": round(self.counters.max_pause_ms, 3),
        }

    # ---- stage ----------------------------------------------------------------------------------------

    def stage(self, body: dict[str, Any]) -> dict[str, Any]:
        """Read and validate a checkpoint folder in the background. Replaces what was staged before."""
        path = body.get("path")
        if not isinstance(path, str) or not path:
            raise ConfigError("path", path, "a folder that this server can read")
        return self._control.start_job("stage", lambda: self._stage(Path(path)))

    def _stage(self, path: Path) -> dict[str, Any]:
        started_ms = now_ms()
        staged = ReadCheckpoint.read(path)
        self._check_fits(staged.checkpoint)
        self.staged = staged
        tensors = staged.checkpoint.tensors
        return {
            "staged": staged.version,
            "num_tensors": len(tensors),
            "num_bytes": sum(t.numel() * t.element_size() for t in tensors.values()),
            "stage_ms": round(now_ms() - started_ms, 3),
        }

    def _check_fits(self, checkpoint: Checkpoint) -> None:
        """The staged drafter must have the live one's architecture: shapes are fixed at server start."""
        for name in checkpoint.config.__dataclass_fields__:
            if name == "dtype":
                continue
            live, staged = getattr(self.live.config, name), getattr(checkpoint.config, name)
            if live != staged:
                raise ConfigError(f"drafter.{name}", staged, f"{live!r} as in the live drafter")
        validate_tensors(checkpoint.config, checkpoint.tensors)

    # ---- commit ---------------------------------------------------------------------------------------

    def commit(self, body: dict[str, Any]) -> dict[str, Any]:
        """Make the staged drafter the live one, between two steps."""
        wanted = body.get("version")
        if self.staged is None:
            raise StateConflictError(f"nothing is staged, cannot commit {wanted!r}")
        if wanted is not None and wanted != self.staged.version:
            raise StateConflictError(f"version must be the staged {self.staged.version}, got {wanted!r}")
        staged, self.staged = self.staged, None
        return self._make_live(staged)

    def rollback(self, _body: dict[str, Any]) -> dict[str, Any]:
        """Make the previous drafter live again. Once: the one rolled back from is not kept."""
        if self.previous is None:
            raise StateConflictError("there is no previous drafter to roll back to")
        reply = self._make_live(self.previous)
        self.previous = None
        self.counters.num_rollbacks += 1
        return reply | {"previous": None}

    def _make_live(self, wanted: ReadCheckpoint) -> dict[str, Any]:
        started_ms = now_ms()
        self._wait_for_running_step()
        try:
            self._load(wanted.checkpoint)
        except (RuntimeError, ValueError, AssertionError) as exc:
            # Shapes were checked, so this is a fault of the loader: put the old weights back, then serve on.
            self._load(self.live.checkpoint)
            raise CheckpointError(wanted.path, f"could not be loaded, old drafter kept: {exc}") from exc
        self.previous, self.live = self.live, wanted
        self._worker.drafter_version = wanted.version
        pause_ms = now_ms() - started_ms
        self.counters.num_swaps += 1
        self.counters.max_pause_ms = max(self.counters.max_pause_ms, pause_ms)
        return {
            "version": wanted.version,
            "previous": self.previous.version,
            "pause_ms": round(pause_ms, 3),
        }

    def _wait_for_running_step(self) -> None:
        # With overlap the previous step may still read the weights on its own stream.
        device = torch.device(self._worker.device)
        if device.type != "cpu":
            torch.get_device_module(device).synchronize()

    def _load(self, checkpoint: Checkpoint) -> None:
        with torch.no_grad():
            self._worker.draft_model.load_weights(iter(checkpoint.tensors.items()))
        if self._worker._use_fused_kv_materialize:
            self._worker._init_fused_kv_helper()

    # ---- checks ---------------------------------------------------------------------------------------

    def checksums(self, _body: dict[str, Any]) -> dict[str, Any]:
        """Read back both models, in the background; the live drafter must be what was committed."""
        return self._control.start_job("checksums", self._checksums)

    def _checksums(self) -> dict[str, Any]:
        self.target_checksum = target_checksum(self._target_model)
        live = self.live
        model = self._worker.draft_model
        is_sharded = any(
            tuple(live_drafter_tensors(model)[name].shape) != tuple(tensor.shape)
            for name, tensor in live.checkpoint.tensors.items()
        )
        reply = {"target_checksum": self.target_checksum, "version": live.version}
        if is_sharded:
            # Under tensor parallelism no rank holds a whole tensor; the loader's own checks must do.
            return reply | {"checksum": live.digest, "is_read_back": False}
        found = live_drafter_digest(
            model, {name: tensor.dtype for name, tensor in live.checkpoint.tensors.items()}
        )
        if found != live.digest and self.live is live:
            raise TensorMismatchError(
                live.path, wrong=[f"live weights {found[:12]}, want {live.digest[:12]}"]
            )
        return reply | {"checksum": found, "is_read_back": True}


def require_one_data_parallel_rank(num_ranks: int) -> None:
    """Swap and capture speak to one scheduler; several would need a reply from each.

    Raises:
        PluginError: more than one data-parallel rank.
    """
    if num_ranks != 1:
        raise PluginError(
            f"dp_size must be 1 with DFLASH_ONLINE, got {num_ranks}; run one server per replica"
        )
