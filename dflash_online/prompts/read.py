"""Prompt sources: files, dataset folders and the built-in set, as one stream of prompts.

    file | dataset folder | stdlib-docstrings --open_prompts--> PromptSource --> PromptItem ...

A broken line is counted, named and skipped (`source.skipped`); the stream goes on. A source that cannot
be opened at all raises PromptError. JSON and JSON lines may be packed with gzip. Each iteration reads from
the start again, so memory stays bounded by one line (JSON and parquet: one file or one batch). Knows
nothing of tokens.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import IO

from dflash_online.errors import PromptError
from dflash_online.prompts.docstrings import docstring_prompts
from dflash_online.prompts.item import Message, PromptItem, parse_row, user_prompt

__all__ = ["STDLIB_DOCSTRINGS", "Message", "PromptItem", "PromptSource", "open_prompts", "split_prompts"]

STDLIB_DOCSTRINGS = "stdlib-docstrings"
"""Name of the built-in source: prompts made from the docstrings of Python's standard library."""

MAX_LINE_BYTES = 16 << 20
MAX_NAMED_SKIPS = 100
"""Broken lines kept by name; all are counted."""

_READABLE = (".jsonl", ".json", ".jsonl.gz", ".json.gz", ".parquet")


@dataclass(frozen=True, slots=True)
class Row:
    """What stands at one line, counted from 1."""

    source: str
    line: int
    value: object  # bytes when still to be decoded from JSON, a PromptItem when already read


class PromptSource:
    """A source that can be read again and again. After an iteration `skipped` tells what was left out."""

    def __init__(self, name: str, read_rows: Callable[[], Iterator[Row]]) -> None:
        self.name = name
        self.skipped: list[PromptError] = []
        self.num_skipped = 0
        self._read_rows = read_rows

    def __iter__(self) -> Iterator[PromptItem]:
        self.skipped, self.num_skipped = [], 0
        for row in self._read_rows():
            try:
                yield _to_item(row)
            except PromptError as error:
                self.num_skipped += 1
                if len(self.skipped) < MAX_NAMED_SKIPS:
                    self.skipped.append(error)


def open_prompts(place: str | Path) -> PromptSource:
    """A source by path or by name.

    Args:
        place: `stdlib-docstrings`, a `.jsonl`, `.json` (either also with `.gz`) or `.parquet` file, a folder
            saved by the `datasets` library, or a folder of such files.

    Raises:
        PromptError: there is no such file, or its kind is not known.
    """
    if str(place) == STDLIB_DOCSTRINGS:
        return PromptSource(STDLIB_DOCSTRINGS, _docstring_rows)
    path = Path(place).expanduser()
    if path.is_dir():
        return PromptSource(str(path), _folder_reader(path))
    if not path.is_file():
        raise PromptError(str(place), None, f"no such file or folder (built-in source: {STDLIB_DOCSTRINGS})")
    return PromptSource(str(path), _file_reader(path))


def split_prompts(
    items: Iterable[PromptItem], held_out_share: float, seed: int
) -> tuple[list[PromptItem], list[PromptItem]]:
    """Split into (train, held out). Equal prompts always land on the same side.

    Each prompt's side depends on its content and the seed alone, so that adding prompts moves no other.

    Raises:
        PromptError: the share is not within 0..1.
    """
    if not 0.0 <= held_out_share <= 1.0:
        raise PromptError("split", None, f"held_out_share must be in 0..1, got {held_out_share!r}")
    train: list[PromptItem] = []
    held_out: list[PromptItem] = []
    for item in items:
        digest = hashlib.blake2b(f"{seed}\n{item.content_key}".encode(), digest_size=8).digest()
        fraction = int.from_bytes(digest, "little") / 2**64
        (held_out if fraction < held_out_share else train).append(item)
    return train, held_out


def _to_item(row: Row) -> PromptItem:
    value = row.value
    if isinstance(value, PromptItem):
        return value
    if isinstance(value, bytes):
        if len(value) >= MAX_LINE_BYTES:
            raise PromptError(row.source, row.line, f"a line must be shorter than {MAX_LINE_BYTES} bytes")
        try:
            value = json.loads(value)
        except ValueError as error:  # both JSONDecodeError and UnicodeDecodeError
            raise PromptError(row.source, row.line, f"not JSON: {error}") from error
    return parse_row(value, source=row.source, line=row.line)


