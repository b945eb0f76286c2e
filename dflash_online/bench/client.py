"""Streaming chat client of any OpenAI-compatible server, with a stop-watch.

    PromptItem --ChatClient--> POST /v1/chat/completions, server-sent events --> Exchange

Every turn is one request; follow-up turns are sent after the answer before them. A request that fails is a
result with its kind of failure, not an exception: a benchmark counts it and goes on. Every request has a
bound in time as a whole. Runs on one event loop. Knows neither policies nor statistics.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Self

import httpx

from dflash_online.errors import TargetRefusedError, TargetUnavailableError
from dflash_online.prompts.item import PromptItem

_CONNECT_TIMEOUT_S = 10.0


class _RequestFailedError(Exception):
    """Within this module: why one request gave no answer."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """One completed request."""

    text: str
    num_tokens: int
    """As the server counts them."""
    ttft_s: float
    """From sending to the first piece of text, in seconds."""
    last_token_s: float
    """From sending to the last piece of text."""

    @property
    def tpot_s(self) -> float | None:
        """Mean seconds per token after the first; None for an answer of one token."""
        return (self.last_token_s - self.ttft_s) / (self.num_tokens - 1) if self.num_tokens > 1 else None


@dataclass(frozen=True, kw_only=True, slots=True)
class Exchange:
    """All turns of one prompt. `failure` names why the last one sent gave no answer."""

    answers: tuple[Answer, ...]
    failure: str | None = None
    """`connect`, `timeout`, `http_503`, `broken` (ended early) or `malformed`."""

    @property
    def num_requests(self) -> int:
        """Requests sent, the failed one included."""
        return len(self.answers) + (self.failure is not None)

    @property
    def text(self) -> str:
        """The whole output."""
        return "\n".join(answer.text for answer in self.answers)


@dataclass(frozen=True, kw_only=True, slots=True)
class RequestSettings:
    """What every request of a benchmark says."""

    model: str
    max_tokens: int
    temperature: float = 0.0
    timeout_s: float = 600.0
    """For one request from sending to its end."""
    extra_body: Mapping[str, Any] = field(default_factory=dict)
    """Further fields of the JSON body, e.g. `chat_template_kwargs`."""


class ChatClient:
    """One server. An async context manager."""

    def __init__(self, url: str, *, api_key: str | None = None) -> None:
        self.url = url.rstrip("/")
        self._http = httpx.AsyncClient(
            base_url=self.url,
            headers={"Authorization": f"Bearer {api_key}"} if api_key else {},
            trust_env=False,
            limits=httpx.Limits(max_connections=None),
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *details: object) -> None:
        await self._http.aclose()

    async def first_model(self) -> str:
        """The first id of GET /v1/models.

        Raises:
            TargetUnavailableError: no answer.
            TargetRefusedError: an answer that names no model.
        """
        try:
            answer = await self._http.get(
                "/v1/models", timeout=httpx.Timeout(30.0, connect=_CONNECT_TIMEOUT_S)
            )
        except httpx.HTTPError as error:
            raise TargetUnavailableError(
                self.url, f"/v1/models: {type(error).__name__} {error}".rstrip()
            ) from error
        try:
            return str(answer.raise_for_status().json()["data"][0]["id"])
        except (httpx.HTTPStatusError, ValueError, LookupError, TypeError) as error:
            raise TargetRefusedError(
                self.url, answer.status_code, f"/v1/models: {answer.text[:200]}"
            ) from error

    async def exchange(self, item: PromptItem, settings: RequestSettings) -> Exchange:
        """Send the prompt and its follow-ups; a finished conversation's last answer is asked for anew."""
        answers: list[Answer] = []
        turns = [{"role": turn.role, "content": turn.content} for turn in item.messages or ()]
        if item.conversation:
            turns = turns[:-1]
        follow_ups = iter(item.follow_ups)
        while True:
            try:
                if item.text is not None:
                    answer = await self._answer("/v1/completions", {"prompt": item.text}, settings)
                else:
                    answer = await self._answer("/v1/chat/completions", {"messages": turns}, settings)
                answers.append(answer)
            except _RequestFailedError as failure:
                return Exchange(answers=tuple(answers), failure=str(failure))
            follow_up = next(follow_ups, None)
            if follow_up is None:
                return Exchange(answers=tuple(answers))
            turns += [
                {"role": "assistant", "content": answers[-1].text},
                {"role": "user", "content": follow_up},
            ]

    async def _answer(self, path: str, body: Mapping[str, Any], settings: RequestSettings) -> Answer:
        body = {
            **settings.extra_body,
            **body,
            "model": settings.model,
            "max_tokens": settings.max_tokens,
            "temperature": settings.temperature,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        start = time.perf_counter()
        pieces: list[tuple[float, str]] = []
        num_tokens: int | None = None
        try:
            async with asyncio.timeout(settings.timeout_s):
                async for event in self._events(path, body, settings.timeout_s):
                    if event.get("usage"):
                        num_tokens = int(event["usage"]["completion_tokens"])
                    for choice in event.get("choices") or ():
                        piece = choice.get("text") or (choice.get("delta") or {}).get("content")
                        if piece:
                            pieces.append((time.perf_counter() - start, piece))
        except TimeoutError as error:
            raise _RequestFailedError("timeout") from error
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise _RequestFailedError("malformed") from error
        if num_tokens is None:
            raise _RequestFailedError("malformed")
        end_s = time.perf_counter() - start
        return Answer(
            text="".join(piece for _, piece in pieces),
            num_tokens=num_tokens,
            ttft_s=pieces[0][0] if pieces else end_s,
            last_token_s=pieces[-1][0] if pieces else end_s,
        )

    async def _events(
        self, path: str, body: Mapping[str, Any], timeout_s: float
    ) -> AsyncIterator[dict[str, Any]]:
        """The JSON objects of a server-sent event stream, up to its [DONE]."""
        timeout = httpx.Timeout(timeout_s, connect=_CONNECT_TIMEOUT_S)
        try:
            async with self._http.stream("POST", path, json=body, timeout=timeout) as response:
                if response.status_code != httpx.codes.OK:
                    raise _RequestFailedError(f"http_{response.status_code}")
                async for line in response.aiter_lines():
                    data = line.removeprefix("data:").strip()
                    if data == "[DONE]":
                        return
                    if line.startswith("data:"):
                        event = json.loads(data)
                        if "error" in event:
                            raise _RequestFailedError("broken")
                        yield event
        except httpx.ConnectError as error:
            raise _RequestFailedError("connect") from error
        except httpx.TimeoutException as error:
            raise _RequestFailedError("timeout") from error
        except httpx.HTTPError as error:
            raise _RequestFailedError("broken") from error
        raise _RequestFailedError("broken")  # the stream ended without [DONE]
