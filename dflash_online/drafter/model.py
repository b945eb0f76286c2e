"""The DFlash drafter: one pass fills a block, from the target's features of everything before it.

    features --context--> ctx --+--> keys and values of each layer (inference: ContextCache)
    anchor + masks --embedding of the target--> block --layers--> hidden --head of the target--> drafts

Two ways through the same layers: `forward_blocks` for training, all anchors of a packed batch at once;
`extend_context` and `draft_block` for decoding, one block at a time. A test holds them equal. The context
has keys and values only, no queries; keys of a block are never kept. Embedding and head are the target's
and live in `target.frozen`. Parameter names are those of a published checkpoint.

Source: DFlash specification, sections A.1, A.2, B.1.

Shape letters: A = anchors, B = slots of a block, S = packed context rows, C = new context rows, H = hidden
size, F = K*H feature width, T = any rows, Q = A*B queries, N = heads, M = key/value heads, d = head size.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dflash_online.drafter.attention import (
    AttentionPlan,
    BlockMask,
    attend,
    attend_masked,
    layer_window,
    plan_attention,
    sees_block,
    sees_context,
)
from dflash_online.drafter.config import DrafterConfig
from dflash_online.drafter.context_cache import ContextCache
from dflash_online.drafter.rotary import Rotation, rotate, rotation_of
from dflash_online.errors import ShapeError


class RmsNorm(nn.Module):
    """Root-mean-square norm over the last axis; statistics in float32."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        scaled = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return (scaled * self.weight).to(x.dtype)


