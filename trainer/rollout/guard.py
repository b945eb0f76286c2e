"""The guard: does the published version draft as well for users as the one before, on the same target?

    GET /dflash/info ---------> identity check --> alarm
    GET /dflash/acceptance ---> [ Guard ] --> live tau per version --> status, metrics
                                    +--> worse than the version before --> Publisher.rollback

Polls every `guard.poll_s`; a target that does not answer is skipped and reported by the pool. Runs on the
event loop. Live figures are those since the target's start; they are kept in memory only.
"""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from dflash_online.errors import (
    TargetBusyError,
    TargetError,
    TargetIdentityError,
    TargetRefusedError,
    TargetUnavailableError,
)
from dflash_online.target.client import TargetClient, VersionAcceptance
from trainer.errors import StoreError
from trainer.feed.targets import TargetPool
from trainer.rollout.identity import check_info
from trainer.rollout.publish import Publisher
from trainer.runs.config import GuardConfig
from trainer.store.checkpoint_rows import CheckpointRow
from trainer.store.event_rows import EventKind
from trainer.store.run_rows import RunRow
from trainer.store.store import Store

logger = logging.getLogger(__name__)


def pool_acceptance(entries: Iterable[VersionAcceptance]) -> tuple[VersionAcceptance, ...]:
    """Sum the histograms of several targets by version and policy."""
    sums: dict[tuple[str, str], list[int]] = defaultdict(list)
    for entry in entries:
        total = sums[entry.drafter_version, entry.policy]
        total.extend([0] * (len(entry.histogram) - len(total)))
        for accepted, count in enumerate(entry.histogram):
            total[accepted] += count
    return tuple(
        VersionAcceptance(drafter_version=version, policy=policy, histogram=tuple(total))
        for (version, policy), total in sums.items()
    )


def find_fault(
    config: GuardConfig, live: Sequence[VersionAcceptance], *, new_version: str, old_version: str
) -> str | None:
    """Why the new version should go, or None: it is good enough, or too little was seen of either.

    Compared under the policy that gave the new version most steps: policies differ in tau by themselves.
    """
    of_new = [entry for entry in live if entry.drafter_version == new_version]
    new = max(of_new, key=lambda entry: entry.num_steps, default=None)
    if new is None:
        return None
    old = next((e for e in live if e.drafter_version == old_version and e.policy == new.policy), None)
    if old is None or min(new.num_steps, old.num_steps) < config.min_steps:
        return None
    bound = (1 - config.margin) * old.tau
    if new.tau >= bound:
        return None
    seen = f"{new.num_steps} and {old.num_steps} verify steps"
    figures = f"{new.tau:.3f} < {bound:.3f} = (1 - {config.margin:g}) * {old.tau:.3f}"
    return f"live tau {figures} of {old_version} ({seen})"


class Guard:
    """Watches the targets of one run."""

    def __init__(
        self,
        store: Store,
        run: RunRow,
        targets: TargetPool,
        publisher: Publisher,
        on_alarm: Callable[[TargetIdentityError], None],
    ) -> None:
        self._store, self._run, self._targets = store, run, targets
        self._publisher, self._on_alarm = publisher, on_alarm
        self._given_up: set[str] = set()
        self.live: tuple[VersionAcceptance, ...] = ()

    async def run(self) -> None:
        """Watch until cancelled."""
        while True:
            try:
                await self._look()
            except StoreError as error:  # disk full
                logger.error("the guard waits: %s", error)
            await asyncio.sleep(self._run.config.guard.poll_s)

    async def _look(self) -> None:
        entries: list[VersionAcceptance] = []
        for client in self._targets.clients:
            try:
                info = await client.info()
                check_info(self._run.resolved, info, client.url)
                await self._restore_if_new(client, info.get("drafter") or {})
                entries += await client.acceptance()
            except TargetUnavailableError as error:
                self._targets.report_failure(error)
                return
            except (TargetBusyError, TargetRefusedError):
                return  # try again at the next look
            except TargetIdentityError as error:
                self._on_alarm(error)
                return
            self._targets.report_answer(client.url)
        self.live = pool_acceptance(entries)
        if self._run.config.guard.enabled:
            await self._judge()

    async def _restore_if_new(self, client: TargetClient, served: dict[str, Any]) -> None:
        """A target without a swap since its start does not have what this run published."""
        published = self._store.checkpoints.published(self._run.run_id)
        if published and served.get("num_swaps") == 0 and served.get("version") != published[-1].version:
            await self._publisher.restore(client)

    async def _judge(self) -> None:
        published = self._store.checkpoints.published(self._run.run_id)
        if not published or published[-1].version in self._given_up:
            return
        new = published[-1]
        old_version = _previous_version(new)
        if old_version is None:
            return
        fault = find_fault(
            self._run.config.guard, self.live, new_version=new.version, old_version=old_version
        )
        if fault is None:
            return
        try:
            await self._publisher.rollback(reason=fault, by="guard")
        except TargetIdentityError as error:
            self._on_alarm(error)
        except TargetUnavailableError as error:
            self._targets.report_failure(error)  # the next look tries again
        except TargetError as error:
            # Nothing to roll back to: keep serving, say so once.
            self._given_up.add(new.version)
            self._store.events.add(
                self._run.run_id,
                EventKind.PUBLISH_FAILED,
                version=new.version,
                reason=str(error),
                will_retry=False,
            )


def _previous_version(row: CheckpointRow) -> str | None:
    """The version that the commit replaced, as the targets named it."""
    names = {answer.get("previous") for answer in (row.swap or {}).values()}
    names.discard(None)
    return str(names.pop()) if len(names) == 1 else None
