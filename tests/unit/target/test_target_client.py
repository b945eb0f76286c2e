"""The target's client: each foreign failure becomes one of ours; a record streams in whole or not at all."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import httpx
import pytest
from tiny_models import tiny_record

from dflash_online.errors import (
    ConfigError,
    TargetBusyError,
    TargetRefusedError,
    TargetUnavailableError,
    TruncatedRecordError,
)
from dflash_online.target.client import CaptureRequest, TargetClient, VersionAcceptance
from dflash_online.wire.codec import encode_record

Handler = Callable[[httpx.Request], httpx.Response]
REQUEST = CaptureRequest(input_ids=(1, 2, 3), record_id="run/0/1", cursor=1)


def ask(handler: Handler, call: Callable[[TargetClient], Awaitable[Any]], api_key: str | None = None) -> Any:
    """One call against a transport of our own."""

    async def main() -> Any:
        client = TargetClient("http://target:1/", api_key=api_key, transport=httpx.MockTransport(handler))
        try:
            return await call(client)
        finally:
            await client.aclose()

    return asyncio.run(main())


def answering(status: int, body: object = None, **headers: str) -> Handler:
    return lambda request: httpx.Response(status, json=body, headers=headers)


def test_record_is_decoded_from_chunks_of_any_size() -> None:
    record = tiny_record(6, ((2, 6),))
    data = b"".join(bytes(part) for part in encode_record(record))

    async def chunks() -> Any:
        for start in range(0, len(data), 7):
            yield data[start : start + 7]

    received = ask(lambda request: httpx.Response(200, content=chunks()), lambda c: c.capture(REQUEST))
    assert received.header == record.header
    assert received.features_TF.equal(record.features_TF)


def test_record_that_ends_early_is_truncated() -> None:
    data = b"".join(bytes(part) for part in encode_record(tiny_record(6, ((2, 6),))))
    with pytest.raises(TruncatedRecordError):
        ask(lambda request: httpx.Response(200, content=data[:-5]), lambda c: c.capture(REQUEST))


@pytest.mark.parametrize(
    ("status", "headers", "error"),
    [
        (503, {"Retry-After": "2.5"}, TargetBusyError),
        (429, {}, TargetBusyError),
        (503, {}, TargetUnavailableError),
        (500, {}, TargetUnavailableError),
        (422, {}, TargetRefusedError),
        (409, {}, TargetRefusedError),
        (401, {}, TargetRefusedError),
    ],
)
def test_status_becomes_a_typed_error(status: int, headers: dict[str, str], error: type[Exception]) -> None:
    body = {"error": {"type": "X", "message": "the reason"}}
    with pytest.raises(error) as caught:
        ask(answering(status, body, **headers), lambda c: c.capture(REQUEST))
    if isinstance(caught.value, TargetBusyError):
        assert caught.value.retry_after_s == float(headers.get("Retry-After", 1))
    else:
        assert "the reason" in str(caught.value)


def request_errors() -> list[type[httpx.RequestError]]:
    found: list[type[httpx.RequestError]] = []
    waiting = [httpx.RequestError]
    while waiting:
        kind = waiting.pop()
        found.append(kind)
        waiting += kind.__subclasses__()
    return found


@pytest.mark.parametrize("kind", request_errors())
def test_every_request_error_of_httpx_becomes_unavailable(kind: type[httpx.RequestError]) -> None:
    def fail(request: httpx.Request) -> httpx.Response:
        raise kind("boom", request=request)

    with pytest.raises(TargetUnavailableError, match=r"/dflash/info: .*boom") as caught:
        ask(fail, lambda c: c.info())
    assert caught.value.url == "http://target:1"


def test_answer_that_is_no_json_object_is_refused() -> None:
    for content in (b"<html>", b"[1]"):
        with pytest.raises(TargetRefusedError, match="JSON"):
            ask(lambda request, content=content: httpx.Response(200, content=content), lambda c: c.info())


def test_acceptance_is_read_with_its_tau() -> None:
    body = {
        "versions": [{"drafter_version": "3-ab12cd34ef56", "policy": "chain", "histogram": [120, 60, 20]}]
    }
    found = ask(answering(200, body), lambda c: c.acceptance())
    assert found == [
        VersionAcceptance(drafter_version="3-ab12cd34ef56", policy="chain", histogram=(120, 60, 20))
    ]
    assert found[0].num_steps == 200
    assert found[0].tau == 1.5
    with pytest.raises(TargetRefusedError, match="makes no sense"):
        ask(answering(200, {"versions": [{}]}), lambda c: c.acceptance())


def test_control_calls_send_what_the_interface_names() -> None:
    seen: list[tuple[str, str, Any, str | None]] = []

    def record(request: httpx.Request) -> httpx.Response:
        body = json.loads(request.content) if request.content else None
        seen.append((request.method, request.url.path, body, request.headers.get("authorization")))
        return httpx.Response(200, json={})

    ask(record, lambda c: c.stage("/runs/v1"), api_key="secret")
    ask(record, lambda c: c.commit("1-ab12cd34ef56"))
    ask(record, lambda c: c.rollback())
    ask(record, lambda c: c.set_policy("chain", 7))
    assert seen == [
        ("POST", "/dflash/drafter/stage", {"path": "/runs/v1"}, "Bearer secret"),
        ("POST", "/dflash/drafter/commit", {"version": "1-ab12cd34ef56"}, None),
        ("POST", "/dflash/drafter/rollback", {}, None),
        ("PUT", "/dflash/policy", {"mode": "chain", "num_nodes": 7}, None),
    ]


def test_prefill_request_carries_spans_and_no_sampling() -> None:
    request = CaptureRequest(
        mode="prefill",
        input_ids=(1, 2),
        loss_spans=((1, 2),),
        sampling_params={"temperature": 0},
        record_id="r",
    )
    body = request.body()
    assert body["loss_spans"] == [[1, 2]]
    assert "sampling_params" not in body
    with pytest.raises(ConfigError, match="exactly one"):
        CaptureRequest(record_id="r")


def test_url_of_another_scheme_is_refused() -> None:
    with pytest.raises(ConfigError, match="http://"):
        TargetClient("ftp://target")
