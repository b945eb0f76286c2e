"""Publishing: the only way from a checkpoint into the running targets.

    checkpoints row `candidate` --> [ Publisher ] --stage on all, then commit on all--> targets
                                     |
                                     +--> `published` | `superseded` | `rejected`; `rolled_back`

Fails   target gone or busy: again with backoff, until it works or a newer candidate exists. Target refuses:
        `rejected`, the old version stays. Target's checksum differs after a commit: alarm.
A commit that was interrupted by a restart is recognised by the version that the target serves.
Runs on the event loop; one publish or rollback at a time.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable
from typing import Any

from dflash_online.errors import (
    TargetBusyError,
    TargetError,
    TargetIdentityError,
    TargetRefusedError,
    TargetUnavailableError,
)
from dflash_online.target.client import TargetClient
from trainer.errors import RunStateError, StoreError
from trainer.feed.targets import TargetPool, backoff_s
from trainer.rollout.identity import check_checksum
from trainer.store.checkpoint_rows import CheckpointRow, CheckpointState
from trainer.store.event_rows import EventKind
from trainer.store.run_rows import RunRow
from trainer.store.store import Store

logger = logging.getLogger(__name__)

_POLL_S = 0.2


class Publisher:
    """Brings candidates of one run into its targets."""

    def __init__(
        self,
        store: Store,
        run: RunRow,
        targets: TargetPool,
        on_alarm: Callable[[TargetIdentityError], None],
    ) -> None:
        self._store, self._run_id, self._resolved = store, run.run_id, run.resolved
        self._targets, self._on_alarm = targets, on_alarm
        self._open = asyncio.Event()
        self._turn = asyncio.Lock()
        self._chance = random.Random()

    def pause(self) -> None:
        """Begin no publish."""
        self._open.clear()

    def resume(self) -> None:
        """Go on."""
        self._open.set()

    async def run(self) -> None:
        """Publish candidates until cancelled."""
        while True:
            await self._open.wait()
            try:
                candidate = self._store.checkpoints.candidate(self._run_id)
                if candidate is not None:
                    async with self._turn:
                        await self._publish(candidate)
            except StoreError as error:  # disk full: what was committed is recognised by its version
                logger.error("publishing waits: %s", error)
            await asyncio.sleep(_POLL_S)

    async def drain(self, timeout_s: float) -> None:
        """Wait until no candidate is left, or the time is up, or publishing is paused."""
        deadline = asyncio.get_running_loop().time() + timeout_s
        while self._open.is_set() and asyncio.get_running_loop().time() < deadline:
            if self._store.checkpoints.candidate(self._run_id) is None and not self._turn.locked():
                return
            await asyncio.sleep(_POLL_S)

    async def restore(self, client: TargetClient) -> None:
        """Bring the live version back into a target that was started anew with an older drafter.

        Raises:
            TargetError: it could not; the guard's next look tries again.
        """
        async with self._turn:
            published = self._store.checkpoints.published(self._run_id)
            if not published or not published[-1].path or not self._open.is_set():
                return
            live = published[-1]
            await client.stage(live.path)
            answer = await client.commit(live.version)
            self._check(answer)
            self._store.events.add(self._run_id, EventKind.RESTORED, version=live.version, url=client.url)

    async def rollback(self, *, reason: str, by: str) -> CheckpointRow:
        """Make the version before the live one live again, on every target.

        Raises:
            RunStateError: no version of this run is live.
            TargetError: a target did not roll back; those before it did.
        """
        async with self._turn:
            published = self._store.checkpoints.published(self._run_id)
            if not published:
                raise RunStateError("roll back", "without a published version", "after a publish")
            live = published[-1]
            for client in self._targets.clients:
                served = await client.drafter()
                if served.get("version") == live.version:
                    answer = await client.rollback()
                    self._check(answer)
            with self._store.db.transaction():
                self._store.checkpoints.set_state(self._run_id, live.number, CheckpointState.ROLLED_BACK)
                self._store.events.add(
                    self._run_id, EventKind.ROLLED_BACK, version=live.version, by=by, reason=reason
                )
            return live

    async def _publish(self, row: CheckpointRow) -> None:
        committed: dict[str, dict[str, Any]] = {}
        num_failures = 0
        while True:
            try:
                await self._swap(row, committed)
            except (TargetUnavailableError, TargetBusyError) as error:
                num_failures += 1
                if num_failures == 1:
                    self._tell_failure(row, error, will_retry=True)
                newer = self._store.checkpoints.candidate(self._run_id)
                if not committed and newer is not None and newer.number != row.number:
                    return  # `candidate` has marked this one as superseded
                await asyncio.sleep(backoff_s(num_failures, self._chance))
                await self._open.wait()
            except TargetRefusedError as error:
                self._store.checkpoints.set_state(self._run_id, row.number, CheckpointState.REJECTED)
                self._tell_failure(row, error, will_retry=False)
                await self._take_back(row, committed)
                return
            except TargetIdentityError as error:
                self._store.checkpoints.set_state(self._run_id, row.number, CheckpointState.REJECTED)
                self._on_alarm(error)
                return
            else:
                self._tell_success(row, committed)
                return

    async def _swap(self, row: CheckpointRow, committed: dict[str, dict[str, Any]]) -> None:
        """Stage on every target that has not committed, then commit on each."""
        left: list[TargetClient] = []
        for client in self._targets.clients:
            if client.url in committed:
                continue
            served = await client.drafter()
            if served.get("version") == row.version:
                committed[client.url] = {"version": row.version, "previous": served.get("previous")}
            else:
                await client.stage(row.path)
                left.append(client)
        for client in left:
            answer = await client.commit(row.version)
            committed[client.url] = answer
            self._check(answer)

    def _check(self, answer: dict[str, Any]) -> None:
        check_checksum(self._resolved, answer.get("target_checksum"))

    async def _take_back(self, row: CheckpointRow, committed: dict[str, dict[str, Any]]) -> None:
        for client in self._targets.clients:
            if client.url in committed:
                try:
                    await client.rollback()
                except TargetError as error:
                    self._tell_failure(row, error, will_retry=False)

    def _tell_failure(self, row: CheckpointRow, error: TargetError, *, will_retry: bool) -> None:
        self._store.events.add(
            self._run_id,
            EventKind.PUBLISH_FAILED,
            version=row.version,
            reason=str(error),
            will_retry=will_retry,
        )

    def _tell_success(self, row: CheckpointRow, committed: dict[str, dict[str, Any]]) -> None:
        pauses = [answer["pause_ms"] for answer in committed.values() if "pause_ms" in answer]
        with self._store.db.transaction():
            self._store.checkpoints.set_swap(self._run_id, row.number, committed)
            self._store.checkpoints.set_state(self._run_id, row.number, CheckpointState.PUBLISHED)
            self._store.events.add(
                self._run_id,
                EventKind.PUBLISHED,
                version=row.version,
                step=row.step,
                pause_ms=max(pauses, default=None),
                targets=committed,
            )
