"""The run config that the demo sends, and the prompts that it keeps for itself."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dflash_online.demo.config import (
    EXAMPLE_CONFIG,
    DemoConfig,
    bench_prompts,
    fill_run_config,
    read_example,
)
from dflash_online.errors import ConfigError
from dflash_online.prompts.read import open_prompts, split_prompts


def test_only_the_target_is_filled_into_the_example(tmp_path: Path) -> None:
    example = read_example(EXAMPLE_CONFIG)
    filled = fill_run_config(example, target_url="http://127.0.0.1:1234", target_path=tmp_path)
    assert filled["target_urls"] == ["http://127.0.0.1:1234"]
    assert filled["target_path"] == str(tmp_path)
    changed = {key for key in filled if filled[key] != example.get(key)}
    assert changed == {"target_urls", "target_path"}


def test_bench_prompts_are_neither_trained_on_nor_gated_by() -> None:
    example = read_example(EXAMPLE_CONFIG)
    prompts = bench_prompts(example, DemoConfig().num_prompts)
    train, held_out = split_prompts(
        open_prompts(example["prompts"]), example["held_out_share"], example["seed"]
    )
    gate = held_out[: example["held_out_records"]]
    keys = {item.content_key for item in prompts}
    assert len(keys) == DemoConfig().num_prompts
    assert not keys & {item.content_key for item in [*train, *gate]}


def test_asking_for_more_held_out_prompts_than_there_are_is_refused() -> None:
    with pytest.raises(ConfigError, match="num_prompts must be at most"):
        bench_prompts(read_example(EXAMPLE_CONFIG), 10_000)


def test_a_missing_example_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="run config must be a readable JSON file"):
        read_example(tmp_path / "none.json")
    (tmp_path / "list.json").write_text(json.dumps([]))
    with pytest.raises(ConfigError, match="a JSON object"):
        read_example(tmp_path / "list.json")


@pytest.mark.parametrize("field", ["minutes", "num_prompts", "ready_timeout_s"])
def test_numbers_are_bounded(field: str) -> None:
    with pytest.raises(ConfigError, match=f"{field} must be"):
        DemoConfig(**{field: 0})
