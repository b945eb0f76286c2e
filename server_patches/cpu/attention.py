"""Attention on CPU: one padded torch call per layer for decode and verify, one per request for prefill.

Replaces SGLang's `TorchNativeAttnBackend`, which loops over requests, recomputes rows of the prefix, and
has no verify forward. Keys of a verify forward are the committed prefix followed by the window being
verified; layers of type ENCODER_ONLY (the drafter's full attention) see the whole window, others see it
causally or through the draft tree's visibility.

Shape letters: R = requests, Q = queries per request, L = keys (padded), N = heads, D = head size.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from sglang.srt.layers.radix_attention import AttentionType
from sglang.srt.mem_cache.memory_pool import KVWriteLoc
from torch.nn.functional import scaled_dot_product_attention

from server_patches.cpu.window_mask import window_mask

if TYPE_CHECKING:
    from sglang.srt.layers.radix_attention import RadixAttention
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch


class BatchedTorchAttnBackend(TorchNativeAttnBackend):
    """Drop-in replacement with the same constructor; adds TARGET_VERIFY and batches requests."""

    def __init__(self, model_runner: Any) -> None:
        super().__init__(model_runner)
        self._window_plan: tuple[ForwardBatch, torch.Tensor, dict[tuple[bool, int], torch.Tensor]] | None = (
            None
        )

    def init_forward_metadata(self, forward_batch: ForwardBatch) -> None:
        super().init_forward_metadata(forward_batch)
        self._window_plan = None

    def forward_decode(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: RadixAttention,
        forward_batch: ForwardBatch,
        save_kv_cache: bool = True,
    ) -> torch.Tensor:
        if layer.is_cross_attention:
            return super().forward_decode(q, k, v, layer, forward_batch, save_kv_cache)
        self._save(k, v, layer, forward_batch, save_kv_cache)
        # A decoded token is a window of one whose prefix ends before it.
        return self._attend_windows(q, layer, forward_batch, forward_batch.seq_lens - 1)

    def forward_extend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: RadixAttention,
        forward_batch: ForwardBatch,
        save_kv_cache: bool = True,
    ) -> torch.Tensor:
        if layer.is_cross_attention:
            return super().forward_extend(q, k, v, layer, forward_batch, save_kv_cache)
        self._save(k, v, layer, forward_batch, save_kv_cache)
        if forward_batch.forward_mode.is_target_verify():
            return self._attend_windows(q, layer, forward_batch, forward_batch.seq_lens)
        return self._attend_extends(q, layer, forward_batch)

    def _save(
        self,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: RadixAttention,
        forward_batch: ForwardBatch,
        wanted: bool,
    ) -> None:
        if wanted and k is not None and v is not None:
            location = KVWriteLoc(forward_batch.out_cache_loc, self.swa_out_cache_loc)
            self.token_to_kv_pool.set_kv_buffer(layer, location, k, v)

    def _attend_windows(
        self, q: torch.Tensor, layer: RadixAttention, forward_batch: ForwardBatch, prefix_R: torch.Tensor
    ) -> torch.Tensor:
        num_requests = int(prefix_R.shape[0])
        num_kv_heads, num_groups = layer.tp_k_head_num, layer.tp_q_head_num // layer.tp_k_head_num
        width = int(q.shape[0]) // num_requests
        location_RL, _ = self._plan(forward_batch, prefix_R, width)
        mask_RQL = self._window_mask(layer, forward_batch, prefix_R, width)
        keys = self.token_to_kv_pool.get_key_buffer(layer.layer_id)[location_RL].transpose(1, 2)
        values = self.token_to_kv_pool.get_value_buffer(layer.layer_id)[location_RL].transpose(1, 2)
        # Query heads of a group share a key head: folded into the query axis, so that no key is repeated.
        queries = q.view(num_requests, width, num_kv_heads, num_groups, layer.qk_head_dim).permute(
            0, 2, 3, 1, 4
        )
        out = scaled_dot_product_attention(
            queries.reshape(num_requests, num_kv_heads, num_groups * width, layer.qk_head_dim),
            keys.to(q.dtype),
            values.to(q.dtype),
            attn_mask=mask_RQL.unsqueeze(1).repeat(1, 1, num_groups, 1),
            scale=layer.scaling,
        )
        out = out.view(num_requests, num_kv_heads, num_groups, width, layer.v_head_dim).permute(0, 3, 1, 2, 4)
        return out.reshape(num_requests * width, layer.tp_q_head_num * layer.v_head_dim)

    def _plan(
        self, forward_batch: ForwardBatch, prefix_R: torch.Tensor, width: int
    ) -> tuple[torch.Tensor, dict[tuple[bool, int], torch.Tensor]]:
        """Cache slots of every key, and the masks made so far: the same for all layers of a forward."""
        if self._window_plan is None or self._window_plan[0] is not forward_batch:
            longest = int(prefix_R.max())
            table = self.req_to_token_pool.req_to_token
            prefix_RL = table[forward_batch.req_pool_indices, :longest].to(torch.int64)
            window_RQ = forward_batch.out_cache_loc.view(-1, width).to(torch.int64)
            self._window_plan = (forward_batch, torch.cat([prefix_RL, window_RQ], dim=1), {})
        return self._window_plan[1], self._window_plan[2]

    def _window_mask(
        self, layer: RadixAttention, forward_batch: ForwardBatch, prefix_R: torch.Tensor, width: int
    ) -> torch.Tensor:
        sees_window = layer.attn_type == AttentionType.ENCODER_ONLY
        window = layer.sliding_window_size if layer.sliding_window_size is not None else -1
        location_RL, masks = self._plan(forward_batch, prefix_R, width)
        key = (sees_window, window)
        if key not in masks:
            tree_RQQ = None if sees_window else getattr(forward_batch.spec_info, "custom_mask", None)
            masks[key] = window_mask(
                prefix_R,
                width=width,
                num_keys=int(location_RL.shape[1]),
                sees_window=sees_window,
                sliding_window=window,
                tree_RQQ=tree_RQQ,
                tree_position_RQ=None if tree_RQQ is None else forward_batch.positions.view(-1, width),
            )
        return masks[key]

    def _attend_extends(
        self, q: torch.Tensor, layer: RadixAttention, forward_batch: ForwardBatch
    ) -> torch.Tensor:
        out = q.new_empty(q.shape[0], layer.tp_q_head_num, layer.v_head_dim)
        queries = q.view(-1, layer.tp_q_head_num, layer.qk_head_dim)
        key_buffer = self.token_to_kv_pool.get_key_buffer(layer.layer_id)
        value_buffer = self.token_to_kv_pool.get_value_buffer(layer.layer_id)
        table, first = self.req_to_token_pool.req_to_token, 0
        rows = zip(
            forward_batch.req_pool_indices.tolist(),
            forward_batch.extend_prefix_lens.tolist(),
            forward_batch.extend_seq_lens.tolist(),
            strict=True,
        )
        sees_window = layer.attn_type == AttentionType.ENCODER_ONLY
        window = layer.sliding_window_size if layer.sliding_window_size is not None else -1
        for row, prefix, count in rows:
            location_L = table[row, : prefix + count].to(torch.int64)
            mask_RQL = window_mask(
                torch.tensor([prefix], device=q.device),
                width=count,
                num_keys=prefix + count,
                sees_window=sees_window,
                sliding_window=window,
                tree_RQQ=None,
            )
            part = scaled_dot_product_attention(
                queries[first : first + count].transpose(0, 1).unsqueeze(0),
                key_buffer[location_L].to(q.dtype).transpose(0, 1).unsqueeze(0),
                value_buffer[location_L].to(q.dtype).transpose(0, 1).unsqueeze(0),
                attn_mask=mask_RQL.unsqueeze(1),
                scale=layer.scaling,
                enable_gqa=layer.tp_q_head_num != layer.tp_k_head_num,
            )
            out[first : first + count] = part.squeeze(0).transpose(0, 1)
            first += count
        return out.view(q.shape[0], -1)