class BlockAttention(nn.Module):
    """Projections of one layer. Context rows yield keys and values, block rows queries as well."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        query_size, key_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        self.head_dim = config.head_dim
        self.q_proj = nn.Linear(config.hidden_size, query_size, bias=config.attention_bias)
        self.k_proj = nn.Linear(config.hidden_size, key_size, bias=config.attention_bias)
        self.v_proj = nn.Linear(config.hidden_size, key_size, bias=config.attention_bias)
        self.o_proj = nn.Linear(query_size, config.hidden_size, bias=config.attention_bias)
        self.q_norm = RmsNorm(config.head_dim, config.rms_norm_eps)
        self.k_norm = RmsNorm(config.head_dim, config.rms_norm_eps)

    def queries(self, rows_TH: Tensor, rotation: Rotation) -> Tensor:
        """[T, N, d], normed and rotated."""
        query_TNd = self.q_proj(rows_TH).unflatten(-1, (-1, self.head_dim))
        return rotate(self.q_norm(query_TNd), rotation)

    def keys_values(self, rows_TH: Tensor, rotation: Rotation) -> tuple[Tensor, Tensor]:
        """Keys, normed and rotated, and values of context or block rows: [T, M, d] each."""
        key_TMd = self.k_proj(rows_TH).unflatten(-1, (-1, self.head_dim))
        value_TMd = self.v_proj(rows_TH).unflatten(-1, (-1, self.head_dim))
        return rotate(self.k_norm(key_TMd), rotation), value_TMd

    def output(self, attended_TNd: Tensor) -> Tensor:
        """[T, H], what the layer adds to the residual stream."""
        out: Tensor = self.o_proj(attended_TNd.flatten(-2))
        return out


class GatedMlp(nn.Module):
    """SwiGLU."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class DrafterLayer(nn.Module):
    """One draft layer. `input_layernorm` is for the block's stream only: the context is normed already."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.input_layernorm = RmsNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = BlockAttention(config)
        self.post_attention_layernorm = RmsNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = GatedMlp(config)

    def finish(self, hidden_TH: Tensor, attended_TNd: Tensor) -> Tensor:
        """Residual stream after attention and MLP."""
        hidden_TH = hidden_TH + self.self_attn.output(attended_TNd)
        hidden_TH = hidden_TH + self.mlp(self.post_attention_layernorm(hidden_TH))
        return hidden_TH


class DFlashDrafter(nn.Module):
    """The trainable drafter. Holds no embedding, no head and no buffer: its state dict is the checkpoint."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.config = config
        self.fc = nn.Linear(config.fc_width, config.hidden_size, bias=False)
        self.hidden_norm = RmsNorm(config.hidden_size, config.rms_norm_eps)
        self.layers = nn.ModuleList([DrafterLayer(config) for _ in range(config.num_layers)])
        self.norm = RmsNorm(config.hidden_size, config.rms_norm_eps)

    @classmethod
    def from_tensors(cls, config: DrafterConfig, tensors: Mapping[str, Tensor]) -> DFlashDrafter:
        """A drafter with these weights as float32 masters. The names must be complete."""
        with torch.device("meta"):
            drafter = cls(config)
        masters = {name: tensor.to(torch.float32, copy=True) for name, tensor in tensors.items()}
        drafter.load_state_dict(masters, strict=True, assign=True)
        return drafter.requires_grad_(True)

    def context(self, features_CF: Tensor) -> Tensor:
        """Context rows that all layers read: [C, H]. Features of any float type.

        Raises:
            ShapeError: the features are not as wide as the config says.
        """
        if features_CF.ndim != 2 or features_CF.shape[1] != self.config.feature_width:
            raise ShapeError(f"features {tuple(features_CF.shape)} must be [C, {self.config.feature_width}]")
        read_CF = features_CF[:, : self.config.fc_width]
        ctx_CH: Tensor = self.hidden_norm(self.fc(read_CF.to(self.fc.weight.dtype)))
        return ctx_CH

    def forward_blocks(
        self,
        embeds_ABH: Tensor,
        ctx_SH: Tensor,
        *,
        block_positions_AB: Tensor,
        ctx_positions_S: Tensor,
        mask: BlockMask,
    ) -> Tensor:
        """All blocks of a packed batch in one pass.

        Args:
            embeds_ABH: target embeddings of `[anchor, MASK, ..., MASK]`.
            ctx_SH: from `context`, over the packed documents.
            block_positions_AB: [A, B] int64, positions within each document.
            ctx_positions_S: [S] int64, the same for the context rows.

        Returns:
            [A, B, H], final norm applied: the target's head turns slot k into the draft for position
            anchor + k. Rows of padded blocks are finite and meaningless.

        Raises:
            ShapeError: the arguments disagree.
        """
        num_anchors, block_size = block_positions_AB.shape
        if embeds_ABH.shape[:2] != block_positions_AB.shape or mask.block_size != block_size:
            raise ShapeError(
                f"{tuple(embeds_ABH.shape)}, {tuple(block_positions_AB.shape)}, {mask.block_size}"
            )
        if not len(ctx_SH) == len(ctx_positions_S) == len(mask.context_document_S):
            raise ShapeError(f"context {len(ctx_SH)}, {len(ctx_positions_S)}, {len(mask.context_document_S)}")
        plans = {kind: plan_attention(mask, kind) for kind in set(self.config.layer_types)}
        block_rotation = self._rotation(block_positions_AB.flatten())
        context_rotation = self._rotation(ctx_positions_S)
        # In the masters' type: under autocast the residual stream stays in float32.
        hidden_QH = embeds_ABH.flatten(0, 1).to(self.fc.weight.dtype)
        for layer, kind in zip(self.layers, self.config.layer_types, strict=True):
            assert isinstance(layer, DrafterLayer)
            hidden_QH = _layer_over_plan(
                layer, hidden_QH, ctx_SH, block_rotation, context_rotation, plans[kind], block_size
            )
        normed: Tensor = self.norm(hidden_QH)
        return normed.view(num_anchors, block_size, -1)

    def new_cache(self) -> ContextCache:
        """An empty context, on the drafter's device and in its type."""
        config, weight = self.config, self.fc.weight
        return ContextCache(
            config.num_layers, config.num_kv_heads, config.head_dim, dtype=weight.dtype, device=weight.device
        )

    @torch.no_grad()
    def extend_context(self, cache: ContextCache, features_CF: Tensor, positions_C: Tensor) -> None:
        """Append committed rows to the context. Rows are never taken back: they are committed."""
        ctx_CH = self.context(features_CF)
        rotation = self._rotation(positions_C)
        for index, layer in enumerate(self.layers):
            assert isinstance(layer, DrafterLayer)
            cache.append(index, *layer.self_attn.keys_values(ctx_CH, rotation))
        cache.advance(positions_C)

    @torch.no_grad()
    def draft_block(self, embeds_BH: Tensor, start: int, cache: ContextCache) -> Tensor:
        """One block at positions `start ..`, over the cached context. Leaves the cache as it is.

        Args:
            embeds_BH: target embeddings of `[anchor, MASK, ...]`.
            start: position of the anchor; the cache holds rows of earlier positions only.

        Returns:
            [B, H], final norm applied.

        Raises:
            ShapeError: the cache holds rows at or after `start`.
        """
        slot_B = torch.arange(len(embeds_BH), device=embeds_BH.device)
        context_position_S = cache.positions_S
        if len(context_position_S) and int(context_position_S[-1]) >= start:
            raise ShapeError(
                f"context reaches position {int(context_position_S[-1])}, the block starts at {start}"
            )
        rotation = self._rotation(start + slot_B)
        hidden_BH = embeds_BH.to(self.fc.weight.dtype)
        for index, (layer, kind) in enumerate(zip(self.layers, self.config.layer_types, strict=True)):
            assert isinstance(layer, DrafterLayer)
            window = layer_window(kind, self.config.sliding_window)
            normed_BH = layer.input_layernorm(hidden_BH)
            key_BMd, value_BMd = layer.self_attn.keys_values(normed_BH, rotation)
            key_SMd, value_SMd = cache.layer(index)
            attended = attend_masked(
                layer.self_attn.queries(normed_BH, rotation),
                torch.cat([key_SMd, key_BMd]),
                torch.cat([value_SMd, value_BMd]),
                None if window is None else _window_mask(slot_B, start, context_position_S, window),
            )
            hidden_BH = layer.finish(hidden_BH, attended)
        normed: Tensor = self.norm(hidden_BH)
        return normed

    def _rotation(self, positions_T: Tensor) -> Rotation:
        config = self.config
        return rotation_of(positions_T, config.head_dim, config.rope_theta, config.yarn)


def _layer_over_plan(
    layer: DrafterLayer,
    hidden_QH: Tensor,
    ctx_SH: Tensor,
    block_rotation: Rotation,
    context_rotation: Rotation,
    plan: AttentionPlan,
    block_size: int,
) -> Tensor:
    normed_QH = layer.input_layernorm(hidden_QH)
    query_QNd = layer.self_attn.queries(normed_QH, block_rotation)
    block_key_QMd, block_value_QMd = layer.self_attn.keys_values(normed_QH, block_rotation)
    key_SMd, value_SMd = layer.self_attn.keys_values(ctx_SH, context_rotation)
    attended_QNd = attend(query_QNd, key_SMd, value_SMd, block_key_QMd, block_value_QMd, plan, block_size)
    return layer.finish(hidden_QH, attended_QNd)


def _window_mask(slot_B: Tensor, start: int, context_position_S: Tensor, window: int) -> Tensor:
    """[B, S + B] bool of one block in a sliding layer; a full layer sees everything and needs none."""
    query_B1 = start + slot_B[:, None]
    context_BS = sees_context(query_B1, torch.full_like(query_B1, start), context_position_S, window)
    return torch.cat([context_BS, sees_block(slot_B[:, None], slot_B, window)], dim=1)
