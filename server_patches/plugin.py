"""The entry point that SGLang calls in each of its processes (group `sglang.srt.plugins`).

SGLang only logs a plugin that raises and then serves without it. So activation announces itself, or its
failure, in a file per process; the launcher refuses to serve unless every process has announced success.
"""

from __future__ import annotations

import os
from pathlib import Path

ANNOUNCE_DIR_ENV = "DFLASH_ANNOUNCE_DIR"
_announced: list[str] = []


def has_accelerator() -> bool:
    """Whether torch sees a GPU that SGLang can serve on."""
    import torch

    return torch.cuda.is_available() or (hasattr(torch, "xpu") and torch.xpu.is_available())


def activate() -> None:
    """Install everything in this process. Once; a second call does nothing.

    Raises:
        PluginError: SGLang is of another version.
    """
    if _announced:
        return
    try:
        _install()
    except Exception as exc:
        _announce("error", f"{type(exc).__name__}: {exc}")
        raise
    _announced.append("active")
    _announce("active", "")


def _install() -> None:
    from server_patches.compat import require_supported_version

    require_supported_version()
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    from server_patches import scheduler_side, verify_window
    from server_patches.algorithm import register_algorithm
    from server_patches.control import register_front_end
    from server_patches.routes import add_routes

    if not has_accelerator():
        from server_patches.cpu.install import install_cpu_support

        install_cpu_support()
    register_algorithm()
    register_front_end()
    scheduler = "sglang.srt.managers.scheduler.Scheduler"
    results = "sglang.srt.managers.scheduler_components.batch_result_processor.SchedulerBatchResultProcessor"
    rows = "sglang.srt.mem_cache.allocation_sizing.get_req_to_token_extra_context_len"
    HookRegistry.register(f"{scheduler}.init_request_dispatcher", scheduler_side.attach, HookType.AFTER)
    HookRegistry.register(
        f"{scheduler}.handle_generate_request", scheduler_side.bind_cache_key, HookType.BEFORE
    )
    HookRegistry.register(f"{results}._resolve_spec_v2_tokens", scheduler_side.take_step, HookType.AFTER)
    HookRegistry.register(f"{results}.process_batch_result_decode", scheduler_side.count_step, HookType.AFTER)
    HookRegistry.register(rows, scheduler_side.widen_row, HookType.AFTER)
    HookRegistry.register(
        "sglang.srt.managers.scheduler.validate_dflash_request",
        scheduler_side.refuse_what_verify_does_not_return,
        HookType.AFTER,
    )
    HookRegistry.register(
        "sglang.srt.speculative.dflash_utils.resolve_dflash_verify_mask_policy",
        verify_window.read_mask_in_graphs,
        HookType.AFTER,
    )
    add_routes()


def _announce(kind: str, text: str) -> None:
    folder = os.environ.get(ANNOUNCE_DIR_ENV)
    if folder:
        (Path(folder) / f"{os.getpid()}.{kind}").write_text(text)
