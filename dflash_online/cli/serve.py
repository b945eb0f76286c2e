"""A service in the foreground: what `target serve` and `trainer serve` share."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from typing import NoReturn

import typer

from dflash_online.errors import ProcessError
from dflash_online.process.keeper import keep
from dflash_online.process.port import require_free_port

# Longer than the services give their own children, so that these still end in order.
_GRACE_S = 60.0


def serve_module(module: str, name: str, arguments: Sequence[str], host: str, port: int) -> NoReturn:
    """Run `python -m module` until it ends or is told to; exit with its code.

    Raises:
        PortInUseError: something listens on the port.
        ProcessError: the module is not installed here.
    """
    # A service's host need not have the other service's packages, so it is looked for, never imported.
    if importlib.util.find_spec(module) is None:
        raise ProcessError(name, f"the package {module} is not installed on this machine")
    require_free_port(name, host, port)
    raise typer.Exit(keep([sys.executable, "-m", module, *arguments], grace_s=_GRACE_S))
