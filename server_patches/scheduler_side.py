"""What the plugin adds to SGLang's scheduler: control methods, acceptance counts, versioned cache keys.

Hooked after the scheduler has built its workers. Owns one `ControlHandler`, one `DrafterSwap`, one
`AcceptanceCounter` per scheduler process; all run in the scheduler's loop.
"""

from __future__ import annotations

import os
from dataclasses import asdict
from typing import Any

from safetensors.torch import save as serialize

from dflash_online.errors import ConfigError
from dflash_online.tree.policy import Policy, PolicyMode
from server_patches.acceptance import AcceptanceCounter, ResolvedStep, StepCounter, resolved_steps
from server_patches.auto import AutoPolicy, AutoSeries
from server_patches.capture.slots import CaptureKey
from server_patches.compat import POLICY_ENV
from server_patches.control import ControlHandler, DflashControlReqInput, StateConflictError
from server_patches.probe import is_probe_key
from server_patches.swap import DrafterSwap, require_one_data_parallel_rank

CACHE_KEY_PREFIX = "dflash-drafter"
_DEFAULT_TREE_NODES = 16


class SchedulerSide:
    """Everything of ours in one scheduler process."""

    def __init__(self, scheduler: Any, worker: Any) -> None:
        from sglang.srt.runtime_context import get_parallel, get_spec

        require_one_data_parallel_rank(get_parallel().num_dp_ranks)
        self.worker = worker
        self.control = ControlHandler()
        self._resolved: list[ResolvedStep] = []
        self._timed: Any = None
        is_first_rank = get_parallel().tp_rank == 0
        self.acceptance = AcceptanceCounter(*(_acceptance_series() if is_first_rank else ()))
        worker.auto = AutoPolicy(worker.device, AutoSeries() if is_first_rank else None)
        self.swap = DrafterSwap(worker, self.control, get_spec().speculative_draft_model_path)
        worker.policy = self._policy({"mode": os.environ.get(POLICY_ENV, PolicyMode.CHAIN.value)})
        for name, method in (
            ("info", self.info),
            ("policy", self.set_policy),
            ("acceptance", self.report_acceptance),
            ("capture_finish", self.finish_capture),
            ("probe_finish", self.finish_probe),
        ):
            self.control.register(name, method)

    def info(self, _body: dict[str, Any]) -> dict[str, Any]:
        """What only the scheduler knows of /dflash/info."""
        runner = self.worker.target_worker.model_runner
        config = self.swap.live.config
        return {
            "pid": os.getpid(),
            "device": str(self.worker.device),
            "weight_checksum": self.swap.target_checksum,
            "model": {
                "hidden_size": config.hidden_size,
                "vocab_size": config.vocab_size,
                "num_layers": config.num_target_layers,
                "context_length": int(runner.model_config.context_len),
                "dtype": str(runner.dtype).removeprefix("torch."),
            },
            "layer_ids": list(config.target_layer_ids),
            "feature_width": config.feature_width,
            "drafter": self.swap.describe(),
            "policy": describe_policy(self.worker.policy),
            "auto": self.worker.auto.describe(self.worker.policy),
            "max_nodes": self.worker.max_nodes,
            "verify": self.worker.windows.describe(),
        }

    def set_policy(self, body: dict[str, Any]) -> dict[str, Any]:
        """Take a new policy from the next step on."""
        self.worker.policy = self._policy(body)
        return describe_policy(self.worker.policy)

    def _policy(self, body: dict[str, Any]) -> Policy:
        try:
            mode = PolicyMode(str(body.get("mode")))
        except ValueError as exc:
            raise ConfigError("mode", body.get("mode"), f"one of {[m.value for m in PolicyMode]}") from exc
        refusal = self.worker.drafting.why_no_tree() if mode is PolicyMode.TREE else None
        if refusal is not None:
            raise ConfigError("mode", mode.value, f"off or chain on this server: {refusal}")
        refusal = self.worker.drafting.why_no_auto() if mode is PolicyMode.AUTO else None
        if refusal is not None:
            raise ConfigError("mode", mode.value, f"off, chain or tree on this server: {refusal}")
        limit, source = self._node_limit(mode)
        default = min(limit, _DEFAULT_TREE_NODES) if mode is PolicyMode.TREE else limit
        num_nodes = body.get("num_nodes")
        policy = Policy(
            mode=mode,
            num_nodes=default if num_nodes is None else num_nodes,
            max_batch_size=body.get("max_batch_size"),
            probe_interval=body.get("probe_interval"),
        )
        if policy.num_nodes > limit:
            raise ConfigError("num_nodes", policy.num_nodes, f"at most {limit} ({source})")
        if mode is PolicyMode.AUTO:
            self.worker.auto.prepare(self.swap.live.config.num_drafts, policy.num_nodes)
        return policy

    def _node_limit(self, mode: PolicyMode) -> tuple[int, str]:
        """Most draft nodes of a mode on this server, and what sets that bound."""
        if mode is PolicyMode.TREE:
            return self.worker.max_nodes, "--max-nodes of this server"
        if mode is PolicyMode.CHAIN:
            return self.swap.live.config.num_drafts, "block size minus one"
        if mode is PolicyMode.AUTO:
            refusal = self.worker.drafting.why_no_tree()
            return (self.worker.max_nodes, "--max-nodes of this server") if refusal is None else (0, refusal)
        return 0, "nothing is drafted"

    def report_acceptance(self, _body: dict[str, Any]) -> dict[str, Any]:
        return {"versions": self.acceptance.report()}

    def finish_capture(self, body: dict[str, Any]) -> dict[str, Any]:
        """End a capture; the reply says which of its rows arrived."""
        return self.worker.tap.finish(str(body["capture_id"]), int(body["num_rows"]))

    def finish_probe(self, body: dict[str, Any]) -> dict[str, Any]:
        """The probe's tensors as safetensors bytes, with the version that computed them."""
        answer = self.worker.probe.finish(str(body["probe_id"]))
        if answer is None:
            raise StateConflictError("nothing was drafted: the policy must draft, at this batch size too")
        return {"tensors": serialize(answer), "drafter_version": self.swap.live.version}

    def take_step(self, tokens: Any, result: Any, batch: Any) -> None:
        """Called where SGLang resolves a verify step on the host."""
        self._resolved.extend(resolved_steps(tokens, result, batch))
        self._timed = getattr(result, "dflash_timed", None)

    def count_step(self) -> None:
        """Called when SGLang has ended the requests that this step ends."""
        paths = []
        for step in self._resolved:
            num_kept = step.num_kept()
            path = step.ranks.path(step.row, num_kept, is_cut=num_kept < step.num_accepted)
            self.acceptance.add(step.tag, num_kept)
            self.acceptance.add_path(step.tag, path)
            self.worker.tap.count_accepted(step.request.extra_key, num_kept)
            paths.append(path)
        if self._timed is not None:
            self.worker.auto.record(self._timed, paths)
        self._resolved.clear()
        self._timed = None

    def cache_key(self, extra_key: str | None) -> str:
        """The request's prefix-cache key, bound to the live drafter; captures have one of their own."""
        if CaptureKey.parse(extra_key) is not None or is_probe_key(extra_key):
            return str(extra_key)
        own = f"{CACHE_KEY_PREFIX}:{self.swap.live.version}"
        return f"{extra_key}|{own}" if extra_key else own


