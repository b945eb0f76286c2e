"""Settings of the service: flags first, then environment, then defaults. Read once, by the entry point.

    python -m trainer --port 8900        DFLASH_TRAINER_PORT=8900 python -m trainer

An unknown DFLASH_TRAINER_ variable or a malformed value stops the start. What concerns one run is in
`trainer.runs.config`.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from dflash_online.errors import ConfigError

PREFIX = "DFLASH_TRAINER_"


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """How the service runs."""

    host: str = "127.0.0.1"
    """Address to listen on. The API has no login: beyond loopback, put it behind something that has."""
    port: int = 8900
    runs_dir: Path = Path("runs")
    """Store, records and checkpoints of all runs."""
    log_level: str = "info"
    max_restarts: int = 5
    """Restarts of a lost worker within `restart_window_s`; then the run has failed."""
    restart_window_s: float = 600.0
    silence_s: float = 1800.0
    """Seconds without a word after which a worker is taken for hung, and killed."""
    stop_s: float = 120.0
    """Seconds that a worker has to end after POST /train/stop, gate included; then it is killed."""
    shutdown_s: float = 15.0
    """Seconds that it has for its last checkpoint when the service itself ends."""

    def __post_init__(self) -> None:
        _require("port", self.port, "in 0..65535", 0 <= self.port <= 65535)
        levels = ("debug", "info", "warning", "error")
        _require("log_level", self.log_level, f"one of {', '.join(levels)}", self.log_level in levels)
        _require("max_restarts", self.max_restarts, "at least 0", self.max_restarts >= 0)
        for name in ("restart_window_s", "silence_s", "stop_s", "shutdown_s"):
            _require(name, getattr(self, name), "above 0", getattr(self, name) > 0)


def _require(field: str, value: object, bound: str, holds: bool) -> None:
    if not holds:
        raise ConfigError(field, value, bound)


_HELP = {
    "host": "address to listen on",
    "port": "port to listen on; 0 takes a free one",
    "runs_dir": "folder of all runs",
    "log_level": "debug, info, warning or error",
    "max_restarts": "restarts of a lost worker within the window",
    "restart_window_s": "seconds over which restarts are counted",
    "silence_s": "seconds without a word after which a worker is killed",
    "stop_s": "seconds that a worker has to end after a stop",
    "shutdown_s": "seconds that it has when the service ends",
}
_SHORT_FLAGS = {"runs_dir": ("--runs",)}
_PARSERS: dict[str, Callable[[str], Any]] = {"str": str, "int": int, "float": float, "Path": Path}


def read_settings(arguments: Sequence[str], environment: Mapping[str, str]) -> Settings:
    """Settings of this process.

    Raises:
        ConfigError: an unknown variable, a malformed or an out-of-bounds value.
        SystemExit: an unknown flag, or `--help`.
    """
    defaults = Settings()
    parser = argparse.ArgumentParser(
        prog="python -m trainer",
        description="The DFlash Online trainer service.",
        epilog=f"Each flag is also a variable, such as {PREFIX}PORT. Example: python -m trainer --port 8900",
    )
    for field in fields(Settings):
        flags = ["--" + field.name.replace("_", "-"), *_SHORT_FLAGS.get(field.name, ())]
        parser.add_argument(
            *flags,
            dest=field.name,
            metavar=field.name.upper(),
            help=f"{_HELP[field.name]} ({getattr(defaults, field.name)})",
        )
    given = {name: value for name, value in vars(parser.parse_args(arguments)).items() if value is not None}
    names = {field.name: str(field.type) for field in fields(Settings)}
    from_environment = _from_environment(environment, names)
    values: dict[str, Any] = {}
    for name, text in {**from_environment, **given}.items():
        try:
            values[name] = _PARSERS[names[name]](text)
        except ValueError as exc:
            raise ConfigError(name, text, f"a value of type {names[name]}") from exc
    return Settings(**values)


def _from_environment(environment: Mapping[str, str], names: Mapping[str, str]) -> dict[str, str]:
    found = {}
    for variable, text in environment.items():
        if variable.startswith(PREFIX):
            name = variable.removeprefix(PREFIX).lower()
            if name not in names:
                raise ConfigError(variable, text, f"one of {', '.join(PREFIX + n.upper() for n in names)}")
            found[name] = text
    return found
