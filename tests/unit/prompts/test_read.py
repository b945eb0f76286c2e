"""Sources are read line by line; broken lines are counted, named and skipped."""

from __future__ import annotations

import gzip
import json
import os
from pathlib import Path

import pytest

from dflash_online.errors import PromptError
from dflash_online.prompts.item import user_prompt
from dflash_online.prompts.read import MAX_NAMED_SKIPS, STDLIB_DOCSTRINGS, open_prompts, split_prompts


def contents(place: str | Path) -> list[str]:
    return [item.messages[0].content for item in open_prompts(place) if item.messages is not None]


def write_rows(path: Path, *prompts: str) -> Path:
    path.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts))
    return path


def test_broken_lines_are_counted_named_and_skipped(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    good, cut, not_utf8 = b'{"prompt": "one"}', b'{"prompt": ', b'{"prompt": "\xff"}'
    path.write_bytes(b"\n".join([good, cut, b"", not_utf8, b'{"nothing": 1}', good]))
    source = open_prompts(path)
    assert [item.origin for item in source] == [f"{path}:1", f"{path}:6"]
    assert source.num_skipped == 3
    assert [error.line for error in source.skipped] == [2, 4, 5]
    assert str(source.skipped[0]).startswith(f"prompts {path}:2: not JSON: ")


def test_a_second_reading_gives_the_same_and_counts_anew(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text('{"prompt": "one"}\nbroken\n')
    source = open_prompts(path)
    assert list(source) == list(source)
    assert source.num_skipped == 1


def test_all_broken_lines_are_counted_but_only_the_first_are_kept(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text("broken\n" * (MAX_NAMED_SKIPS + 7))
    source = open_prompts(path)
    assert list(source) == []
    assert (source.num_skipped, len(source.skipped)) == (MAX_NAMED_SKIPS + 7, MAX_NAMED_SKIPS)


def test_a_folder_is_read_file_by_file_in_order_of_names(tmp_path: Path) -> None:
    write_rows(tmp_path / "b.jsonl", "three")
    write_rows(tmp_path / "a.jsonl", "one", "two")
    (tmp_path / "notes.txt").write_text("ignored")
    assert contents(tmp_path) == ["one", "two", "three"]


def test_a_json_list_is_read(tmp_path: Path) -> None:
    (tmp_path / "p.json").write_text('[{"prompt": "one"}, {"prompt": "two"}]')
    assert contents(tmp_path / "p.json") == ["one", "two"]


def test_json_lines_under_the_name_of_json_are_read(tmp_path: Path) -> None:
    assert contents(write_rows(tmp_path / "p.json", "one", "two")) == ["one", "two"]
    (tmp_path / "broken.json").write_text('[{"prompt": "one"},')
    with pytest.raises(PromptError, match="not JSON"):
        contents(tmp_path / "broken.json")


def test_gzip_is_unpacked_and_folders_hold_it_too(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(b'{"prompt": "one"}\n{"prompt": "two"}\n'))
    (tmp_path / "b.json.gz").write_bytes(
        gzip.compress(b'[{"instruction": "three", "input": "", "output": "x"}]')
    )
    assert contents(tmp_path / "a.jsonl.gz") == ["one", "two"]
    assert contents(tmp_path) == ["one", "two", "three"]


@pytest.mark.parametrize("content", [b"no gzip", gzip.compress(b'{"prompt": "one"}\n' * 9)[:-12]])
def test_what_is_no_whole_gzip_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "p.jsonl.gz").write_bytes(content)
    with pytest.raises(PromptError, match="not readable as gzip"):
        contents(tmp_path / "p.jsonl.gz")


def test_parquet_and_saved_datasets_are_read(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    rows = datasets.Dataset.from_list([{"prompt": "one"}, {"prompt": "two"}])
    rows.to_parquet(tmp_path / "p.parquet")
    rows.save_to_disk(tmp_path / "saved")
    datasets.DatasetDict(train=rows).save_to_disk(tmp_path / "splits")
    for place in ("p.parquet", "saved", "splits"):
        assert contents(tmp_path / place) == ["one", "two"], place


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("missing.jsonl", "no such file or folder"),
        ("p.csv", "the file name must end in"),
        ("empty", "holds no file"),
    ],
)
def test_a_source_that_cannot_be_opened_is_refused(tmp_path: Path, name: str, reason: str) -> None:
    (tmp_path / "p.csv").write_text("a,b\n")
    (tmp_path / "empty").mkdir()
    with pytest.raises(PromptError, match=reason):
        open_prompts(tmp_path / name)


def test_the_split_is_stable_under_reordering_and_growth() -> None:
    items = [user_prompt(f"prompt {i}", "x") for i in range(400)]
    train, held_out = split_prompts(items, 0.1, seed=1)
    assert len(train) + len(held_out) == 400
    assert 20 <= len(held_out) <= 60
    _, again = split_prompts([*reversed(items), user_prompt("a new one", "y")], 0.1, seed=1)
    assert {item.content_key for item in held_out} <= {item.content_key for item in again}
    _, otherwise = split_prompts(items, 0.1, seed=2)
    assert {item.content_key for item in held_out} != {item.content_key for item in otherwise}


def test_equal_prompts_of_two_files_land_on_the_same_side() -> None:
    twins = [user_prompt(f"prompt {i % 50}", f"file{i // 50}") for i in range(100)]
    train, held_out = split_prompts(twins, 0.3, seed=0)
    assert held_out
    assert not {item.content_key for item in train} & {item.content_key for item in held_out}


def test_the_share_of_a_split_is_bounded() -> None:
    with pytest.raises(PromptError, match=r"held_out_share must be in 0\.\.1, got 1\.5"):
        split_prompts([], 1.5, seed=0)


def test_the_builtin_source_gives_about_840_distinct_prompts() -> None:
    prompts = contents(STDLIB_DOCSTRINGS)
    assert 600 <= len(prompts) <= 1000
    assert len(set(prompts)) == len(prompts)
    assert contents(STDLIB_DOCSTRINGS) == prompts


@pytest.mark.skipif(
    "DFLASH_DATA" not in os.environ, reason="DFLASH_DATA names no folder of published prompts"
)
def test_published_prompt_files_are_read_whole() -> None:
    rows = {"humaneval": 164, "gsm8k_train": 7473, "gsm8k_test": 1319, "mt_bench": 80}
    for name, num_rows in rows.items():
        source = open_prompts(Path(os.environ["DFLASH_DATA"]) / f"{name}.jsonl")
        items = list(source)
        assert (len(items), source.num_skipped) == (num_rows, 0), name
        assert {len(item.follow_ups) for item in items} == {1 if name == "mt_bench" else 0}, name
