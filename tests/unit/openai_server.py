"""A tiny real HTTP server with the OpenAI streaming form and, when asked, our /dflash routes.

Its answers depend on the prompt alone, so that two passes must agree; `policy` decides how many tokens a
verify step commits, so that tau is known beforehand: with `chain` every step accepts two drafts.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse

ACCEPTED = 2
VERSION = "3-ab12cd34ef56"
_DEFAULT_NODES = {"off": 0, "chain": 7, "tree": 16, "auto": 16}


@dataclass
class Behaviour:
    """What the server does and what it saw."""

    is_ours: bool = True
    drop_done: bool = False
    """End the streams early."""
    malformed: bool = False
    status_for: dict[str, int] = field(default_factory=dict)
    """HTTP status by prompt."""
    answer_by_policy: bool = False
    """Say something else when speculation is on, as a broken server would."""
    delay_s: float = 0.0
    policy: dict[str, Any] = field(default_factory=lambda: {"mode": "chain", "num_nodes": 7})
    policy_bodies: list[dict[str, Any]] = field(default_factory=list)
    """What PUT /dflash/policy received."""
    policies_set: list[str] = field(default_factory=list)
    bodies: list[dict[str, Any]] = field(default_factory=list)
    num_steps: int = 0
    in_flight: int = 0
    max_in_flight: int = 0


def words_for(prompt: str) -> list[str]:
    return [f"{prompt[::-1]}-{i} " for i in range(4 + len(prompt) % 3)]


def create_app(behaviour: Behaviour) -> FastAPI:
    app = FastAPI()

    @app.get("/v1/models")
    def models() -> dict[str, Any]:
        return {"data": [{"id": "tiny"}]}

    @app.post("/v1/chat/completions")
    async def chat(request: Request) -> Response:
        body = await request.json()
        behaviour.bodies.append(body)
        prompt = body["messages"][-1]["content"]
        if prompt in behaviour.status_for:
            return JSONResponse({"error": "no"}, behaviour.status_for[prompt])
        return StreamingResponse(stream(prompt), media_type="text/event-stream")

    @app.post("/v1/completions")
    async def complete(request: Request) -> Response:
        body = await request.json()
        behaviour.bodies.append(body)
        return StreamingResponse(stream(body["prompt"], is_chat=False), media_type="text/event-stream")

    async def stream(prompt: str, is_chat: bool = True) -> AsyncIterator[str]:
        import asyncio

        behaviour.in_flight += 1
        behaviour.max_in_flight = max(behaviour.max_in_flight, behaviour.in_flight)
        words = words_for(prompt)
        if behaviour.answer_by_policy and behaviour.policy["mode"] != "off":
            words[-1] = "wrong"
        try:
            for word in words:
                await asyncio.sleep(behaviour.delay_s)
                piece = {"delta": {"content": word}} if is_chat else {"text": word}
                yield f"data: {json.dumps({'choices': [piece]})}\n\n"
            if behaviour.malformed:
                yield "data: {broken\n\n"
            if behaviour.policy["mode"] != "off":
                behaviour.num_steps += len(words)
            usage = {"prompt_tokens": 1, "completion_tokens": len(words)}
            yield f"data: {json.dumps({'choices': [], 'usage': usage})}\n\n"
            if not behaviour.drop_done:
                yield "data: [DONE]\n\n"
        finally:
            behaviour.in_flight -= 1

    if behaviour.is_ours:
        add_dflash_routes(app, behaviour)
    return app


def add_dflash_routes(app: FastAPI, behaviour: Behaviour) -> None:
    @app.get("/dflash/info")
    def info() -> dict[str, Any]:
        return {"sglang_version": "0.5.23", "policy": behaviour.policy}

    @app.put("/dflash/policy")
    async def policy(request: Request) -> dict[str, Any]:
        body = await request.json()
        behaviour.policy_bodies.append(body)
        behaviour.policy = {"num_nodes": _DEFAULT_NODES[body["mode"]], **body}
        behaviour.policies_set.append(behaviour.policy["mode"])
        return behaviour.policy

    @app.get("/dflash/acceptance")
    def acceptance() -> dict[str, Any]:
        histogram = [0] * ACCEPTED + [behaviour.num_steps]
        return {"versions": [{"drafter_version": VERSION, "policy": "chain", "histogram": histogram}]}


@contextmanager
def serving(behaviour: Behaviour) -> Iterator[str]:
    """The server in a thread; gives its URL."""
    server = uvicorn.Server(uvicorn.Config(create_app(behaviour), port=0, log_level="error", lifespan="off"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    deadline = time.monotonic() + 10
    while not server.started:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    port = server.servers[0].sockets[0].getsockname()[1]
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        thread.join(timeout=10)