def describe_policy(policy: Policy) -> dict[str, Any]:
    """The `policy` object of /dflash/info."""
    return asdict(policy) | {"mode": policy.mode.value}


def _acceptance_series() -> tuple[StepCounter, StepCounter]:
    # SGLang sets the multi-process folder of the metrics before it starts this process, and the library
    # reads it when it is imported: hence the late import.
    from prometheus_client import Counter

    steps = Counter(
        "dflash:verify_steps",
        "Verify steps of one request, by accepted drafts.",
        labelnames=("drafter_version", "policy", "accepted"),
    )
    drafts = Counter(
        "dflash:accepted_drafts",
        "Accepted drafts, by depth and by rank among the candidates of their slot.",
        labelnames=("drafter_version", "policy", "depth", "rank"),
    )
    return steps, drafts


_side: SchedulerSide | None = None


def attach(_result: None, scheduler: Any, *_args: object, **_kwargs: object) -> None:
    """AFTER Scheduler.init_request_dispatcher: build our side and let control messages reach it."""
    global _side
    from sglang.utils import TypeBasedDispatcher

    from server_patches.worker import DflashOnlineWorker

    if not isinstance(scheduler.draft_worker, DflashOnlineWorker):
        return
    _side = SchedulerSide(scheduler, scheduler.draft_worker)
    scheduler._request_dispatcher += TypeBasedDispatcher([(DflashControlReqInput, _side.control.handle)])


def take_step(tokens: Any, _processor: object, result: Any, batch: Any) -> None:
    """AFTER SchedulerBatchResultProcessor._resolve_spec_v2_tokens."""
    if _side is not None:
        _side.take_step(tokens, result, batch)


def count_step(*_args: object, **_kwargs: object) -> None:
    """AFTER SchedulerBatchResultProcessor.process_batch_result_decode."""
    if _side is not None:
        _side.count_step()


def bind_cache_key(_scheduler: object, recv_req: Any, *_args: object, **_kwargs: object) -> None:
    """BEFORE Scheduler.handle_generate_request: a prefix cached under an older drafter is not reused."""
    if _side is not None:
        recv_req.extra_key = _side.cache_key(recv_req.extra_key)


def refuse_what_verify_does_not_return(
    result: str | None, req: Any, *_args: object, **_kwargs: object
) -> str | None:
    """AFTER scheduler.validate_dflash_request: the reason why a request is refused (HTTP 400), or None."""
    if result is None and req.return_sampling_mask:
        return "return_sampling_mask is not supported by DFLASH_ONLINE"
    if result is None and req.return_hidden_states:
        return "return_hidden_states is not supported by DFLASH_ONLINE: POST /dflash/capture returns features"
    return None


def widen_row(result: int, *_args: object, **_kwargs: object) -> int | None:
    """AFTER get_req_to_token_extra_context_len: room for the whole reserve beyond the context length."""
    from sglang.srt.mem_cache.allocation_sizing import get_alloc_page_size
    from sglang.srt.runtime_context import get_spec

    width = get_spec().speculative_num_draft_tokens
    if not width:
        return None
    return max(int(result), 2 * int(width) + int(get_alloc_page_size()) - 1)
