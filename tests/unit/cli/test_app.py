"""Commands as a user runs them: exit codes, messages, the JSON line."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import typer
from openai_server import Behaviour, serving

from dflash_online.cli import main
from dflash_online.cli.app import app
from dflash_online.cli.output import merge, read_key_values
from dflash_online.process.port import free_port


@dataclass(frozen=True)
class Outcome:
    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out.splitlines()[-1])


Run = Callable[..., Outcome]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    def run_command(*arguments: str) -> Outcome:
        with pytest.raises(SystemExit) as ended:
            main(arguments)
        captured = capsys.readouterr()
        assert isinstance(ended.value.code, int)
        return Outcome(ended.value.code, captured.out, captured.err)

    return run_command


@pytest.fixture
def trainer() -> Iterator[tuple[str, list[tuple[str, str, Any]]]]:
    """A real HTTP server in the trainer's place; keeps what it was asked."""
    asked: list[tuple[str, str, Any]] = []

    class Handler(BaseHTTPRequestHandler):
        def answer(self) -> None:
            size = int(self.headers.get("content-length", 0))
            asked.append((self.command, self.path, json.loads(self.rfile.read(size) or b"null")))
            refused = self.path == "/train/pause"
            body = (
                {"error": {"message": "no run to pause"}}
                if refused
                else {"run_id": "r7", "state": "training"}
            )
            payload = json.dumps(body).encode()
            self.send_response(409 if refused else 200)
            self.send_header("content-length", str(len(payload)))
            self.end_headers()
            self.wfile.write(payload)

        do_GET = do_POST = answer

        def log_message(self, format: str, *arguments: Any) -> None:
            return

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}", asked
    server.shutdown()
    server.server_close()
    thread.join(timeout=5)


def commands(group: typer.Typer) -> Iterator[tuple[list[str], str]]:
    """Path and epilog of every command."""
    for command in group.registered_commands:
        assert command.callback is not None
        name = command.name or command.callback.__name__
        yield [name], command.epilog or ""
    for below in group.registered_groups:
        assert below.typer_instance is not None
        for path, epilog in commands(below.typer_instance):
            yield [str(below.name), *path], epilog


def test_every_command_has_help_with_an_example(run: Run) -> None:
    found = list(commands(app))
    assert len(found) >= 14
    for path, epilog in found:
        assert epilog.startswith(f"Example: dflash-online {' '.join(path)}"), path
        assert run(*path, "--help").code == 0


def test_a_named_error_is_a_message_and_exit_code_2(run: Run, tmp_path: Path) -> None:
    outcome = run("model", "fetch", "gpt-7", "--to", str(tmp_path / "m"))
    assert (outcome.code, outcome.out) == (2, "")
    assert outcome.err.strip() == "dflash-online: model must be one of smollm2-135m, got 'gpt-7'"


def test_wrong_usage_is_exit_code_2(run: Run) -> None:
    assert run("model", "fetch").code == 2
    assert run("no-such-command").code == 2


def test_start_sends_the_file_with_the_changes_on_top(run: Run, trainer: Any, tmp_path: Path) -> None:
    url, asked = trainer
    config = tmp_path / "run.json"
    config.write_text('{"recipe": "zlab", "optimizer": {"lr": 0.1, "clip": 1.0}}')
    changes = ["--set", "optimizer.lr=0.001", "--set", "prompts=a.jsonl", "--set", 'target_urls=["http://t"]']
    outcome = run("train", "start", "--config", str(config), *changes, "--trainer", url, "--json")
    assert outcome.code == 0
    assert outcome.json == {"run_id": "r7", "state": "training"}
    sent = {
        "recipe": "zlab",
        "optimizer": {"lr": 0.001, "clip": 1.0},
        "prompts": "a.jsonl",
        "target_urls": ["http://t"],
    }
    assert asked == [("POST", "/train/start", sent)]


def test_a_refusal_of_the_trainer_is_shown_with_its_message(run: Run, trainer: Any) -> None:
    url, _ = trainer
    outcome = run("train", "pause", "--trainer", url)
    assert outcome.code == 2
    assert "refused with HTTP 409: no run to pause" in outcome.err


@pytest.mark.parametrize("action", ["resume", "stop", "publish", "rollback"])
def test_actions_are_posts(run: Run, trainer: Any, action: str) -> None:
    url, asked = trainer
    assert run("train", action, "--trainer", url).code == 0
    assert asked == [("POST", f"/train/{action}", {})]


def test_a_trainer_that_is_not_there_is_named(run: Run) -> None:
    url = f"http://127.0.0.1:{free_port()}"
    outcome = run("train", "status", "--trainer", url)
    assert outcome.code == 2
    assert f"trainer {url} does not answer" in outcome.err


