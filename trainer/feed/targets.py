"""The target servers of a run: whose turn it is, and which do not answer.

    intake, rollout --> [ TargetPool ] --> TargetClient per URL

One event tells that a server stopped answering, one that it is back; retries in between are silent.
"""

from __future__ import annotations

import random

from dflash_online.errors import TargetUnavailableError
from dflash_online.target.client import TargetClient
from trainer.runs.config import RunConfig
from trainer.store.event_rows import EventKind
from trainer.store.store import Store

_FIRST_WAIT_S, _LONGEST_WAIT_S = 0.25, 15.0


def backoff_s(num_failures: int, chance: random.Random) -> float:
    """Seconds to wait after that many failures in a row: doubling, capped, with jitter of a half."""
    longest = min(_LONGEST_WAIT_S, _FIRST_WAIT_S * 2 ** min(num_failures - 1, 10))
    return longest * (0.5 + 0.5 * chance.random())


class TargetPool:
    """Clients of all targets of one run."""

    def __init__(self, store: Store, run_id: str, config: RunConfig) -> None:
        self._store, self._run_id = store, run_id
        self.clients = tuple(TargetClient(url, api_key=config.api_key) for url in config.target_urls)
        self._turn = 0
        self._down: set[str] = set()

    @property
    def unavailable(self) -> frozenset[str]:
        """URLs that did not answer last time."""
        return frozenset(self._down)

    def next_client(self) -> TargetClient:
        """Round robin over the targets that answer, or over all when none does."""
        candidates = [c for c in self.clients if c.url not in self._down] or list(self.clients)
        self._turn += 1
        return candidates[self._turn % len(candidates)]

    def report_failure(self, error: TargetUnavailableError) -> None:
        """A call got no answer."""
        if error.url not in self._down:
            self._down.add(error.url)
            self._store.events.add(
                self._run_id, EventKind.TARGET_UNAVAILABLE, url=error.url, reason=error.reason
            )

    def report_answer(self, url: str) -> None:
        """A call got an answer."""
        if url in self._down:
            self._down.discard(url)
            self._store.events.add(self._run_id, EventKind.TARGET_BACK, url=url)

    async def aclose(self) -> None:
        """Close all clients."""
        for client in self.clients:
            await client.aclose()
