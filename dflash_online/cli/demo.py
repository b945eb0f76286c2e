"""`dflash-online demo`: the whole loop on one machine with a real small model."""

from __future__ import annotations

EXAMPLE = "Example: dflash-online demo --minutes 10"


def demo() -> None:
    """Run the whole loop."""
