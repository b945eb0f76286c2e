"""`dflash-online target`: the serving side, SGLang with our plugin, as a child process."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from dflash_online.cli.serve import serve_module

app = typer.Typer(help="Serve the target model.", no_args_is_help=True)


@app.callback()
def _group() -> None:
    """Keep `serve` a command of its own although it is the only one."""


@app.command(
    epilog="Example: dflash-online target serve --model models/smollm2-135m --drafter runs/first --port 30000"
    " -- --mem-fraction-static 0.3"
)
def serve(
    model: Annotated[str, typer.Option(help="Hugging Face folder of the target model.")],
    drafter: Annotated[
        Path | None, typer.Option(help="Drafter folder. Without: a fresh one, policy off.")
    ] = None,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535)] = 30000,
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")] = "auto",
    policy: Annotated[str | None, typer.Option(help="Policy at the start: off, chain or tree.")] = None,
    max_nodes: Annotated[
        int | None, typer.Option(min=0, help="Largest draft tree; default: 32 on a CPU, 0 on a GPU.")
    ] = None,
    capture_slots: Annotated[int | None, typer.Option(min=1, help="Captures in flight at most.")] = None,
    capture_tokens: Annotated[int | None, typer.Option(min=16, help="Tokens that one capture holds.")] = None,
    cpu_threads: Annotated[
        int | None, typer.Option(min=1, help="Compute threads without a GPU; default: all cores.")
    ] = None,
    overlap: Annotated[
        bool | None,
        typer.Option(help="Prepare a step while the one before it runs; default: with a GPU."),
    ] = None,
    sglang_flags: Annotated[
        list[str] | None, typer.Argument(help="After `--`: flags passed to SGLang.")
    ] = None,
) -> None:
    """Start SGLang with the plugin, on GPU or CPU. Fails, with the reason, when the plugin is not active.

    SIGINT and SIGTERM are passed on; the exit code is the server's.
    """
    arguments = ["--model", model]
    if drafter is not None:
        arguments += ["--drafter", str(drafter)]
    arguments += ["--host", host, "--port", str(port), "--dtype", dtype]
    optional = {
        "--policy": policy,
        "--max-nodes": max_nodes,
        "--capture-slots": capture_slots,
        "--capture-tokens": capture_tokens,
        "--cpu-threads": cpu_threads,
    }
    for flag, value in optional.items():
        if value is not None:
            arguments += [flag, str(value)]
    if overlap is not None:
        arguments.append("--overlap" if overlap else "--no-overlap")
    if sglang_flags:
        arguments += ["--", *sglang_flags]
    serve_module("server_patches", "target server", arguments, host, port)
