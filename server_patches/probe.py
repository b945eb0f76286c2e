"""The probe: what the drafter in the server computes for one text, to be compared with a local reference.

    POST /dflash/probe --> one short request --> its first drafted block: context keys, output --> safetensors

`doctor` and the tests use it to show that what trains is what serves. A probed request runs like any
other, with a cache key of its own; others pay one string comparison each. At most `MAX_OPEN_PROBES`
answers are held.

Shape letters: L = draft layers, C = context positions, K = key-value heads, E = head size, B = block,
H = hidden.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import torch

_KEY_PREFIX = "dflash-probe:"
MAX_OPEN_PROBES = 16


def probe_key(probe_id: str) -> str:
    """Cache key of a probed request."""
    return _KEY_PREFIX + probe_id


def is_probe_key(extra_key: str | None) -> bool:
    return bool(extra_key) and str(extra_key).startswith(_KEY_PREFIX)


class DrafterProbe:
    """Keeps the first drafted block of each probed request. Runs in the scheduler's loop."""

    def __init__(self) -> None:
        self._answers: OrderedDict[str, dict[str, torch.Tensor]] = OrderedDict()

    def take(self, worker: Any, batch: Any, block_id_RB: torch.Tensor, hidden_RBH: torch.Tensor) -> None:
        """Called with every drafted block, before it is verified."""
        for index, request in enumerate(batch.reqs):
            key = request.extra_key
            if not is_probe_key(key) or key in self._answers:
                continue
            context_length = int(batch.seq_lens[index])
            self._answers[key] = {
                "block_id_B": block_id_RB[index].cpu(),
                "hidden_BH": hidden_RBH[index].float().cpu(),
                "context_key_LCKE": _context_keys(worker, int(batch.req_pool_indices[index]), context_length),
            }
            if len(self._answers) > MAX_OPEN_PROBES:
                self._answers.popitem(last=False)

    def finish(self, probe_id: str) -> dict[str, torch.Tensor] | None:
        """The answer, given once; None when nothing was drafted for the request."""
        return self._answers.pop(probe_key(probe_id), None)


def _context_keys(worker: Any, row: int, context_length: int) -> torch.Tensor:
    """Rotated context keys as the drafter's attention reads them, [L, C, K, E] float32."""
    location_C = worker.model_runner.req_to_token_pool.req_to_token[row, :context_length].to(torch.int64)
    pool = worker.draft_model_runner.token_to_kv_pool
    keys = [
        pool.get_key_buffer(layer.self_attn.attn.layer_id)[location_C] for layer in worker.draft_model.layers
    ]
    return torch.stack(keys).float().cpu()
