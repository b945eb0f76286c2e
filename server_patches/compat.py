"""The exact SGLang this package patches, and every upstream name it touches.

Start-up refuses any other version: the patches follow line-level facts of this one. `PATCHED_NAMES` is
printed by `python -m server_patches --list-patches` and checked by a test against the installed SGLang.
"""

from __future__ import annotations

import importlib.metadata
from dataclasses import dataclass

from dflash_online.errors import PluginError

SGLANG_VERSION = "0.5.23"
PLUGIN_NAME = "dflash_online"
POLICY_ENV, MAX_NODES_ENV = "DFLASH_POLICY", "DFLASH_MAX_NODES"
VERIFY_WIDTHS_ENV = "DFLASH_VERIFY_WIDTHS"
ALGORITHM_NAME = "DFLASH_ONLINE"


@dataclass(frozen=True, slots=True)
class PatchedName:
    """One upstream name: how it is touched, why, and what would make the patch unnecessary."""

    name: str
    how: str
    reason: str
    obsolete_when: str
    cpu_only: bool = False


_SRT = "sglang.srt"
PATCHED_NAMES = (
    PatchedName(
        f"{_SRT}.speculative.spec_info.SpeculativeAlgorithm",
        "register",
        "adds the algorithm DFLASH_ONLINE, whose one worker serves off, chain and tree",
        "never: this is the official registry",
    ),
    PatchedName(
        f"{_SRT}.managers.scheduler.Scheduler.init_request_dispatcher",
        "after",
        "lets control messages (stage, commit, policy, capture) reach the scheduler between two steps",
        "upstream offers a generic control channel for plugins",
    ),
    PatchedName(
        f"{_SRT}.managers.tokenizer_control_mixin._COMMUNICATOR_SPECS",
        "append",
        "the front end's half of the same channel",
        "upstream offers a generic control channel for plugins",
    ),
    PatchedName(
        f"{_SRT}.managers.scheduler.Scheduler.handle_generate_request",
        "before",
        "a prefix cached with an older drafter's context keys would lower acceptance: the cache key carries"
        " the drafter version",
        "upstream refreshes or versions drafter KV in the prefix cache",
    ),
    PatchedName(
        f"{_SRT}.managers.scheduler_components.batch_result_processor"
        ".SchedulerBatchResultProcessor._resolve_spec_v2_tokens",
        "after",
        "exact acceptance per drafter version, taken where the counts are on the host anyway",
        "upstream reports a histogram per weight version",
    ),
    PatchedName(
        f"{_SRT}.managers.scheduler_components.batch_result_processor"
        ".SchedulerBatchResultProcessor.process_batch_result_decode",
        "after",
        "the same counts, cut where a step ends its request",
        "upstream reports a histogram per weight version",
    ),
    PatchedName(
        f"{_SRT}.mem_cache.allocation_sizing.get_req_to_token_extra_context_len",
        "after",
        "a request near the context limit would write past its row (reserve is 2 * W, headroom 4 + W)",
        "upstream sizes the row by the reserve",
    ),
    PatchedName(
        f"{_SRT}.managers.scheduler.validate_dflash_request",
        "after",
        "upstream admits requests for sampling masks, which our verify does not make, and the server dies of"
        " the first one; and for hidden states, which would silently be missing",
        "this worker makes both",
    ),
    PatchedName(
        f"{_SRT}.speculative.dflash_utils.resolve_dflash_verify_mask_policy",
        "after",
        "a captured verify graph leaves the mask out, and would verify a tree as if it were a chain",
        "upstream captures DFLASH's verify pass with a mask",
    ),
    PatchedName(
        f"{_SRT}.entrypoints.http_server.app",
        "add routes",
        "the /dflash/* interface on SGLang's own port and behind its keys",
        "never: adding routes is additive",
    ),
    PatchedName(
        f"{_SRT}.arg_groups.choices.DRAFT_ATTENTION_BACKEND_CHOICES",
        "append",
        "the draft model's attention runs on the plain torch backend",
        "upstream allows torch_native for drafters",
        cpu_only=True,
    ),
    PatchedName(
        f"{_SRT}.arg_groups.speculative_hook.current_platform",
        "scoped replacement",
        "DFLASH's device check accepts no CPU",
        "upstream lists cpu for DFLASH",
        cpu_only=True,
    ),
    PatchedName(
        f"{_SRT}.layers.attention.torch_native_backend.TorchNativeAttnBackend",
        "replace",
        "has no verify forward, and loops over requests",
        "upstream verifies on torch_native",
        cpu_only=True,
    ),
    PatchedName(
        f"{_SRT}.models.dflash.DFlashAttention.__init__",
        "after",
        "turns off a fused norm and rotary kernel that needs Triton on a device",
        "upstream checks for a device there",
        cpu_only=True,
    ),
    PatchedName(
        f"{_SRT}.models.dflash.DFlashDraftModel.forward",
        "before",
        "SGLang casts input embeddings to bf16; a float32 drafter needs them in its own dtype",
        "upstream casts to the model's dtype",
        cpu_only=True,
    ),
    PatchedName(
        f"{_SRT}.distributed.parallel_state.init_model_parallel_group",
        "before",
        "ranks on a CPU would open NCCL where its library is installed, and fail",
        "upstream asks for NCCL on a GPU only",
        cpu_only=True,
    ),
    PatchedName(
        f"{_SRT}.layers.quantization.unquant.UnquantizedLinearMethod.apply",
        "around",
        "torch's matrix product takes twice the time for two rows and more: no verify pass would pay",
        "torch multiplies few rows at the speed of memory",
        cpu_only=True,
    ),
    PatchedName(
        f"{_SRT}.layers.logits_processor.LogitsProcessor._compute_lm_head",
        "around",
        "the same for the head",
        "torch multiplies few rows at the speed of memory",
        cpu_only=True,
    ),
    PatchedName(
        "torch.Tensor.record_stream",
        "assign",
        "SGLang calls it on CPU tensors, where torch raises; streams do not exist there",
        "upstream guards the call",
        cpu_only=True,
    ),
)


def require_supported_version() -> None:
    """Raise unless the installed SGLang is exactly the supported one.

    Raises:
        PluginError: SGLang is missing or of another version.
    """
    try:
        found = importlib.metadata.version("sglang")
    except importlib.metadata.PackageNotFoundError as exc:
        raise PluginError(f"sglang must be version {SGLANG_VERSION}, but it is not installed") from exc
    if found != SGLANG_VERSION:
        raise PluginError(f"sglang must be version {SGLANG_VERSION}, got {found}")
