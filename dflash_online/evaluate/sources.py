"""Where the records of an evaluation come from: a folder, a running server, or a target in this process.

    folder of record files            --records_of_folder--> records
    prompts, a server                 --records_of_server--> records
    prompts, the target's own folder  --records_in_process--> records

Each gives records one by one, so that only one is in memory. What cannot be read or captured is named to
`warn` and left out. Raises ConfigError, PromptError, TargetUnavailableError.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch

from dflash_online.errors import ConfigError, PromptError, TargetBusyError, TargetRefusedError, WireError
from dflash_online.prompts.item import PromptItem
from dflash_online.prompts.read import open_prompts
from dflash_online.prompts.template import load_tokenizer, render_item
from dflash_online.target.client import CaptureRequest, TargetClient
from dflash_online.target.inprocess import InProcessTarget
from dflash_online.wire.codec import decode_record
from dflash_online.wire.record import Record, RecordSource

Warn = Callable[[str], None]
_MAX_BUSY_WAITS = 30


def record_files(folder: Path, limit: int) -> list[Path]:
    """The first files of a folder and the folders in it, by name.

    Raises:
        ConfigError: there is none.
    """
    files = sorted(path for path in folder.rglob("*") if path.is_file())[:limit] if folder.is_dir() else []
    if not files:
        raise ConfigError("--records", str(folder), "a folder that holds record files")
    return files


def records_of_folder(files: Sequence[Path], warn: Warn) -> Iterator[Record]:
    """Records as `dflash-online` writes them (wire format v1)."""
    for path in files:
        try:
            yield decode_record(path.read_bytes())
        except (OSError, WireError) as error:
            warn(f"{path}: left out: {error}")


def take_prompts(place: str, limit: int) -> list[PromptItem]:
    """The first prompts of a source.

    Raises:
        PromptError: the source cannot be opened, or has no prompt.
    """
    items = [item for item, _ in zip(open_prompts(place), range(limit), strict=False)]
    if not items:
        raise PromptError(place, None, "no prompt in it")
    return items


def records_in_process(
    prompts: Sequence[PromptItem],
    target: Path,
    layer_ids: Sequence[int],
    max_new_tokens: int,
    warn: Warn,
    *,
    dtype: torch.dtype = torch.float32,
) -> Iterator[Record]:
    """The target loaded here, in `dtype`, answers the prompts greedily."""
    model = InProcessTarget.from_folder(target, layer_ids, dtype=dtype)
    tokenizer = load_tokenizer(str(target))
    for item in prompts:
        try:
            ids, spans = render_item(tokenizer, item)
        except PromptError as error:
            warn(f"left out: {error}")
            continue
        yield model.capture(ids, record_id=item.origin, max_new_tokens=max_new_tokens, loss_spans=spans)


def records_of_server(
    prompts: Sequence[PromptItem], target: Path, url: str, max_new_tokens: int, warn: Warn
) -> Iterator[Record]:
    """A running server answers the prompts greedily, one after the other."""
    tokenizer = load_tokenizer(str(target))
    with asyncio.Runner() as runner:
        client = TargetClient(url)
        try:
            for item in prompts:
                try:
                    ids, spans = render_item(tokenizer, item)
                    record = runner.run(_capture(client, item.origin, ids, spans, max_new_tokens))
                except (PromptError, TargetRefusedError, WireError) as error:
                    warn(f"left out: {item.origin}: {error}")
                    continue
                yield record
        finally:
            runner.run(client.aclose())


async def _capture(
    client: TargetClient, name: str, ids: list[int], spans: list[tuple[int, int]], max_new_tokens: int
) -> Record:
    request = CaptureRequest(
        mode="prefill" if spans else "generate",
        input_ids=tuple(ids),
        loss_spans=tuple(spans),
        record_id=name,
        source=RecordSource.CONVERSATION if spans else RecordSource.PROMPT,
        sampling_params={} if spans else {"temperature": 0.0, "max_new_tokens": max_new_tokens},
    )
    for _ in range(_MAX_BUSY_WAITS):
        try:
            return await client.capture(request)
        except TargetBusyError as busy:
            await asyncio.sleep(busy.retry_after_s)
    return await client.capture(request)
