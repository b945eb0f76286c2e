"""The hooks that only a machine without a GPU needs. Each is listed with its reason in `compat`.

Called once per process by `plugin.activate`; touches SGLang only, returns nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


class _CpuPlatform:
    """Answers DFLASH's device check on behalf of the CPU; all else is the real platform's answer."""

    def __init__(self, platform: Any) -> None:
        self._platform = platform

    def is_out_of_tree(self) -> bool:
        return True

    def supports_speculative_algorithm(self, algorithm: str) -> bool:
        return algorithm == "DFLASH"

    def supports_speculative_draft_attention_backend(self, _algorithm: str, backend: str) -> bool:
        return backend == "torch_native"

    def get_default_speculative_draft_attention_backend(self, *_args: object, **_kwargs: object) -> str:
        return "torch_native"

    def __getattr__(self, name: str) -> Any:
        return getattr(self._platform, name)


@contextmanager
def accept_cpu_for_dflash() -> Iterator[None]:
    """While open, SGLang's DFLASH argument check takes the CPU for a supported device."""
    from sglang.srt.arg_groups import speculative_hook

    real = speculative_hook.current_platform
    speculative_hook.current_platform = _CpuPlatform(real)
    try:
        yield
    finally:
        speculative_hook.current_platform = real


def _no_stream(tensor: torch.Tensor, _stream: object) -> None:
    """There are no streams on a CPU, hence nothing to record."""


def _use_plain_norm_and_rope(_result: None, attention: Any, *_args: object, **_kwargs: object) -> None:
    attention.use_table_qk_norm_rope = False


def _embeds_in_weight_dtype(
    model: Any, input_ids: Any, positions: Any, forward_batch: Any, input_embeds: Any = None, **kwargs: Any
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if input_embeds is not None:
        # The runner's copy is rounded to bf16; the batch still holds the embedding in its own dtype.
        exact = forward_batch.input_embeds if forward_batch.input_embeds is not None else input_embeds
        input_embeds = exact.to(model.norm.weight.dtype)
    return (model, input_ids, positions, forward_batch, input_embeds), kwargs


def _no_nccl(*args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return args, {**kwargs, "use_pynccl": False}


def install_cpu_support() -> None:
    """Register all CPU hooks with SGLang's hook registry."""
    from sglang.srt.arg_groups import choices
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    from server_patches.cpu.attention import BatchedTorchAttnBackend
    from server_patches.cpu.linear import apply_linear, compute_head

    if "torch_native" not in choices.DRAFT_ATTENTION_BACKEND_CHOICES:
        choices.DRAFT_ATTENTION_BACKEND_CHOICES.append("torch_native")
    torch.Tensor.record_stream = _no_stream  # type: ignore[method-assign,assignment]
    HookRegistry.register(
        "sglang.srt.layers.attention.torch_native_backend.TorchNativeAttnBackend",
        BatchedTorchAttnBackend,
        HookType.REPLACE,
    )
    HookRegistry.register(
        "sglang.srt.models.dflash.DFlashAttention.__init__", _use_plain_norm_and_rope, HookType.AFTER
    )
    HookRegistry.register(
        "sglang.srt.models.dflash.DFlashDraftModel.forward", _embeds_in_weight_dtype, HookType.BEFORE
    )
    HookRegistry.register(
        "sglang.srt.distributed.parallel_state.init_model_parallel_group", _no_nccl, HookType.BEFORE
    )
    HookRegistry.register(
        "sglang.srt.layers.quantization.unquant.UnquantizedLinearMethod.apply", apply_linear, HookType.AROUND
    )
    HookRegistry.register(
        "sglang.srt.layers.logits_processor.LogitsProcessor._compute_lm_head", compute_head, HookType.AROUND
    )
