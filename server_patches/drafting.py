"""The first half of a step: one drafter pass over `[anchor, MASK, ...]`, and the trees that grow from it.

    anchors --drafter--> hidden states of the slots --target's head--> chain, or best tree --> DraftTrees

Part of the worker, on every TP rank, once per decode step. Root only skips the drafter.

Shape letters: R = requests, B = block, D = drafts, H = hidden, V = vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.model_executor.forward_batch_info import (
    CaptureHiddenMode,
    ForwardBatch,
    ForwardMode,
    enable_num_token_non_padded,
)
from sglang.srt.runtime_context import get_parallel
from sglang.srt.speculative.dflash_utils import is_dense_head_weight
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
from sglang.srt.speculative.spec_utils import draft_tp_context

from dflash_online.tree.build import tree_of_candidates
from dflash_online.tree.candidates import Candidates, merge_shards, shard_candidates, top_candidates
from dflash_online.tree.draft_tree import DraftTrees, chain_trees, root_trees
from dflash_online.tree.policy import Policy, PolicyMode
from server_patches.cpu.linear import is_covered, linear


class Drafting:
    """Drafts for one worker, whose pools, plans and models it uses."""

    def __init__(self, worker: Any) -> None:
        self._worker = worker
        self.num_steps = 0
        self._slot_offset_B = torch.arange(worker.block_size, device=worker.device)

    def why_no_tree(self) -> str | None:
        """Why this server cannot verify trees; None when it can."""
        runner = self._worker.target_worker.model_runner
        refusal = self._worker.windows.why_no_mask(runner)
        if refusal is not None:
            return refusal
        if self._worker._need_mamba_verify_commit:
            return "the target keeps recurrent state, which a tree verify would mix between branches"
        if not is_dense_head_weight(getattr(runner.model.lm_head, "weight", None)):
            return "the target's head is quantized"
        return None

    def why_no_auto(self) -> str | None:
        """Why this server cannot choose by itself; None when it can."""
        if get_parallel().tp_size > 1:
            return (
                "ranks measure different step times and would choose differently (tensor parallelism is on)"
            )
        return None

    def grow(self, batch: Any, draft_input: Any, policy: Policy) -> DraftTrees:
        """The trees of one step: root only, chains, or the best trees of the policy's size."""
        anchor_R = draft_input.bonus_tokens.to(torch.int64)
        self.num_steps += 1
        num_nodes = policy.num_drafts(len(batch.reqs), self.num_steps)
        if batch.sampling_info is not None and batch.sampling_info.has_custom_logit_processor:
            # It may look at the request's output, which is not that of a node inside a path.
            num_nodes = 0
        if num_nodes == 0:
            return root_trees(anchor_R)
        hidden_RDH, is_in_graph = self._draft_block(batch, draft_input, anchor_R)
        if policy.mode is PolicyMode.TREE:
            # Depths beyond the number of nodes can never be used.
            candidates = self._candidates(hidden_RDH[:, :num_nodes], num_nodes)
            return tree_of_candidates(anchor_R, candidates, num_nodes)
        return chain_trees(anchor_R, self._tokens(hidden_RDH, is_in_graph)[:, :num_nodes])

    def _draft_block(self, batch: Any, draft_input: Any, anchor_R: torch.Tensor) -> tuple[torch.Tensor, bool]:
        """One drafter pass over `[anchor, MASK, ...]`.

        Returns:
            [R, D, H] final hidden states of the slots to draft, and whether a graph has drafted them already.
        """
        num_requests, prefix_R = len(batch.reqs), batch.seq_lens
        block_id_RB = torch.full(
            (num_requests, self._worker.block_size),
            int(self._worker._mask_token_id),
            dtype=torch.int64,
            device=self._worker.device,
        )
        block_id_RB[:, 0] = anchor_R
        cache_loc_RB, plan = self._worker.plan_window(batch, draft_input, self._worker.block_size)
        seq_lens_cpu, seq_lens_sum = self._worker.host_lengths(batch, draft_input, self._worker.block_size)
        embeds = self._embed(block_id_RB)
        forward_batch = ForwardBatch(
            forward_mode=ForwardMode.TARGET_VERIFY,
            batch_size=num_requests,
            input_ids=block_id_RB.flatten(),
            req_pool_indices=batch.req_pool_indices,
            seq_lens=prefix_R,
            out_cache_loc=cache_loc_RB.reshape(-1),
            seq_lens_sum=seq_lens_sum,
            seq_lens_cpu=seq_lens_cpu,
            positions=(prefix_R[:, None] + self._slot_offset_B).reshape(-1),
            input_embeds=embeds.view(-1, embeds.shape[-1]),
            spec_algorithm=SpeculativeAlgorithm.DFLASH,
            spec_info=self._worker._draft_block_spec_info,
            capture_hidden_mode=CaptureHiddenMode.NULL,
            num_token_non_padded=(
                torch.full((), block_id_RB.numel(), dtype=torch.int32, device=self._worker.device)
                if enable_num_token_non_padded()
                else None
            ),
            global_num_token_non_padded_cpu=block_id_RB.numel(),
            can_run_decode_cuda_graph=batch.can_run_decode_cuda_graph,
        )
        plan.bind(forward_batch, self._worker.draft_model_runner.kv_index_translator)
        with torch.inference_mode(), draft_tp_context(self._worker.draft_parallel_layout):
            draft_out = self._worker.draft_model_runner.forward(forward_batch)
        hidden_RBH = draft_out.logits_output.hidden_states.view(num_requests, self._worker.block_size, -1)
        self._worker.probe.take(self._worker, batch, block_id_RB, hidden_RBH)
        return hidden_RBH[:, 1:], self._worker._draft_sampler is not None and draft_out.can_run_graph

    def _candidates(self, hidden_RDH: torch.Tensor, num_candidates: int) -> Candidates:
        """The best tokens of each slot by the target's head; equal on every rank.

        Without tokens that were added to the vocabulary later, as LoRA adapters do: they are never drafted.
        """
        head = self._worker.target_worker.model_runner.model.lm_head
        group, shard = get_parallel().tp_group, getattr(head, "shard_indices", None)
        # A head that is the embedding of a model without parallel layers has no padded rows either.
        num_rows = head.weight.shape[0] if shard is None else int(shard.num_org_elements)
        weight_VH = head.weight[:num_rows]
        logits_RDV = linear(hidden_RDH.to(weight_VH.dtype), weight_VH)
        if group.world_size == 1 or shard is None:
            return top_candidates(logits_RDV, num_candidates)
        own_RDC = shard_candidates(logits_RDV, num_candidates, int(shard.org_vocab_start_index))
        all_RDC = own_RDC.new_empty((group.world_size * len(own_RDC), *own_RDC.shape[1:]))
        group.all_gather_into_tensor(all_RDC, own_RDC)
        return merge_shards(all_RDC.view(group.world_size, *own_RDC.shape), int(head.org_vocab_size))

    def _tokens(self, hidden_RDH: torch.Tensor, is_in_graph: bool) -> torch.Tensor:
        """The argmax of each slot, [R, D] int64."""
        num_requests, num_drafts, width = hidden_RDH.shape
        if is_in_graph:
            return self._worker._draft_sampler.out[: num_requests * num_drafts].view(num_requests, num_drafts)
        head = self._worker.target_worker.model_runner.model.lm_head
        weight_VH = getattr(head, "weight", None)
        if isinstance(weight_VH, torch.Tensor) and is_covered(hidden_RDH, weight_VH):
            return self._candidates(hidden_RDH, 1).token_id_RDK[:, :, 0]
        with draft_tp_context(self._worker.draft_parallel_layout):
            draft = self._worker._greedy_sample_from_vocab_parallel_head(
                hidden_states=hidden_RDH.reshape(-1, width),
                lm_head=head,
            )
        return draft.view(num_requests, num_drafts)

    def _embed(self, block_id_RB: torch.Tensor) -> torch.Tensor:
        table = self._worker.draft_model.get_input_embeddings()
        if table is None:
            table = self._worker.target_worker.model_runner.model.get_input_embeddings()
        embeds = table(block_id_RB)
        return embeds if self._worker._noise_embed_scale == 1.0 else embeds * self._worker._noise_embed_scale
