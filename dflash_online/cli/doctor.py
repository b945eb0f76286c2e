"""`dflash-online doctor`: why is served tau low, although training looks right?"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from dflash_online.cli.output import JsonOption, console_for, finish, read_key_values

if TYPE_CHECKING:
    from dflash_online.doctor.finding import Diagnosis

EXAMPLE = (
    "Example: dflash-online doctor --url http://127.0.0.1:30000 --drafter runs/r1/checkpoints/v000004 "
    "--target models/smollm2-135m --records runs/r1/held_out"
)


def doctor(
    drafter: Annotated[Path, typer.Option(help="Folder of the drafter that should be served.")],
    target: Annotated[
        Path, typer.Option(help="Hugging Face folder of the target; loaded here as reference.")
    ],
    url: Annotated[str, typer.Option(help="The target server.")] = "http://127.0.0.1:30000",
    prompts: Annotated[str, typer.Option(help="Prompts as users send them: a file, or a builtin.")] = (
        "stdlib-docstrings"
    ),
    limit: Annotated[int, typer.Option(min=1, help="Prompts to send.")] = 4,
    max_new_tokens: Annotated[int, typer.Option(min=2, help="Of an answer.")] = 64,
    records: Annotated[
        Path | None, typer.Option(help="Records of the training run, such as its held_out folder.")
    ] = None,
    expected_tau: Annotated[
        float | None, typer.Option(min=1.0, help="What tau should be. Default: what the gate measured.")
    ] = None,
    template: Annotated[
        list[str] | None,
        typer.Option("--template", help="key=value for the chat template as users send it; repeatable."),
    ] = None,
    api_key: Annotated[str | None, typer.Option(envvar="DFLASH_TARGET_API_KEY", help="Bearer token.")] = None,
    as_json: JsonOption = False,
) -> None:
    """One text through the server and through the same weights here; names the first difference.

    Exit codes: 0 healthy, 1 a difference was found, 2 it could not run.
    """
    from dflash_online.doctor.run import diagnose
    from dflash_online.doctor.served import HttpServer
    from dflash_online.evaluate.sources import record_files, records_of_folder, take_prompts
    from dflash_online.prompts.template import load_tokenizer, render_item
    from dflash_online.target.client import TargetClient

    console = console_for(as_json=as_json)
    kwargs, tokenizer = read_key_values(template or []), load_tokenizer(str(target))
    texts = [render_item(tokenizer, item, **kwargs)[0] for item in take_prompts(prompts, limit)]
    files = record_files(records, 64) if records is not None else []
    trained = list(records_of_folder(files, lambda text: console.print(text, markup=False)))
    with HttpServer(TargetClient(url, api_key=api_key), kwargs) as server, console.status("") as status:
        diagnosis = diagnose(
            server,
            drafter,
            target,
            texts,
            tokenizer=tokenizer,
            records=trained,
            expected_tau=expected_tau,
            max_new_tokens=max_new_tokens,
            say=status.update,
        )
    _show(diagnosis, console)
    finish(console, diagnosis.to_json(), as_json=as_json)
    if diagnosis.finding is not None:
        raise typer.Exit(1)


def _show(diagnosis: Diagnosis, console: Console) -> None:
    table = Table("check", "result", "of")
    for name, compared in diagnosis.passed:
        table.add_row(name, "same", compared)
    for name, why in diagnosis.skipped:
        table.add_row(name, "not made", why)
    finding = diagnosis.finding
    if finding is not None:
        table.add_row(
            finding.check, "differs", f"{finding.where}: {finding.found}; should be {finding.bound}"
        )
    console.print(table, markup=False)
    if finding is None:
        console.print("The server does what the reference does, and tau is as expected.")
        return
    cause = finding.cause
    for text in (
        f"Likely cause {cause.number}: {cause.name}",
        f"  to confirm: {cause.confirm}",
        f"  to repair:  {cause.repair}",
    ):
        console.print(text, markup=False)
