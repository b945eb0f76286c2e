"""Command line `dflash-online`."""

from dflash_online.cli.app import main

__all__ = ["main"]