def test_a_run_config_must_be_a_json_object(run: Run, tmp_path: Path) -> None:
    (tmp_path / "list.json").write_text("[]")
    outcome = run("train", "start", "--config", str(tmp_path / "list.json"))
    assert outcome.code == 2
    assert "a JSON object, holds a list" in outcome.err
    assert "a readable JSON file" in run("train", "start", "--config", str(tmp_path / "none.json")).err


def test_recipes_end_with_one_json_line(run: Run) -> None:
    outcome = run("train", "recipes", "--json")
    assert len(outcome.out.splitlines()) == 1
    assert outcome.json["recipes"]["v3"]["kl_share"] == 0.7


@pytest.mark.parametrize("command", [["target", "serve", "--model", "m"], ["trainer", "serve"]])
def test_a_taken_port_is_named_before_anything_starts(run: Run, command: list[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        outcome = run(*command, "--port", str(port))
    assert outcome.code == 2
    assert f"port {port} on 127.0.0.1 is in use" in outcome.err


def test_serve_passes_arguments_and_exit_code_through(tmp_path: Path) -> None:
    (tmp_path / "server_patches.py").write_text("import sys; print(sys.argv[1:]); sys.exit(5)")
    command = [sys.executable, "-m", "dflash_online.cli", "target", "serve", "--model", "m", "--drafter", "d"]
    command += ["--port", str(free_port()), "--dtype", "float32", "--", "--mem-fraction-static", "0.3"]
    # `python -m` looks into the working folder first, so the stand-in is the one that runs.
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 5
    expected = [
        "--model",
        "m",
        "--drafter",
        "d",
        "--host",
        "127.0.0.1",
        "--port",
        command[-6],
        "--dtype",
        "float32",
    ]
    assert done.stdout.strip() == str([*expected, "--", "--mem-fraction-static", "0.3"])


def test_set_reads_json_and_falls_back_to_text() -> None:
    pairs = ["a.b=1", "a.c=x y", "d=[1, 2]", "e=true", "f=null", "g=a=b"]
    assert read_key_values(pairs) == {
        "a": {"b": 1, "c": "x y"},
        "d": [1, 2],
        "e": True,
        "f": None,
        "g": "a=b",
    }
    for wrong in (["a"], ["=1"], ["a=1", "a.b=2"]):
        with pytest.raises(typer.BadParameter):
            read_key_values(wrong)


def test_merge_replaces_values_and_merges_objects() -> None:
    base = {"a": {"b": 1, "c": 2}, "d": 3}
    assert merge(base, {"a": {"b": 9}, "d": {"e": 4}}) == {"a": {"b": 9, "c": 2}, "d": {"e": 4}}
    assert base == {"a": {"b": 1, "c": 2}, "d": 3}


def test_bench_measures_a_server_and_writes_its_result(run: Run, tmp_path: Path) -> None:
    with serving(Behaviour()) as url:
        out = tmp_path / "deep" / "bench.json"
        outcome = run(
            *("bench", "--url", url, "--policy", "off,chain", "--num-prompts", "3", "--warmup", "0"),
            *("--out", str(out), "--json"),
        )
    assert outcome.code == 0
    assert (outcome.json["outputs_compared"], outcome.json["outputs_identical"]) == (3, 3)
    assert json.loads(out.read_text()) == outcome.json


def test_bench_compares_budgets_and_temperatures_and_draws_them(run: Run, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    with serving(Behaviour()) as url:
        outcome = run(
            *("bench", "--url", url, "--policy", "off, chain:3,tree:16", "--temperature", "0,0.5"),
            *("--num-prompts", "3", "--warmup", "0", "--plots", str(tmp_path), "--json"),
        )
    assert outcome.code == 0
    passes = outcome.json["passes"]
    assert [one["policy"] for one in passes] == ["off", "chain:3", "tree:16"] * 2
    assert [one["temperature"] for one in passes] == [0] * 3 + [0.5] * 3
    assert passes[2]["speedup"]["num_values"] == 3
    assert {file.name for file in tmp_path.iterdir()} == {"tau.png", "speedup.png"}


@pytest.mark.parametrize(
    ("flag", "value", "reason"),
    [
        ("--policy", "tree:many", "tree:NODES with a whole number >= 1, got 'tree:many'"),
        ("--temperature", "0,hot", "--temperature must be numbers separated by commas, got '0,hot'"),
    ],
)
def test_bench_refuses_malformed_lists_before_it_sends_anything(
    run: Run, flag: str, value: str, reason: str
) -> None:
    outcome = run("bench", flag, value)
    assert outcome.code == 2
    assert reason in " ".join((outcome.out + outcome.err).split())


def test_bench_fails_when_outputs_differ(run: Run) -> None:
    with serving(Behaviour(answer_by_policy=True)) as url:
        outcome = run("bench", "--url", url, "--policy", "off,chain", "--num-prompts", "2")
    assert outcome.code == 1
    assert "greedy outputs identical: 0 of 2" in outcome.out


def test_the_command_line_starts_without_torch() -> None:
    code = "import sys, dflash_online.cli; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0
