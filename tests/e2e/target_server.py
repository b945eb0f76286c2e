"""A running target, as the tests talk to it: plain HTTP, nothing of its internals."""

from __future__ import annotations

import re
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import torch
from safetensors.torch import load

from dflash_online.wire.codec import decode_record
from dflash_online.wire.record import Record

CONTEXT_LENGTH = 512
# SGLang then retracts a running request, if there is another, every so many steps.
FORCED_RETRACTION = {"SGLANG_TEST_RETRACT": "1", "SGLANG_TEST_RETRACT_INTERVAL": "4"}
_RETRACTED = re.compile(r"#retracted_reqs: [1-9]")
PROMPTS = [
    "Write a Python function that reverses a string.",
    "What is the capital of France?",
    "Explain what a hash table is.",
    "Write a Python function that returns the n-th Fibonacci number.",
    "List three uses of a paper clip.",
    "How do I read a file line by line in Python?",
    "Write a haiku about the sea.",
    "What is the difference between a list and a tuple?",
    "Write a Python function that checks whether a number is prime.",
    "Give me a recipe for pancakes.",
]


def chat_text(question: str) -> str:
    return f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"


def target_command(model: Path, drafter: Path, port: int, *more: str) -> list[str]:
    own = ["--model", str(model), "--drafter", str(drafter), "--port", str(port), "--dtype", "float32"]
    return [sys.executable, "-m", "server_patches", *own, *more]


@dataclass(frozen=True, slots=True)
class TargetServer:
    client: httpx.Client
    log_path: Path

    def post(self, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        answer = self.client.post(path, json=body or {})
        assert answer.status_code == httpx.codes.OK, answer.text
        value: dict[str, Any] = answer.json()
        return value

    def info(self) -> dict[str, Any]:
        value: dict[str, Any] = self.client.get("/dflash/info").json()
        return value

    def drafter(self) -> dict[str, Any]:
        value: dict[str, Any] = self.client.get("/dflash/drafter").json()
        return value

    def set_policy(self, mode: str, **more: Any) -> dict[str, Any]:
        answer = self.client.put("/dflash/policy", json={"mode": mode, **more})
        assert answer.status_code == httpx.codes.OK, answer.text
        value: dict[str, Any] = answer.json()
        return value

    def swap(self, folder: Path) -> dict[str, Any]:
        staged = self.post("/dflash/drafter/stage", {"path": str(folder)})["staged"]
        return self.post("/dflash/drafter/commit", {"version": staged})

    def generate(self, text: str, **sampling: Any) -> dict[str, Any]:
        sampling = {"temperature": 0.0, "max_new_tokens": 32, **sampling}
        return self.post("/generate", {"text": text, "sampling_params": sampling})

    def generate_all(self, texts: list[str], concurrency: int, **sampling: Any) -> list[list[int]]:
        """Output ids of each text, in order."""
        return self.generate_each([(text, sampling) for text in texts], concurrency)

    def generate_each(
        self, requests: list[tuple[str, dict[str, Any]]], concurrency: int | None = None
    ) -> list[list[int]]:
        """Output ids of texts with sampling settings of their own, in order; None: all at a time."""
        with ThreadPoolExecutor(concurrency or len(requests)) as pool:
            answers = pool.map(lambda request: self.generate(request[0], **request[1]), requests)
            return [answer["output_ids"] for answer in answers]

    def num_retractions(self) -> int:
        """Times that running requests were retracted so far."""
        return len(_RETRACTED.findall(self.log_path.read_text(errors="replace")))

    def num_used_tokens(self) -> int:
        """Slots of the key-value cache that hold something, cached prefixes included."""
        return int(self.client.get("/v1/loads").json()["loads"][0]["num_used_tokens"])

    def capture(self, **body: Any) -> Record:
        answer = self.client.post("/dflash/capture", json=body)
        assert answer.status_code == httpx.codes.OK, answer.text
        assert answer.headers["content-type"] == "application/x-msgpack"
        return decode_record(answer.content)

    def probe(self, input_ids: list[int]) -> dict[str, torch.Tensor]:
        answer = self.client.post("/dflash/probe", json={"input_ids": input_ids})
        assert answer.status_code == httpx.codes.OK, answer.text
        return load(answer.content)

    def histograms_by_policy(self, version: str) -> dict[str, list[int]]:
        """Acceptance histograms of one drafter version, by policy."""
        versions = self.client.get("/dflash/acceptance").json()["versions"]
        return {e["policy"]: e["histogram"] for e in versions if e["drafter_version"] == version}

    def histograms(self) -> dict[str, list[int]]:
        """Acceptance histogram per drafter version."""
        versions = self.client.get("/dflash/acceptance").json()["versions"]
        return {entry["drafter_version"]: entry["histogram"] for entry in versions}
