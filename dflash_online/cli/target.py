"""`dflash-online target`: the serving side, SGLang with our plugin as a child process, and its policy."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Annotated

import typer

from dflash_online.cli.serve import serve_module
from dflash_online.tree.policy import PolicyMode

app = typer.Typer(help="Serve the target model.", no_args_is_help=True)


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
    policy: Annotated[str | None, typer.Option(help="Policy at the start: off, chain, tree or auto.")] = None,
    max_nodes: Annotated[
        int | None, typer.Option(min=0, help="Largest draft tree; default: 32 on a CPU, 0 on a GPU.")
    ] = None,
    verify_widths: Annotated[
        str | None,
        typer.Option(
            metavar="W,W,...",
            help="Widths of a verify pass, root included, each a set of CUDA graphs; default on a GPU: 1, the"
            " block size and the largest tree.",
        ),
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
        "--verify-widths": verify_widths,
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


@app.command(
    epilog="Example: dflash-online target policy auto --url http://127.0.0.1:30000. Prints the policy in"
    " force, and what auto knows so far, as JSON."
)
def policy(
    mode: Annotated[PolicyMode, typer.Argument(help="off, chain, tree, or auto: whichever is fastest now.")],
    url: Annotated[str, typer.Option(help="Address of the target server.")] = "http://127.0.0.1:30000",
    nodes: Annotated[
        int | None, typer.Option(min=0, help="Draft nodes per step; with auto the largest tree tried.")
    ] = None,
    max_batch_size: Annotated[
        int | None, typer.Option(min=1, help="Above this many running requests nothing is drafted.")
    ] = None,
    probe_interval: Annotated[
        int | None, typer.Option(min=2, help="Above that, every n-th step drafts all the same.")
    ] = None,
    api_key: Annotated[
        str | None, typer.Option(envvar="DFLASH_API_KEY", help="Key of the server, if it has one.")
    ] = None,
) -> None:
    """Change the policy of a running server, from its next decode step on. No output changes."""
    from dflash_online.target.client import TargetClient

    async def change() -> dict[str, object]:
        client = TargetClient(url, api_key=api_key)
        try:
            in_force = await client.set_policy(
                mode.value, nodes, max_batch_size=max_batch_size, probe_interval=probe_interval
            )
            return {"policy": in_force, "auto": (await client.info()).get("auto")}
        finally:
            await client.aclose()

    typer.echo(json.dumps(asyncio.run(change())))
