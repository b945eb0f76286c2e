"""HTTP client of one target server: the only place where httpx errors become ours.

    trainer/feed, trainer/rollout, cli --calls--> [ TargetClient ] --HTTP--> /dflash/* of the target

Interface: docs/target-api.md. A record streams straight into the decoder's tensor: no copy of the whole
body is kept. Retries nothing: whether to wait, to retry or to give up is the caller's policy.
Fails with TargetUnavailableError (no answer, 5xx), TargetBusyError (503 or 429 with a wait),
TargetRefusedError (4xx) and, for the content of a record, WireError. Runs on one event loop.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import httpx
from safetensors import SafetensorError
from safetensors.torch import load
from torch import Tensor

from dflash_online.errors import ConfigError, TargetBusyError, TargetRefusedError, TargetUnavailableError
from dflash_online.wire.codec import RecordDecoder
from dflash_online.wire.record import Record, RecordSource

_ERROR_BODY_BYTES = 64 << 10
_DEFAULT_RETRY_AFTER_S = 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class TargetTimeouts:
    """Seconds that each kind of call may be silent.

    | call                       | connect   | between two bytes |
    |----------------------------|-----------|-------------------|
    | info, acceptance, policy   | connect_s | control_s         |
    | stage, commit, rollback    | connect_s | swap_s            |
    | capture                    | connect_s | capture_s         |
    """

    connect_s: float = 5.0
    control_s: float = 15.0
    swap_s: float = 120.0
    capture_s: float = 600.0
    """A captured answer starts only when its last token is decoded."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CaptureRequest:
    """One sequence to capture. Exactly one of `input_ids`, `text` and `messages` is given."""

    mode: Literal["generate", "prefill"] = "generate"
    input_ids: tuple[int, ...] | None = None
    text: str | None = None
    messages: tuple[Mapping[str, str], ...] | None = None
    sampling_params: Mapping[str, float | int | bool] = field(default_factory=dict)
    loss_spans: tuple[tuple[int, int], ...] = ()
    """Half-open spans of supervised tokens; `prefill` with `input_ids` only."""
    record_id: str
    cursor: int | None = None
    source: RecordSource = RecordSource.PROMPT
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        given = [name for name in ("input_ids", "text", "messages") if getattr(self, name) is not None]
        if len(given) != 1:
            raise ConfigError("capture request", given, "exactly one of input_ids, text, messages")

    def body(self) -> dict[str, Any]:
        """The JSON body of POST /dflash/capture."""
        body: dict[str, Any] = {"mode": self.mode, "record_id": self.record_id, "source": self.source.value}
        if self.input_ids is not None:
            body["input_ids"] = list(self.input_ids)
        if self.text is not None:
            body["text"] = self.text
        if self.messages is not None:
            body["messages"] = [dict(message) for message in self.messages]
        if self.cursor is not None:
            body["cursor"] = self.cursor
        if self.mode == "generate":
            body["sampling_params"] = dict(self.sampling_params)
        if self.loss_spans:
            body["loss_spans"] = [list(span) for span in self.loss_spans]
        if self.chat_template_kwargs:
            body["chat_template_kwargs"] = dict(self.chat_template_kwargs)
        return body


@dataclass(frozen=True, kw_only=True, slots=True)
class VersionAcceptance:
    """How one drafter version did live, under one policy."""

    drafter_version: str
    policy: str
    histogram: tuple[int, ...]
    """Entry a counts verify steps with a accepted drafts."""

    @property
    def num_steps(self) -> int:
        """Verify steps counted."""
        return sum(self.histogram)

    @property
    def tau(self) -> float:
        """Mean number of tokens committed per verify step, bonus included; 0 without steps."""
        accepted = sum(a * count for a, count in enumerate(self.histogram))
        return 1 + accepted / self.num_steps if self.num_steps else 0.0


