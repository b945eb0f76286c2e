"""The benchmark: passes over the same prompts, one per temperature, concurrency and policy.

    prompts --> pass(off, c=1) --> pass(chain:7, c=1) --> pass(off, c=4) ... --> BenchReport

Each pass warms up, notes the server's acceptance counters, sends every prompt, and notes them again: tau is
the difference, so it holds only what happened in between (other traffic included, if there is any). A pass
has a cache key of its own on a server of ours, so that no pass lives on the prefix cache of an earlier one;
other servers get no field that they might refuse. The policy found at the start is restored, whatever
happens. Bounded in prompts and in time. Raises TargetError when the server cannot be used at all.
"""

from __future__ import annotations

import asyncio
import math
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any

from dflash_online.bench.client import ChatClient, Exchange, RequestSettings
from dflash_online.bench.policy import CURRENT_POLICY, PolicyEntry
from dflash_online.bench.report import AcceptanceDelta, BenchReport, PassResult
from dflash_online.errors import ConfigError, TargetRefusedError
from dflash_online.prompts.item import PromptItem
from dflash_online.target.client import TargetClient, VersionAcceptance


@dataclass(frozen=True, kw_only=True, slots=True)
class BenchConfig:
    """One benchmark."""

    url: str
    concurrencies: tuple[int, ...] = (1,)
    """Requests in flight; one pass each."""
    policies: tuple[str, ...] = (CURRENT_POLICY,)
    """Such as `off` or `tree:16`; one pass each. Others than `current` need a server of ours."""
    num_nodes: int | None = None
    """Sent along with a policy that names no number; None: the server's own number."""
    model: str | None = None
    """None: the first that the server lists."""
    max_tokens: int = 128
    temperatures: tuple[float, ...] = (0.0,)
    """One pass each."""
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
            "num_nodes": (self.num_nodes, ">= 1", self.num_nodes is None or self.num_nodes >= 1),
            "temperatures": (
                self.temperatures,
                ">= 0, at least one",
                bool(self.temperatures) and all(math.isfinite(t) and t >= 0 for t in self.temperatures),
            ),
            "num_warmup": (self.num_warmup, ">= 0", self.num_warmup >= 0),
            "request_timeout_s": (self.request_timeout_s, "> 0", self.request_timeout_s > 0),
            "max_pass_s": (self.max_pass_s, "> 0", self.max_pass_s > 0),
        }
        for name, (value, bound, holds) in checks.items():
            if not holds:
                raise ConfigError(name, value, bound)
        if min(self.concurrencies) < 1:
            raise ConfigError("concurrencies", self.concurrencies, ">= 1, at least one")
        _ = self.entries  # raises for a malformed one

    @property
    def entries(self) -> tuple[PolicyEntry, ...]:
        """The policies, read."""
        return tuple(PolicyEntry.parse(policy) for policy in self.policies)


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
            switches = [entry.text for entry in config.entries if entry.mode != CURRENT_POLICY]
            if switches and info is None:
                raise ConfigError(
                    "policies", switches, f"{CURRENT_POLICY!r} on a server without /dflash routes"
                )
            model = config.model or await chat.first_model()
            restore = info["policy"] if info and switches else None
            bench = _Bench(config, chat, target, info, restore, model, progress)
            passes = await bench.run_all(prompts)
        finally:
            await target.aclose()
    return BenchReport(
        config.url, model, info, len(prompts), config.max_tokens, config.temperatures[0], tuple(passes)
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
    restore: Mapping[str, Any] | None
    """The policy found, when a pass switches; None: nothing is switched."""
    model: str
    progress: Progress

    async def run_all(self, prompts: Sequence[PromptItem]) -> list[PassResult]:
        passes: list[PassResult] = []
        try:
            for temperature, concurrency, entry in product(
                self.config.temperatures, self.config.concurrencies, self.config.entries
            ):
                passes.append(await self._run_pass(entry, concurrency, temperature, prompts))
        finally:
            if self.restore is not None:
                await self.target.set_policy(**self.restore)
        return passes

    async def _switch(self, entry: PolicyEntry) -> Mapping[str, Any]:
        """Make that policy the server's; returns the policy in force, empty on a foreign server."""
        if entry.mode != CURRENT_POLICY:
            return await self.target.set_policy(entry.mode, entry.nodes_or(self.config.num_nodes))
        if self.restore is not None:  # an earlier pass may have switched
            return await self.target.set_policy(**self.restore)
        return self.info.get("policy", {}) if self.info is not None else {}

    async def _run_pass(
        self, entry: PolicyEntry, concurrency: int, temperature: float, prompts: Sequence[PromptItem]
    ) -> PassResult:
        policy = await self._switch(entry)
        settings = RequestSettings(
            model=self.model,
            max_tokens=self.config.max_tokens,
            temperature=temperature,
            timeout_s=self.config.request_timeout_s,
            extra_body=self.config.extra_body,
        )
        warmup = [prompts[i % len(prompts)] for i in range(self.config.num_warmup)]
        # The keys differ: a warm-up prompt must not meet itself in the cache when its turn comes.
        await self._send(warmup, concurrency, self._with_own_cache(settings), None)
        before = await self._acceptance()
        start = time.perf_counter()
        name = f"{entry.text}, concurrency {concurrency}"
        if len(self.config.temperatures) > 1:
            name += f", temperature {temperature:g}"
        exchanges = await self._send(prompts, concurrency, self._with_own_cache(settings), name)
        wall_s = time.perf_counter() - start
        after = await self._acceptance()
        return PassResult(
            policy=entry.text,
            concurrency=concurrency,
            temperature=temperature,
            num_nodes=policy.get("num_nodes"),
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
