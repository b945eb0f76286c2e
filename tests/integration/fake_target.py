"""A fake target behind the HTTP interface of docs/target-api.md.

A fake, because the real SGLang needs a minute to start; the seam is the production one.

    test --switches--> [ FakeTarget: FastAPI in a thread ] <--HTTP-- trainer service

Real: the records (a random six-layer Llama of transformers decodes greedily; features are its hidden states),
the wire format, the loading and checking of staged folders. Fake: decode steps and acceptance, which follow
`tau_of_number`. Faults on demand: busy, vanish mid-stream, corrupt bytes, another checksum, refusals, gone.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from dflash_online.drafter.checkpoint import load_checkpoint
from dflash_online.errors import DflashOnlineError
from dflash_online.process.port import free_port
from dflash_online.wire.codec import encode_record
from dflash_online.wire.record import Record, RecordHeader, RecordSource, TargetIdentity

HIDDEN, VOCAB, NUM_LAYERS, LAYER_IDS = 32, 264, 8, (1, 2, 3, 4)
CHECKSUM = "f00d"
_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def write_target_folder(path: Path) -> Path:
    """A tiny Llama with a byte-level tokenizer and a chat template, as a Hugging Face folder."""
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=HIDDEN,
        intermediate_size=64,
        num_hidden_layers=NUM_LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=VOCAB,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
    )
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(path)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        additional_special_tokens=["<|im_start|>"],
        chat_template=_TEMPLATE,
    )
    fast.save_pretrained(path)
    return path


@dataclass(slots=True)
class Switches:
    """Faults, set by tests between requests."""

    num_busy: int = 0
    """Captures answered with 503."""
    num_vanish: int = 0
    """Captures whose connection breaks in the middle of the features."""
    num_corrupt: int = 0
    """Captures with one byte flipped."""
    num_not_finite: int = 0
    """Captures with NaN or infinity among the features."""
    num_refuse: int = 0
    """Captures answered with 422."""
    num_refuse_stage: int = 0
    num_unavailable_commit: int = 0
    """Commits answered with 500."""
    checksum: str = CHECKSUM
    tau_of_number: dict[int, float] = field(default_factory=dict)
    """Live tau per version number; 1.5 where nothing is set. At most 2."""
    capture_delay_s: float = 0.0


class FakeTarget:
    """One fake server. `start` and `stop` may be called again and again; the port stays."""

    def __init__(self, folder: Path, *, block_size: int = 4) -> None:
        self.folder, self.block_size = folder, block_size
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.switches = Switches()
        self.calls: list[tuple[str, Any]] = []
        """Every control call and capture, in order: name and body."""
        self.versions = ["none"]
        """Live versions, in order; the last one is live."""
        self.staged: str | None = None
        self._steps: dict[str, int] = {}
        self._model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self._lock = threading.Lock()
        self._server: uvicorn.Server | None = None
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Listen, in a thread."""
        options = {"log_level": "critical", "lifespan": "off", "ws": "none"}
        config = uvicorn.Config(_routes(self), port=self.port, **options)
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._server.run, daemon=True)
        self._thread.start()
        deadline = time.monotonic() + 10
        while not self._server.started:
            assert time.monotonic() < deadline, "the fake target does not start"
            time.sleep(0.01)

    def stop(self) -> None:
        """Break every connection and stop listening."""
        assert self._server is not None
        assert self._thread is not None
        self._server.should_exit = self._server.force_exit = True
        self._thread.join(10)

    def called(self, name: str) -> list[Any]:
        """Bodies of all calls of that name."""
        return [body for called, body in self.calls if called == name]

    def info(self) -> dict[str, Any]:
        """Body of GET /dflash/info."""
        return {
            "plugin_version": "fake",
            "sglang_version": "fake",
            "device": "cpu",
            "target": {"path": str(self.folder), "revision": "", "weight_checksum": self.switches.checksum},
            "model": {
                "hidden_size": HIDDEN,
                "vocab_size": VOCAB,
                "num_layers": NUM_LAYERS,
                "context_length": 512,
            },
            "layer_ids": list(LAYER_IDS),
            "feature_width": HIDDEN * len(LAYER_IDS),
            "drafter": self.drafter(),
            "policy": {"mode": "chain", "num_nodes": self.block_size - 1},
        }

    def drafter(self) -> dict[str, Any]:
        """Body of GET /dflash/drafter."""
        previous = self.versions[-2] if len(self.versions) > 1 else None
        return {
            "version": self.versions[-1],
            "path": None,
            "staged": self.staged,
            "previous": previous,
            "block_size": self.block_size,
            "mask_token_id": None,
            "num_swaps": len(self.versions) - 1,
        }

    def swap_answer(self) -> dict[str, Any]:
        """Body of a commit's or rollback's answer."""
        drafter = self.drafter()
        names = ("version", "previous")
        return {name: drafter[name] for name in names} | {
            "checksum": "00",
            "pause_ms": 1.5,
            "target_checksum": self.switches.checksum,
        }

    def acceptance(self) -> dict[str, Any]:
        """The live version takes 100 more verify steps at each look."""
        live = self.versions[-1]
        if live != "none":
            self._steps[live] = self._steps.get(live, 0) + 100
        entries = []
        for version, num_steps in self._steps.items():
            tau = self.switches.tau_of_number.get(int(version.split("-")[0]), 1.5)
            histogram = [round(num_steps * (2 - tau)), round(num_steps * (tau - 1))]
            entries.append({"drafter_version": version, "policy": "chain", "histogram": histogram})
        return {"versions": entries}

    def record(self, body: dict[str, Any]) -> Record:
        """Decode greedily, or take the given tokens, and tap the hooked layers."""
        ids = list(body["input_ids"])
        prompt_length, spans = len(ids), [tuple(span) for span in body.get("loss_spans", ())]
        with self._lock, torch.inference_mode():
            if body["mode"] == "generate":
                num_new = body["sampling_params"]["max_new_tokens"]
                for _ in range(num_new):
                    logits_V = self._model(torch.tensor([ids])).logits[0, -1]
                    ids.append(int(logits_V.argmax()))
                spans = [(prompt_length, len(ids))]
            hidden = self._model(torch.tensor([ids[:-1]]), output_hidden_states=True).hidden_states
        features_TF = torch.cat([hidden[i + 1][0] for i in LAYER_IDS], dim=-1).bfloat16().contiguous()
        header = RecordHeader(
            record_id=body["record_id"],
            source=RecordSource(body["source"]),
            cursor=body.get("cursor"),
            target=TargetIdentity(path=str(self.folder), revision="", weight_checksum=self.switches.checksum),
            drafter_version=self.versions[-1],
            layer_ids=LAYER_IDS,
            dtype="bfloat16",
            num_rows=len(ids) - 1,
            row_width=features_TF.shape[1],
            token_ids=tuple(ids),
            prompt_length=prompt_length,
            loss_spans=tuple(spans),
            finish_reason="prefill" if body["mode"] == "prefill" else "length",
        )
        return Record(header, features_TF)