class TargetClient:
    """One target server. Usage: `client = TargetClient(url)`, calls, then `await client.aclose()`."""

    def __init__(
        self,
        url: str,
        *,
        api_key: str | None = None,
        timeouts: TargetTimeouts | None = None,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        """Open no connection yet.

        Raises:
            ConfigError: the URL is not http or https.
        """
        if not url.startswith(("http://", "https://")):
            raise ConfigError("target url", url, "an http:// or https:// URL")
        self.url = url.rstrip("/")
        self._timeouts = timeouts or TargetTimeouts()
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        # Proxies of the environment are for the outside world; targets are on the same network.
        self._http = httpx.AsyncClient(
            base_url=self.url,
            headers=headers,
            transport=transport,
            trust_env=False,
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=64),
        )

    async def aclose(self) -> None:
        """Close all connections."""
        await self._http.aclose()

    async def info(self) -> dict[str, Any]:
        """`GET /dflash/info`."""
        return await self._json("GET", "/dflash/info", read_s=self._timeouts.control_s)

    async def drafter(self) -> dict[str, Any]:
        """`GET /dflash/drafter`."""
        return await self._json("GET", "/dflash/drafter", read_s=self._timeouts.control_s)

    async def acceptance(self) -> list[VersionAcceptance]:
        """`GET /dflash/acceptance`: cumulative histograms since the server started."""
        answer = await self._json("GET", "/dflash/acceptance", read_s=self._timeouts.control_s)
        try:
            return [
                VersionAcceptance(
                    drafter_version=str(entry["drafter_version"]),
                    policy=str(entry["policy"]),
                    histogram=tuple(int(count) for count in entry["histogram"]),
                )
                for entry in answer["versions"]
            ]
        except (KeyError, TypeError, ValueError) as exc:
            raise TargetRefusedError(self.url, 200, f"/dflash/acceptance makes no sense: {exc!r}") from exc

    async def set_policy(
        self,
        mode: str,
        num_nodes: int | None = None,
        *,
        max_batch_size: int | None = None,
        probe_interval: int | None = None,
    ) -> dict[str, Any]:
        """`PUT /dflash/policy`: `off`, `chain` or a later mode. Returns the policy now in force.

        The fields are those of the `policy` object of /dflash/info, so that one can be put back as it was.
        """
        fields = {"num_nodes": num_nodes, "max_batch_size": max_batch_size, "probe_interval": probe_interval}
        body = {"mode": mode} | {name: value for name, value in fields.items() if value is not None}
        return await self._json("PUT", "/dflash/policy", body, read_s=self._timeouts.control_s)

    async def stage(self, path: str) -> dict[str, Any]:
        """`POST /dflash/drafter/stage`: validate a folder while serving. `path` is as the target sees it."""
        return await self._json("POST", "/dflash/drafter/stage", {"path": path}, read_s=self._timeouts.swap_s)

    async def commit(self, version: str) -> dict[str, Any]:
        """`POST /dflash/drafter/commit`: swap the staged version in between two decode steps."""
        body = {"version": version}
        return await self._json("POST", "/dflash/drafter/commit", body, read_s=self._timeouts.swap_s)

    async def rollback(self) -> dict[str, Any]:
        """`POST /dflash/drafter/rollback`: make the previous version live again."""
        return await self._json("POST", "/dflash/drafter/rollback", {}, read_s=self._timeouts.swap_s)

    async def capture(self, request: CaptureRequest) -> Record:
        """`POST /dflash/capture`: generate (or prefill) one sequence and return it with its features.

        Raises:
            TargetUnavailableError: no answer, or the connection broke before the body's end.
            TargetBusyError: capture is shed; `retry_after_s` says for how long.
            TargetRefusedError: this sequence cannot be captured.
            WireError: the body came to its end and is not a record.
        """
        decoder = RecordDecoder()
        body = request.body()
        async with self._call("POST", "/dflash/capture", body, read_s=self._timeouts.capture_s) as response:
            async for chunk in response.aiter_bytes():
                decoder.feed(chunk)
        return decoder.finish()

    async def probe(self, input_ids: Sequence[int]) -> dict[str, Tensor]:
        """`POST /dflash/probe`: the first block drafted behind a text, and its context keys.

        Raises:
            TargetRefusedError: the policy does not draft, or the answer makes no sense.
        """
        body, path = {"input_ids": list(input_ids)}, "/dflash/probe"
        async with self._call("POST", path, body, read_s=self._timeouts.capture_s) as response:
            payload = await response.aread()
        try:
            return load(payload)
        except (SafetensorError, ValueError, KeyError) as exc:
            raise TargetRefusedError(self.url, 200, f"{path} is not safetensors: {exc}") from exc

    async def _json(
        self, method: str, path: str, body: Mapping[str, Any] | None = None, *, read_s: float
    ) -> dict[str, Any]:
        async with self._call(method, path, body, read_s=read_s) as response:
            text = await response.aread()
        try:
            answer = json.loads(text)
        except ValueError as exc:
            raise TargetRefusedError(self.url, response.status_code, f"{path} is not JSON") from exc
        if not isinstance(answer, dict):
            raise TargetRefusedError(self.url, response.status_code, f"{path} is not a JSON object")
        return answer

    @asynccontextmanager
    async def _call(
        self, method: str, path: str, body: Mapping[str, Any] | None, *, read_s: float
    ) -> AsyncIterator[httpx.Response]:
        timeout = httpx.Timeout(read_s, connect=self._timeouts.connect_s)
        try:
            async with self._http.stream(method, path, json=body, timeout=timeout) as response:
                if response.status_code >= 400:
                    await self._refuse(response)
                yield response
        except httpx.RequestError as exc:  # base of transport, decoding and redirect errors
            raise TargetUnavailableError(self.url, f"{path}: {type(exc).__name__} {exc}".rstrip()) from exc

    async def _refuse(self, response: httpx.Response) -> None:
        detail = await _error_detail(response)
        status = response.status_code
        if status in (429, 503) and ("retry-after" in response.headers or status == 429):
            raise TargetBusyError(self.url, _retry_after_s(response))
        if status >= 500:
            raise TargetUnavailableError(self.url, f"HTTP {status}: {detail}")
        raise TargetRefusedError(self.url, status, detail)


def _retry_after_s(response: httpx.Response) -> float:
    try:
        return max(0.0, float(response.headers.get("retry-after", _DEFAULT_RETRY_AFTER_S)))
    except ValueError:  # the date form of the header
        return _DEFAULT_RETRY_AFTER_S


async def _error_detail(response: httpx.Response) -> str:
    text = (await response.aread())[:_ERROR_BODY_BYTES].decode("utf-8", "replace")
    try:
        error = json.loads(text)["error"]
        return str(error["message"]) if isinstance(error, dict) else str(error)
    except (ValueError, KeyError, TypeError):
        return text.strip()[:300] or response.reason_phrase
