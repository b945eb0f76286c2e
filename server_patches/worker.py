"""The speculative worker: grow a tree (`drafting`), verify it in one target pass, walk, commit.

    ScheduleBatch --prefill--> upstream's path, plus the capture tap
                  --decode--> draft -> tree -> verify -> choose -> walk -> commit -> GenerationBatchResult

Runs in SGLang's scheduler process, once per step, on every TP rank. Subclasses upstream's worker for what
does not depend on the tree: loading, pools, graphs, prefill, context append. Root only, a chain and any
tree are one code path (`dflash_online.tree`). The target's token is chosen at every node from the target's
own distribution (argmax, or one sample after temperature, top-k, top-p, min-p), so that the output law
is that of plain decoding at any temperature. Knows nothing of HTTP; policy, capture and swap reach in
through attributes between two steps.

Shape letters: R = requests, N = nodes, P = path, F = features, V = vocabulary.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch
from sglang.kernels.ops.speculative.cache_locs import assign_extend_cache_locs_func
from sglang.srt.layers.logprob_processor import compute_spec_logprobs
from sglang.srt.layers.sampler import (
    apply_custom_logit_processor,
    top_k_top_p_min_p_sampling_from_probs_torch,
)
from sglang.srt.managers.utils import GenerationBatchResult
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode
from sglang.srt.runtime_context import get_exec, get_parallel, get_spec
from sglang.srt.speculative.dflash_info import DFlashVerifyInput
from sglang.srt.speculative.dflash_info_v2 import DFlashDraftInputV2
from sglang.srt.speculative.dflash_worker_v2 import DFlashWorkerV2
from sglang.srt.speculative.spec_utils import GrammarTree, build_grammar_vocab_mask

from dflash_online.errors import PluginError
from dflash_online.tree.build import warm_up
from dflash_online.tree.draft_tree import DraftTrees, links
from dflash_online.tree.policy import Policy, PolicyMode
from dflash_online.tree.walk import Walk, walk
from server_patches.acceptance import StepRanks, StepTag
from server_patches.auto import AutoPolicy
from server_patches.capture.tap import CaptureTap
from server_patches.drafting import Drafting
from server_patches.penalties import Penalties
from server_patches.probe import DrafterProbe
from server_patches.verify_graphs import VerifyGraphs
from server_patches.verify_window import VerifyWindows, live_rows, widths_from_environment


class DflashOnlineWorker(DFlashWorkerV2):
    """One worker per TP rank. `policy`, `tap` and `drafter_version` may be changed between two steps."""

    def __init__(self, server_args: Any, gpu_id: int, nccl_port: int, target_worker: Any) -> None:
        self.max_nodes = int(get_spec().speculative_num_draft_tokens) - 1
        self._drafter_block_size = int(get_spec().speculative_dflash_block_size)
        with self._drafter_width():
            super().__init__(server_args, gpu_id, nccl_port, target_worker)
        if self.use_compact_draft_cache:
            raise PluginError("--speculative-draft-window-size is not supported by DFLASH_ONLINE")
        if get_parallel().attn_dp_enabled:
            raise PluginError("--enable-dp-attention is not supported by DFLASH_ONLINE")
        if get_exec().features.enable_watermark:
            raise PluginError("--enable-watermark is not supported by DFLASH_ONLINE")
        if self._is_domino or self.selector is not None or self.lilicorr is not None:
            raise PluginError(
                "DFLASH_ONLINE drafts with plain DFlash only, not with DFlash2, Domino or LiLiCorr"
            )
        self.policy = Policy(mode=PolicyMode.CHAIN, num_nodes=self.block_size - 1)
        self.drafter_version = "none"
        self.tap = CaptureTap(is_writer=get_parallel().tp_rank == 0)
        self.auto = AutoPolicy(self.device)
        self.penalties = Penalties()
        self.probe = DrafterProbe()
        self.windows = VerifyWindows(1 + self.max_nodes, int(self.model_runner.model_config.context_len))
        self.graphs = VerifyGraphs(target_worker.model_runner)
        self.drafting = Drafting(self)
        warm_up(self.device)

    # The configuration holds the verify width W, by which pools and reserves are sized; what belongs to the
    # drafter is built with its own width B.

    def _drafter_width(self) -> AbstractContextManager[Any]:
        return get_spec().override(speculative_num_draft_tokens=self._drafter_block_size)

    def alloc_memory_pool(self, *args: Any, **kwargs: Any) -> Any:
        with self._drafter_width():
            return super().alloc_memory_pool(*args, **kwargs)

    def init_attention_backends(self) -> Any:
        with self._drafter_width():
            return super().init_attention_backends()

    def init_cuda_graphs(self) -> Any:
        with self._drafter_width():
            result = super().init_cuda_graphs()
        widths = widths_from_environment()
        if widths is None:
            # Nothing is drafted, a chain, the largest tree.
            widths = [1, self.block_size, 1 + self.max_nodes] if self.graphs.has_graphs else []
        self.windows.prepare(widths, self.target_worker.model_runner.attn_backend, self.graphs)
        return result

    # ---- one step -------------------------------------------------------------------------------------

    def forward_batch_generation(
        self,
        batch: Any,
        on_publish: Any = None,
        grammar_barrier: Any = None,
        pp_proxy_tensors: Any = None,
    ) -> GenerationBatchResult:
        is_decode = not (
            batch.forward_mode.is_extend() or batch.is_extend_in_batch or batch.forward_mode.is_idle()
        )
        self.tap.begin_step(batch, self.drafter_version)
        if is_decode:
            timed = self.auto.begin(
                self.policy, len(batch.reqs), self.drafting.num_steps + 1, self.drafter_version
            )
            policy = self.policy if timed is None else timed.policy
            result = self._decode(batch, policy, on_publish, grammar_barrier)
            # A step that could not draft what was chosen says nothing of the choice.
            if timed is not None and result.dflash_step.num_nodes == timed.choice.num_nodes:
                timed.timer.finish()
                result.dflash_timed = timed
            return result
        self.penalties.adjust_prefill(batch)
        result = super().forward_batch_generation(batch, on_publish, grammar_barrier, pp_proxy_tensors)
        self.penalties.remember(batch, result.next_token_ids[:, None], None)
        return result

    def _validate_phase1_sampling_support(self, batch: Any) -> None:
        """Upstream warns here that sampling falls back to argmax. It does not in this worker."""

    def _decode(
        self, batch: Any, policy: Policy, on_publish: Any, grammar_barrier: Any
    ) -> GenerationBatchResult:
        if batch.spec_info is None:
            batch.spec_info = DFlashDraftInputV2.create_idle_input(device=self.device)
        draft_input = batch.spec_info
        # Carried over from the previous overlapped step, maybe made on another stream.
        batch.seq_lens.record_stream(torch.get_device_module(self.device).current_stream())
        prefix_R = batch.seq_lens
        trees = self.drafting.grow(batch, draft_input, policy)
        width = self.windows.width_of(trees.num_nodes)
        cache_loc_RW, plan = self.plan_window(batch, draft_input, width)
        logits_output, target_out = self._verify(
            batch, draft_input, trees, cache_loc_RW, plan, grammar_barrier
        )
        target_token_RN = self._choose_tokens(batch, logits_output.next_token_logits, trees)
        self._sync_ranks(batch, target_token_RN)
        committed = walk(trees, target_token_RN)
        commit_lens = committed.num_committed_R.to(torch.int32)
        self.penalties.remember(batch, committed.produced_RP, commit_lens)
        if batch.return_logprob:
            self._add_logprobs(batch, logits_output, trees, target_token_RN, committed)
        new_seq_lens = prefix_R + commit_lens.to(prefix_R.dtype)
        self._commit_recurrent_state(batch, prefix_R, new_seq_lens, commit_lens)
        if on_publish is not None:
            on_publish(new_seq_lens)
        self._commit_rows(
            logits_output.hidden_states, trees, committed, cache_loc_RW, plan, prefix_R, commit_lens
        )
        # Keep the overlap scheduler from copying the feature buffer to the host.
        logits_output.hidden_states = None
        result = GenerationBatchResult(
            logits_output=logits_output,
            next_token_ids=committed.produced_RP.reshape(-1),
            accept_lens=commit_lens,
            can_run_cuda_graph=target_out.can_run_cuda_graph,
            next_draft_input=self._make_next_draft_input_decode(
                bonus_tokens=committed.bonus_R, new_seq_lens=new_seq_lens
            ),
            speculative_num_draft_tokens=int(self.block_size),
            speculative_output_stride=trees.max_depth + 1,
            new_seq_lens=new_seq_lens,
            routed_experts_output=target_out.routed_experts_output,
            indexer_topk_output=target_out.indexer_topk_output,
        )
        result.dflash_step = StepTag(self.drafter_version, trees.num_nodes - 1, trees.is_chain)
        result.dflash_ranks = StepRanks(trees, committed)
        return result

    # ---- verify ---------------------------------------------------------------------------------------

    def plan_window(self, batch: Any, draft_input: Any, width: int) -> tuple[torch.Tensor, Any]:
        """Cache slots `[L, L + width)` of each request, [R, width], and the index plan of that window."""
        cache_loc = assign_extend_cache_locs_func(
            req_pool_indices=batch.req_pool_indices,
            req_to_token=self.model_runner.req_to_token_pool.req_to_token,
            start_offset=batch.seq_lens,
            end_offset=batch.seq_lens + width,
            batch_size=len(batch.reqs),
            draft_token_num=width,
            device=self.device,
        )
        plan = self.target_worker.model_runner.kv_index_translator.plan(
            req_pool_indices=batch.req_pool_indices,
            seq_lens=batch.seq_lens,
            seq_lens_cpu=batch.seq_lens_cpu
            if batch.seq_lens_cpu is not None
            else draft_input.nxt_kv_lens_cpu,
            write_virtual=cache_loc,
            read_extent=width,
        )
        return cache_loc.view(len(batch.reqs), width), plan

    def host_lengths(self, batch: Any, draft_input: Any, width: int) -> tuple[torch.Tensor, int]:
        """Upper bounds on the host of key lengths: committed prefix and one window."""
        if batch.seq_lens_cpu is not None:
            lengths = batch.seq_lens_cpu + width
            return lengths, int(lengths.sum())
        return draft_input.nxt_kv_lens_cpu, int(draft_input.nxt_kv_lens_sum)

    def _verify(
        self,
        batch: Any,
        draft_input: Any,
        trees: DraftTrees,
        cache_loc_RW: torch.Tensor,
        plan: Any,
        grammar_barrier: Any,
    ) -> tuple[Any, Any]:
        """One target pass over all nodes; logits [R*N, V] adjusted as sampling would, features [R*N, F]."""
        # Starts an asynchronous copy, so it goes ahead of the target's pass.
        grammar_tree = self._grammar_tree(trees) if batch.has_grammar else None
        num_requests, width = cache_loc_RW.shape
        lengths_before = batch.seq_lens_cpu, batch.seq_lens_sum
        batch.seq_lens_cpu, batch.seq_lens_sum = self.host_lengths(batch, draft_input, width)
        inputs = self.windows.inputs(trees, batch.seq_lens, width, batch.seq_lens_sum)
        verify_input = DFlashVerifyInput(
            draft_token=inputs.token_id,
            positions=inputs.position,
            draft_token_num=width,
            custom_mask=inputs.mask,
            capture_hidden_mode=CaptureHiddenMode.FULL,
            kv_loc_plan=plan,
        )
        batch.out_cache_loc = cache_loc_RW.reshape(-1)
        with self.graphs.using(width):
            forward_batch, _ = verify_input.prepare_for_verify(batch, self.target_worker)
            batch.seq_lens_cpu, batch.seq_lens_sum = lengths_before
            target_out = self.target_worker.forward_batch_generation(
                batch=None, forward_batch=forward_batch, is_verify=True, skip_attn_backend_init=True
            )
        logits_output = target_out.logits_output
        processor = self._target_logits_processor
        if processor is not None and processor.is_deferred_shard(logits_output.next_token_logits):
            logits_output.next_token_logits = processor.finish_deferred_gather(
                logits_output.next_token_logits
            )
        logits_output.next_token_logits = live_rows(
            logits_output.next_token_logits, num_requests, trees.num_nodes
        )
        grammar_mask = None
        if grammar_tree is not None:
            grammar_mask = build_grammar_vocab_mask(
                reqs=batch.reqs,
                tree=grammar_tree,
                sampling_info=batch.sampling_info,
                device=logits_output.next_token_logits.device,
                barrier=grammar_barrier,
            )
        self._adjust_logits(batch, logits_output.next_token_logits, trees, grammar_mask)
        return logits_output, target_out

    def _adjust_logits(
        self, batch: Any, logits_NV: torch.Tensor, trees: DraftTrees, grammar_mask: Any
    ) -> None:
        """What a sampler does before it samples, in place, in the order of SGLang's own. [R*N, V]."""
        info = batch.sampling_info
        if info is not None and info.has_custom_logit_processor:
            apply_custom_logit_processor(logits_NV, info, num_tokens_in_batch=trees.num_nodes)
        self.penalties.adjust_nodes(batch, logits_NV, trees)
        if grammar_mask is not None:
            grammar_mask.apply(logits_NV)
        if info is not None and info.logit_bias is not None:
            logits_NV.view(len(batch.reqs), trees.num_nodes, -1).add_(info.logit_bias[:, None])

    @staticmethod
    def _grammar_tree(trees: DraftTrees) -> GrammarTree:
        if trees.is_chain:
            return GrammarTree.from_linear_chain(trees.token_id_RN)
        return GrammarTree.from_device(*links(trees), trees.token_id_RN)

    def _choose_tokens(self, batch: Any, logits_NV: torch.Tensor, trees: DraftTrees) -> torch.Tensor:
        """The target's token at every node, [R, N] int64: argmax, or one sample of its distribution."""
        num_requests, num_nodes = trees.token_id_RN.shape
        info = batch.sampling_info
        if info is None or info.is_all_greedy:
            return torch.argmax(logits_NV, dim=-1).view(num_requests, num_nodes)

        def per_node(value: Any) -> Any:
            return None if value is None else torch.repeat_interleave(value, num_nodes, dim=0)

        probs = torch.softmax(logits_NV.float() / per_node(info.temperatures), dim=-1)
        tokens = top_k_top_p_min_p_sampling_from_probs_torch(
            probs,
            per_node(info.top_ks),
            per_node(info.top_ps),
            per_node(info.min_ps),
            info.need_min_p_sampling,
            per_node(info.sampling_seed),
            (batch.seq_lens[:, None] + trees.depth_RN).reshape(-1),
        )
        # SGLang writes temperature 0 as top-k 1, where equal probabilities would be a toss-up.
        tokens = torch.where(per_node(info.top_ks) <= 1, torch.argmax(logits_NV, dim=-1), tokens.flatten())
        return tokens.to(torch.int64).view(num_requests, num_nodes)

    def _sync_ranks(self, batch: Any, target_token_RN: torch.Tensor) -> None:
        """Rank 0's tokens on every rank, in place; the site is upstream's name for where ranks may part."""
        from sglang.srt.speculative.spec_tp_sync import SpecTpSyncSite

        is_greedy = batch.sampling_info is None or batch.sampling_info.is_all_greedy
        self._tp_sync.sync(
            SpecTpSyncSite.DFLASH_ACCEPT_GREEDY if is_greedy else SpecTpSyncSite.DFLASH_ACCEPT_SAMPLE,
            target_token_RN,
        )

    def _add_logprobs(
        self,
        batch: Any,
        logits_output: Any,
        trees: DraftTrees,
        target_token_RN: torch.Tensor,
        committed: Walk,
    ) -> None:
        first_node_R = torch.arange(len(batch.reqs), device=self.device) * trees.num_nodes
        compute_spec_logprobs(
            batch,
            logits_output,
            target_token_RN.reshape(-1),
            accept_index=committed.path_RP + first_node_R[:, None],
        )

    # ---- commit ---------------------------------------------------------------------------------------

    def _commit_recurrent_state(
        self, batch: Any, prefix_R: torch.Tensor, new_seq_lens: torch.Tensor, commit_lens: torch.Tensor
    ) -> None:
        if self._need_mamba_verify_commit:
            self._update_target_mamba_state_after_verify(
                batch=batch,
                seq_lens_pre_verify=prefix_R,
                seq_lens_post_verify=new_seq_lens,
                commit_lens=commit_lens,
            )

    def _commit_rows(
        self,
        features: torch.Tensor,
        trees: DraftTrees,
        committed: Walk,
        cache_loc_RW: torch.Tensor,
        plan: Any,
        prefix_R: torch.Tensor,
        commit_lens: torch.Tensor,
    ) -> None:
        """Move the path's target KV to the front of the window and append its features to the drafter."""
        num_requests = cache_loc_RW.shape[0]
        longest = trees.max_depth + 1
        features_RWF = features.view(num_requests, -1, features.shape[-1])
        if trees.is_chain:
            features_RPF = features_RWF[:, :longest]
        else:
            source_RP = cache_loc_RW.gather(1, committed.path_RP)
            self.target_worker.model_runner.token_to_kv_pool.move_kv_cache(
                cache_loc_RW[:, :longest].reshape(-1), source_RP.reshape(-1)
            )
            features_RPF = features_RWF.gather(
                1, committed.path_RP[:, :, None].expand(-1, -1, features_RWF.shape[-1])
            )
        draft_loc_RP = self._draft_write_ids(plan).view(num_requests, -1)[:, :longest].contiguous()
        self._append_target_hidden_to_draft_kv_by_loc(
            target_hidden=features_RPF.reshape(num_requests * longest, -1),
            cache_loc=draft_loc_RP.reshape(-1),
            cache_loc_2d=draft_loc_RP,
            positions=(prefix_R[:, None] + torch.arange(longest, device=self.device)).reshape(-1),
            commit_lens=commit_lens,
        )

    def _append_target_hidden_to_draft_kv_by_loc(self, *, target_hidden: torch.Tensor, **kwargs: Any) -> None:
        # Every committed feature row passes here, of prefill, chunks and verify alike: the one capture point.
        self.tap.take(target_hidden, kwargs.get("commit_lens"))
        super()._append_target_hidden_to_draft_kv_by_loc(target_hidden=target_hidden, **kwargs)
