"""A rank does not outlive its launcher.

    service --pipe--> keeper --> torchrun --> [ rank: dies with torchrun ]

The keeper ends the whole tree when the service dies; this covers the one gap it cannot see in time, a
killed torchrun whose ranks live in sessions of their own. Called before torch is imported. Linux only.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """Ask the kernel to kill this process when its parent ends; end at once when it has ended already."""
    parent = os.getppid()
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        sys.exit(1)