class _VanishError(Exception):
    """Ends a response in the middle: the server drops the connection."""


def _take(switches: Switches, name: str) -> bool:
    """Count one fault down."""
    left = getattr(switches, name)
    if left:
        setattr(switches, name, left - 1)
    return bool(left)


def _refusal(status: int, message: str, **headers: str) -> JSONResponse:
    body = {"error": {"type": "FakeError", "message": message}}
    return JSONResponse(
        body, status_code=status, headers={k.replace("_", "-"): v for k, v in headers.items()}
    )


def _routes(target: FakeTarget) -> FastAPI:
    app = FastAPI()
    switches = target.switches

    @app.get("/dflash/info")
    def info() -> dict[str, Any]:
        return target.info()

    @app.get("/dflash/drafter")
    def drafter() -> dict[str, Any]:
        return target.drafter()

    @app.get("/dflash/acceptance")
    def acceptance() -> dict[str, Any]:
        return target.acceptance()

    @app.post("/dflash/capture")
    async def capture(request: Request) -> Response:
        body = await request.json()
        target.calls.append(("capture", body))
        if _take(switches, "num_busy"):
            return _refusal(503, "no slot is free", retry_after="0.05")
        if _take(switches, "num_refuse"):
            return _refusal(422, "the sequence does not fit a slot")
        # At most one fault a capture, counted down here, on the one thread of the event loop.
        in_stream = ("num_corrupt", "num_vanish", "num_not_finite")
        fault = next((name for name in in_stream if _take(switches, name)), None)
        is_nan = switches.num_not_finite % 2 == 1  # NaN and infinity in turn
        return StreamingResponse(_stream(target, body, fault, is_nan), media_type="application/x-msgpack")

    @app.post("/dflash/drafter/stage")
    def stage(body: dict[str, Any]) -> Response:
        target.calls.append(("stage", body))
        if _take(switches, "num_refuse_stage"):
            return _refusal(422, "the drafter does not fit")
        try:
            target.staged = str(load_checkpoint(Path(body["path"])).version)
        except DflashOnlineError as error:
            return _refusal(422, str(error))
        return JSONResponse({"staged": target.staged, "num_tensors": 1, "num_bytes": 1, "stage_ms": 1.0})

    @app.post("/dflash/drafter/commit")
    def commit(body: dict[str, Any]) -> Response:
        target.calls.append(("commit", body))
        if _take(switches, "num_unavailable_commit"):
            return _refusal(500, "scheduler does not answer")
        if target.staged is None or target.staged != body["version"]:
            return _refusal(409, f"staged is {target.staged}")
        target.versions.append(target.staged)
        target.staged = None
        return JSONResponse(target.swap_answer())

    @app.post("/dflash/drafter/rollback")
    def rollback() -> Response:
        target.calls.append(("rollback", {}))
        if len(target.versions) < 2:
            return _refusal(409, "nothing to roll back to")
        target.versions.pop()
        return JSONResponse(target.swap_answer())

    return app


def _stream(target: FakeTarget, body: dict[str, Any], fault: str | None, is_nan: bool) -> Iterator[bytes]:
    """The record's bytes; a synchronous generator runs in a thread, so the server stays responsive."""
    time.sleep(target.switches.capture_delay_s)
    record = target.record(body)
    if fault == "num_not_finite":
        record.features_TF[-1, -1] = float("nan" if is_nan else "inf")
    data = bytearray(b"".join(bytes(part) for part in encode_record(record)))
    if fault == "num_corrupt":
        data[len(data) // 2] ^= 0xFF  # within the features
    if fault == "num_vanish":
        yield bytes(data[: len(data) // 2])
        raise _VanishError(json.dumps(body["record_id"]))
    yield bytes(data)
