"""`dflash-online target policy`: what it sends, prints and refuses."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from dflash_online.cli import main
from dflash_online.process.port import free_port


@pytest.fixture
def target() -> Iterator[tuple[str, list[tuple[str, str, Any]]]]:
    """A real HTTP server in the target's place; keeps what it was asked, and has no trees."""
    asked: list[tuple[str, str, Any]] = []

    class Handler(BaseHTTPRequestHandler):
        def answer(self) -> None:
            size = int(self.headers.get("content-length", 0))
            body = json.loads(self.rfile.read(size) or b"{}")
            asked.append((self.command, self.path, body))
            is_refused = body.get("mode") == "tree"
            answer = (
                {"error": {"type": "ConfigError", "message": "mode must be off or chain on this server"}}
                if is_refused
                else {"auto": {"batch_sizes": []}, **body}
            )
            payload = json.dumps(answer).encode()
            self.send_response(422 if is_refused else 200)
            self.send_header("content-length", str(len(payload)))
            self.end_headers()
            self.wfile.write(payload)

        do_GET = do_PUT = answer

        def log_message(self, format: str, *arguments: Any) -> None:
            return

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}", asked
    server.shutdown()
    server.server_close()


def run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(["target", "policy", *arguments])
    assert isinstance(ended.value.code, int)
    return ended.value.code


def test_auto_is_sent_with_its_bounds_and_the_answer_is_printed(
    target: tuple[str, list[tuple[str, str, Any]]], capsys: pytest.CaptureFixture[str]
) -> None:
    url, asked = target
    assert run("auto", "--url", url, "--nodes", "16", "--max-batch-size", "4") == 0
    body = {"mode": "auto", "num_nodes": 16, "max_batch_size": 4}
    assert asked[0] == ("PUT", "/dflash/policy", body)
    printed = json.loads(capsys.readouterr().out)
    assert printed["policy"]["mode"] == "auto"
    assert printed["auto"] == {"batch_sizes": []}


def test_a_refusal_is_one_line_and_exit_code_2(
    target: tuple[str, list[tuple[str, str, Any]]], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("tree", "--url", target[0]) == 2
    assert "mode must be off or chain" in capsys.readouterr().err
    assert run("chain", "--url", f"http://127.0.0.1:{free_port()}") == 2


def test_an_unknown_mode_is_wrong_usage() -> None:
    assert run("bush") == 2
