"""The server as `doctor` sees it, and the same things computed here.

    Served     what runs: HTTP (`HttpServer`); tests put a faulty one in its place
    Reference  what should run: the drafter's folder and the target's folder, in this process, float32

Shape letters: C = context rows, F = feature width, B = slots of a block, H = hidden size, L = draft layers,
K = key-value heads, E = head size.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from dflash_online.drafter.checkpoint import Checkpoint, load_checkpoint
from dflash_online.drafter.config import FULL_ATTENTION, SLIDING_ATTENTION
from dflash_online.drafter.model import DFlashDrafter
from dflash_online.target.client import CaptureRequest, TargetClient
from dflash_online.target.frozen import FrozenHead
from dflash_online.target.inprocess import InProcessTarget
from dflash_online.wire.record import Record


class Served(Protocol):
    """What a check may ask a server."""

    def info(self) -> dict[str, Any]: ...

    def answer(self, token_ids: Sequence[int], max_new_tokens: int) -> Record:
        """The greedy answer, drafted by the policy in force, with features and acceptance."""
        ...

    def render(self, text: str) -> list[int]:
        """Token ids of a user turn, by the server's chat template as it serves."""
        ...

    def probe(self, token_ids: Sequence[int]) -> dict[str, Tensor]:
        """First drafted block behind a text: block_id_B, hidden_BH, context_key_LCKE."""
        ...


class HttpServer:
    """A running target server. Usage: `with HttpServer(url) as server`."""

    def __init__(self, client: TargetClient, chat_template_kwargs: dict[str, Any] | None = None) -> None:
        self._client, self._kwargs, self._runner = client, chat_template_kwargs or {}, asyncio.Runner()

    def __enter__(self) -> HttpServer:
        return self

    def __exit__(self, *_: object) -> None:
        self._runner.run(self._client.aclose())
        self._runner.close()

    def info(self) -> dict[str, Any]:
        return self._runner.run(self._client.info())

    def answer(self, token_ids: Sequence[int], max_new_tokens: int) -> Record:
        sampling = {"temperature": 0.0, "max_new_tokens": max_new_tokens}
        return self._capture(
            CaptureRequest(input_ids=tuple(token_ids), sampling_params=sampling, record_id="doctor")
        )

    def render(self, text: str) -> list[int]:
        request = CaptureRequest(
            messages=({"role": "user", "content": text},),
            sampling_params={"temperature": 0.0, "max_new_tokens": 2},
            chat_template_kwargs=self._kwargs,
            record_id="doctor",
        )
        header = self._capture(request).header
        return list(header.token_ids[: header.prompt_length])

    def probe(self, token_ids: Sequence[int]) -> dict[str, Tensor]:
        return self._runner.run(self._client.probe(token_ids))

    def _capture(self, request: CaptureRequest) -> Record:
        return self._runner.run(self._client.capture(request))


@dataclass(frozen=True, slots=True)
class Block:
    """One drafted block and the context behind it."""

    context_key_LCKE: Tensor
    hidden_BH: Tensor
    unnormed_BH: Tensor  # before the final norm


@dataclass(frozen=True, slots=True)
class Reference:
    """The same weights here."""

    checkpoint: Checkpoint
    drafter: DFlashDrafter
    frozen: FrozenHead
    target: InProcessTarget

    @classmethod
    def load(cls, drafter: Path, target: Path) -> Reference:
        """Raises CheckpointError and ConfigError."""
        checkpoint = load_checkpoint(drafter)
        return cls(
            checkpoint,
            DFlashDrafter.from_tensors(checkpoint.config, checkpoint.tensors).eval(),
            FrozenHead.from_folder(target),
            InProcessTarget.from_folder(target, checkpoint.config.target_layer_ids),
        )

    @torch.no_grad()
    def block(self, features_CF: Tensor, block_id_B: Tensor, drafter: DFlashDrafter | None = None) -> Block:
        """Draft one block behind all rows."""
        model = drafter or self.drafter
        cache = model.new_cache()
        model.extend_context(cache, features_CF, torch.arange(len(features_CF)))
        keys = torch.stack([cache.layer(i)[0] for i in range(model.config.num_layers)])
        kept: list[Tensor] = []
        hook = model.norm.register_forward_pre_hook(lambda _module, inputs: kept.append(inputs[0]))
        try:
            hidden_BH = model.draft_block(self.frozen.embed(block_id_B), len(features_CF), cache)
        finally:
            hook.remove()
        return Block(keys, hidden_BH, kept[-1])

    def with_other_layer_types(self, num_rows: int) -> list[tuple[str, DFlashDrafter]]:
        """The drafter with all layers full, with all sliding, and with the two kinds exchanged."""
        config, kinds = self.checkpoint.config, (FULL_ATTENTION, SLIDING_ATTENTION)
        exchanged = tuple(kinds[kind == FULL_ATTENTION] for kind in config.layer_types)
        tried = []
        for name, types in (
            ("all layers full", (FULL_ATTENTION,) * config.num_layers),
            ("all layers sliding", (SLIDING_ATTENTION,) * config.num_layers),
            ("layer types exchanged", exchanged),
        ):
            if types != config.layer_types:
                # A drafter of full layers names no window: the common one is tried, cut to what text there
                # is.
                window = config.sliding_window or max(2, min(2048, num_rows // 2))
                changed = replace(config, layer_types=types, sliding_window=window)
                tried.append((name, DFlashDrafter.from_tensors(changed, self.checkpoint.tensors).eval()))
        return tried
