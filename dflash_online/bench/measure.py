"""The benchmark: passes over the same prompts, one per concurrency and policy.

    prompts --> pass(off, c=1) --> pass(chain, c=1) --> pass(off, c=4) ... --> BenchReport

Each pass warms up, notes the server's acceptance counters, sends every prompt, and notes them again: tau is
the difference, so it holds only what happened in between (other traffic included, if there is any). A pass
has a cache key of its own on a server of ours, so that no pass lives on the prefix cache of an earlier one;
other servers get no field that they might refuse. The policy found at the start is restored, whatever
happens. Bounded in prompts and in time. Raises TargetError when the server cannot be used at all.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from dflash_online.bench.client import ChatClient, Exchange, RequestSettings
from dflash_online.bench.report import AcceptanceDelta, BenchReport, PassResult
from dflash_online.errors import ConfigError, TargetRefusedError
from dflash_online.prompts.item import PromptItem
from dflash_online.target.client import TargetClient, VersionAcceptance

CURRENT_POLICY = "current"
"""The policy that the server has: nothing is switched."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BenchConfig:
    """One benchmark."""

    url: str
    concurrencies: tuple[int, ...] = (1,)
    """Requests in flight; one pass each."""
    policies: tuple[str, ...] = (CURRENT_POLICY,)
    """Speculation policies; one pass each. Others than `current` need a server of ours."""
    num_nodes: int | None = None
    """Sent along with a policy; None: the server's own number."""
    model: str | None = None
    """None: the first that the server lists."""
    max_tokens: int = 128
    temperature: float = 0.0
    num_warmup: int = 2
    """Requests before each pass, not counted."""
    request_timeout_s: float = 600.0
    max_pass_s: float = 1800.0
    """After that many seconds a pass sends no further prompt."""
    api_key: str | None = None
    extra_body: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        checks = {
            "concurrencies": (self.concurrencies, ">= 1, at least one", bool(self.concurrencies)),
            "policies": (self.policies, "at least one", bool(self.policies)),
            "max_tokens": (self.max_tokens, ">= 1", self.max_tokens >= 1),
            "temperature": (self.temperature, ">= 0", self.temperature >= 0),
            "num_warmup": (self.num_warmup, ">= 0", self.num_warmup >= 0),
            "request_timeout_s": (self.request_timeout_s, "> 0", self.request_timeout_s > 0),
            "max_pass_s": (self.max_pass_s, "> 0", self.max_pass_s > 0),
        }
        for name, (value, bound, holds) in checks.items():
            if not holds:
                raise ConfigError(name, value, bound)
        if min(self.concurrencies) < 1:
            raise ConfigError("concurrencies", self.concurrencies, ">= 1, at least one")


Progress = Callable[[str, int, int], None]
"""Called with the pass's name, prompts done and prompts in all."""


async def run_bench(config: BenchConfig, prompts: Sequence[PromptItem], progress: Progress) -> BenchReport:
    """Run every pass.

    Raises:
        ConfigError: no prompts, or a policy is asked of a server that is not ours.
        TargetError: the server does not answer, or refuses a policy.
    """
    if not prompts:
        raise ConfigError("prompts", 0, ">= 1")
    target = TargetClient(config.url, api_key=config.api_key)
    async with ChatClient(config.url, api_key=config.api_key) as chat:
        try:
            info = await _info(target)
            switches = [policy for policy in config.policies if policy != CURRENT_POLICY]
            if switches and info is None:
                raise ConfigError(
                    "policies", switches, f"{CURRENT_POLICY!r} on a server without /dflash routes"
                )
            model = config.model or await chat.first_model()
            bench = _Bench(config, chat, target, info, model, progress)
            passes = await bench.run_all(prompts, restore=info["policy"] if info and switches else None)
        finally:
            await target.aclose()
    return BenchReport(
        config.url, model, info, len(prompts), config.max_tokens, config.temperature, tuple(passes)
    )


