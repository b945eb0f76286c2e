"""The pages in docs/ name every field of a run config, every metric, every route and every drop reason."""

from __future__ import annotations

import re
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import get_type_hints

from trainer.app import create_app
from trainer.runs.config import RunConfig
from trainer.settings import Settings
from trainer.store.record_rows import DropReason

ROOT = Path(__file__).parents[3]


def field_names(kind: type, prefix: str = "") -> list[str]:
    names: list[str] = []
    for name, hint in get_type_hints(kind).items():
        if name == "__pydantic_config__":
            continue
        names += field_names(hint, f"{name}.") if is_dataclass(hint) else [prefix + name]
    return names


def test_run_config_page_names_every_field() -> None:
    page = (ROOT / "docs/run-config.md").read_text()
    missing = [name for name in field_names(RunConfig) if f"`{name}`" not in page]
    assert missing == []
    assert len(field_names(RunConfig)) > 40


def test_trainer_page_names_every_metric_reason_flag_and_route() -> None:
    page = (ROOT / "docs/trainer-api.md").read_text()
    source = "".join(
        (ROOT / "trainer/observe" / name).read_text() for name in ("prometheus.py", "instruments.py")
    )
    series = re.findall(r'_(?:gauge|counter)\(\s*"(\w+)"', source)
    series += re.findall(r'_PREFIX \+ "(\w+)"', source) + re.findall(r'"dflash_trainer_(\w+)"', source)
    assert len(series) > 25
    assert [name for name in series if f"`{name}" not in page] == []
    assert [reason.value for reason in DropReason if f"`{reason.value}`" not in page] == []
    assert [f.name for f in fields(Settings) if f"--{f.name.replace('_', '-')}" not in page] == []
    routes = [path for path in create_app(Settings()).openapi()["paths"] if not path.startswith("/train")]
    assert [path for path in routes if path.replace("{run_id}", "{id}") not in page] == []