def _docstring_rows() -> Iterator[Row]:
    for number, prompt in enumerate(docstring_prompts(), start=1):
        yield Row(STDLIB_DOCSTRINGS, number, user_prompt(prompt, f"{STDLIB_DOCSTRINGS}:{number}"))


def _file_reader(path: Path) -> Callable[[], Iterator[Row]]:
    readers = {".jsonl": _jsonl_rows, ".json": _json_rows, ".parquet": _parquet_rows}
    if not path.name.endswith(_READABLE):
        raise PromptError(str(path), None, f"the file name must end in {', '.join(_READABLE)}")
    reader = readers[Path(path.name.removesuffix(".gz")).suffix]
    return lambda: _unpacking(path, reader)


def _unpacking(path: Path, reader: Callable[[Path], Iterator[Row]]) -> Iterator[Row]:
    try:
        yield from reader(path)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise PromptError(str(path), None, f"not readable as gzip: {error}") from error


def _open(path: Path) -> gzip.GzipFile | IO[bytes]:
    return gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb")


def _folder_reader(path: Path) -> Callable[[], Iterator[Row]]:
    if (path / "dataset_dict.json").is_file() or (path / "state.json").is_file():
        return lambda: _saved_dataset_rows(path)
    files = sorted(file for file in path.rglob("*") if file.name.endswith(_READABLE) and file.is_file())
    if not files:
        raise PromptError(str(path), None, f"the folder holds no file ending in {', '.join(_READABLE)}")
    return lambda: chain.from_iterable(_file_reader(file)() for file in files)


def _jsonl_rows(path: Path) -> Iterator[Row]:
    with _open(path) as file:
        line = 0
        while part := file.readline(MAX_LINE_BYTES):
            line += 1
            if len(part) == MAX_LINE_BYTES:
                while (rest := file.readline(MAX_LINE_BYTES)) and not rest.endswith(b"\n"):
                    pass
            if part.strip():
                yield Row(str(path), line, part)


def _json_rows(path: Path) -> Iterator[Row]:
    with _open(path) as file:
        content = file.read()
    try:
        rows = json.loads(content)
    except ValueError as error:
        if _is_object(content.lstrip().partition(b"\n")[0]):
            yield from _jsonl_rows(path)  # many publish JSON lines under this name
            return
        raise PromptError(str(path), None, f"not JSON: {error}") from error
    if not isinstance(rows, list):
        raise PromptError(str(path), None, f"must hold a list of rows, got {type(rows).__name__}")
    for number, row in enumerate(rows, start=1):
        yield Row(str(path), number, row)


def _is_object(line: bytes) -> bool:
    try:
        return isinstance(json.loads(line), dict)
    except ValueError:
        return False


def _parquet_rows(path: Path) -> Iterator[Row]:
    try:
        from pyarrow import ArrowException, parquet  # type: ignore[import-untyped]
    except ImportError as error:
        raise PromptError(str(path), None, "parquet needs the package datasets (with pyarrow)") from error
    number = 0
    try:
        for batch in parquet.ParquetFile(path).iter_batches(batch_size=256):
            for row in batch.to_pylist():
                number += 1
                yield Row(str(path), number, row)
    except ArrowException as error:
        raise PromptError(str(path), number + 1, f"not readable as parquet: {error}") from error


def _saved_dataset_rows(path: Path) -> Iterator[Row]:
    try:
        import datasets
    except ImportError as error:
        raise PromptError(str(path), None, "a saved dataset needs the package datasets") from error
    try:
        loaded = datasets.load_from_disk(str(path))
    except (OSError, ValueError) as error:
        raise PromptError(str(path), None, f"not readable as a saved dataset: {error}") from error
    if isinstance(loaded, datasets.DatasetDict):
        if "train" not in loaded and len(loaded) != 1:
            raise PromptError(str(path), None, f"name a split: open {path}/SPLIT, one of {', '.join(loaded)}")
        loaded = loaded["train"] if "train" in loaded else next(iter(loaded.values()))
    for number, row in enumerate(loaded, start=1):
        yield Row(str(path), number, row)