async def _info(target: TargetClient) -> dict[str, Any] | None:
    """None when the server is not ours."""
    try:
        return await target.info()
    except TargetRefusedError:
        return None


@dataclass(frozen=True, slots=True)
class _Bench:
    config: BenchConfig
    chat: ChatClient
    target: TargetClient
    info: dict[str, Any] | None
    model: str
    progress: Progress

    async def run_all(
        self, prompts: Sequence[PromptItem], *, restore: Mapping[str, Any] | None
    ) -> list[PassResult]:
        passes: list[PassResult] = []
        try:
            for concurrency in self.config.concurrencies:
                for policy in self.config.policies:
                    if policy != CURRENT_POLICY:
                        await self.target.set_policy(policy, self.config.num_nodes)
                    passes.append(await self._run_pass(policy, concurrency, prompts))
        finally:
            if restore is not None:
                await self.target.set_policy(**restore)
        return passes

    async def _run_pass(self, policy: str, concurrency: int, prompts: Sequence[PromptItem]) -> PassResult:
        settings = RequestSettings(
            model=self.model,
            max_tokens=self.config.max_tokens,
            temperature=self.config.temperature,
            timeout_s=self.config.request_timeout_s,
            extra_body=self.config.extra_body,
        )
        warmup = [prompts[i % len(prompts)] for i in range(self.config.num_warmup)]
        # The keys differ: a warm-up prompt must not meet itself in the cache when its turn comes.
        await self._send(warmup, concurrency, self._with_own_cache(settings), None)
        before = await self._acceptance()
        start = time.perf_counter()
        name = f"{policy}, concurrency {concurrency}"
        exchanges = await self._send(prompts, concurrency, self._with_own_cache(settings), name)
        wall_s = time.perf_counter() - start
        after = await self._acceptance()
        return PassResult(
            policy=policy,
            concurrency=concurrency,
            wall_s=wall_s,
            exchanges=tuple(exchanges),
            acceptance=acceptance_between(before, after),
            has_own_cache=self.info is not None,
        )

    def _with_own_cache(self, settings: RequestSettings) -> RequestSettings:
        if self.info is None:
            return settings
        return replace(settings, extra_body={**settings.extra_body, "extra_key": f"bench-{uuid.uuid4().hex}"})

    async def _send(
        self, prompts: Sequence[PromptItem], concurrency: int, settings: RequestSettings, name: str | None
    ) -> list[Exchange | None]:
        """Send all prompts, `concurrency` at a time. None for a prompt that time did not allow."""
        exchanges: list[Exchange | None] = [None] * len(prompts)
        waiting = iter(range(len(prompts)))
        deadline = time.perf_counter() + self.config.max_pass_s

        async def worker() -> None:
            for index in waiting:  # one iterator for all workers: each index is taken once
                if time.perf_counter() > deadline:
                    return
                exchanges[index] = await self.chat.exchange(prompts[index], settings)
                if name is not None:
                    self.progress(name, sum(exchange is not None for exchange in exchanges), len(prompts))

        async with asyncio.TaskGroup() as group:
            for _ in range(min(concurrency, len(prompts))):
                group.create_task(worker())
        return exchanges

    async def _acceptance(self) -> list[VersionAcceptance]:
        return [] if self.info is None else await self.target.acceptance()


def acceptance_between(
    before: Sequence[VersionAcceptance], after: Sequence[VersionAcceptance]
) -> tuple[AcceptanceDelta, ...]:
    """What each drafter version did between two readings of the counters; idle versions are left out."""
    known = {(entry.drafter_version, entry.policy): entry.histogram for entry in before}
    deltas = []
    for entry in after:
        old = known.get((entry.drafter_version, entry.policy), ())
        padded = (*old, *([0] * (len(entry.histogram) - len(old))))
        histogram = tuple(now - then for now, then in zip(entry.histogram, padded, strict=True))
        if any(histogram):
            deltas.append(AcceptanceDelta(entry.drafter_version, entry.policy, histogram))
    return tuple(deltas)
