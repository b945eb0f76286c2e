"""Client of the trainer service's HTTP interface.

    cli train, demo --TrainerClient--> POST /train/*, GET /train/status, /runs

The one seam where httpx errors of the trainer become TrainerServiceError. Blocking; every call has a timeout.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import httpx

from dflash_online.errors import TrainerServiceError

DEFAULT_TRAINER_URL = "http://127.0.0.1:8900"

# Publishing waits for the held-out gate and for the swap, starting for the target's answer.
_TIMEOUT = httpx.Timeout(300.0, connect=5.0)


class TrainerClient:
    """Talks to one trainer service."""

    def __init__(self, url: str = DEFAULT_TRAINER_URL) -> None:
        self.url = url.rstrip("/")

    def start(self, run_config: Mapping[str, Any]) -> dict[str, Any]:
        """POST /train/start: the new run's id and its config with every default."""
        return self._call("POST", "/train/start", run_config)

    def act(self, action: str, body: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """POST /train/{action}: stop, pause, resume, publish or rollback."""
        return self._call("POST", f"/train/{action}", body or {})

    def status(self) -> dict[str, Any]:
        """GET /train/status."""
        return self._call("GET", "/train/status")

    def _call(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> dict[str, Any]:
        try:
            # Proxies of the environment are for the outside world.
            answer = httpx.request(method, self.url + path, json=body, timeout=_TIMEOUT, trust_env=False)
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise TrainerServiceError(self.url, None, f"{type(error).__name__}: {error}") from error
        if answer.status_code >= 400:
            raise TrainerServiceError(self.url, answer.status_code, _detail(answer))
        try:
            value = answer.json()
        except ValueError as error:
            raise TrainerServiceError(
                self.url, None, f"{path} gave no JSON: {answer.text[:200]!r}"
            ) from error
        if not isinstance(value, dict):
            raise TrainerServiceError(self.url, None, f"{path} gave no JSON object: {answer.text[:200]!r}")
        return value


def _detail(answer: httpx.Response) -> str:
    """The message of our own error form, else the start of the body."""
    try:
        error = answer.json()["error"]
        return str(error["message"])
    except (ValueError, KeyError, TypeError):
        return answer.text[:500]
