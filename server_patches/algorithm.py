"""DFLASH_ONLINE in SGLang's registry of speculative algorithms.

    --speculative-algorithm DFLASH_ONLINE --> DflashOnlineAlgorithm --> worker.DflashOnlineWorker

Presents itself as DFLASH wherever SGLang asks for capabilities, so that features are captured and
pools are sized, and separates the drafter's block width B from the verify width W.
"""

from __future__ import annotations

import os
from contextlib import nullcontext
from typing import Any

from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
from sglang.srt.speculative.spec_registry import CustomSpecAlgo

from server_patches.compat import ALGORITHM_NAME, MAX_NODES_ENV


class DflashOnlineAlgorithm(CustomSpecAlgo):
    """The algorithm's answers to SGLang's questions. See `CustomSpecAlgo` for the interface."""

    def is_dflash(self) -> bool:
        return True

    def is_dflash_family(self) -> bool:
        return True

    def supports_target_verify_for_draft(self) -> bool:
        return True

    def supports_prefill_shared_read_done(self) -> bool:
        return True

    def supports_mixed_chunk(self) -> bool:
        return True

    def supports_grammar_overlap(self) -> bool:
        return True

    def need_topk(self) -> bool:
        return False

    def carries_draft_hidden_states(self) -> bool:
        return False

    def create_future_map(
        self,
        device: Any,
        req_to_token_pool: Any,
        needs_cpu_seq_lens: bool = True,
        needs_confidence_relay: bool = False,
    ) -> Any:
        from sglang.srt.managers.overlap_utils import FutureMap

        return FutureMap(device, self, req_to_token_pool, needs_cpu_seq_lens, needs_confidence_relay)

    def handle_server_args(self, server_args: Any) -> None:
        """Resolve the DFLASH arguments as upstream does, on CPU too."""
        from sglang.srt.arg_groups.speculative_hook import _handle_dflash, resolving_view

        from server_patches.plugin import has_accelerator

        if has_accelerator():
            scope: Any = nullcontext()
        else:
            from server_patches.cpu.install import accept_cpu_for_dflash

            scope = accept_cpu_for_dflash()
        with scope:
            _handle_dflash(server_args)
        # Verify width W and drafter width B part here: the reserves follow W, the drafter follows B.
        block_size = int(resolving_view(server_args).speculative_num_draft_tokens)
        server_args.speculative_dflash_block_size = block_size
        max_nodes = int(os.environ.get(MAX_NODES_ENV, "0"))
        server_args.speculative_num_draft_tokens = max(block_size, 1 + max_nodes)


def register_algorithm() -> None:
    """Add DFLASH_ONLINE to the registry. The worker is imported only where one is built."""

    @SpeculativeAlgorithm.register(ALGORITHM_NAME, supports_overlap=True, spec_class=DflashOnlineAlgorithm)
    def _worker_class(_server_args: Any) -> type:
        from server_patches.worker import DflashOnlineWorker

        return DflashOnlineWorker
