"""One entry of a benchmark's list of policies: a mode, and its number of draft nodes where it has one.

    `tree:16` --PolicyEntry.parse--> PolicyEntry(mode="tree", num_nodes=16) --> PUT /dflash/policy

How many nodes a mode takes at most is the server's to say. Raises ConfigError. Knows no network.
"""

from __future__ import annotations

from dataclasses import dataclass

from dflash_online.errors import ConfigError
from dflash_online.tree.policy import PolicyMode

CURRENT_POLICY = "current"
"""The policy that the server has: what it was when the benchmark started."""
OFF_POLICY = PolicyMode.OFF.value
"""Plain decoding: what a speedup is measured against."""
MODES = (*(mode.value for mode in PolicyMode), CURRENT_POLICY)
_MODES_WITHOUT_NODES = (OFF_POLICY, CURRENT_POLICY)


@dataclass(frozen=True, slots=True)
class PolicyEntry:
    """One policy to measure."""

    text: str
    """As it was given: names the pass in reports."""
    mode: str
    num_nodes: int | None
    """Draft nodes per verify step; None: the benchmark's own number, else the server's."""

    @classmethod
    def parse(cls, text: str) -> PolicyEntry:
        """Read `mode` or `mode:num_nodes`.

        Raises:
            ConfigError: no such mode, no whole number >= 1, or a number where the mode takes none.
        """
        mode, colon, number = text.partition(":")
        if mode not in MODES:
            raise ConfigError("policy", text, f"one of {', '.join(MODES)}, with :NODES where drafts are made")
        if not colon:
            return cls(text, mode, None)
        if mode in _MODES_WITHOUT_NODES:
            raise ConfigError("policy", text, f"{mode!r} without a number of nodes")
        if not (number.isascii() and number.isdigit() and int(number) >= 1):
            raise ConfigError("policy", text, f"{mode}:NODES with a whole number >= 1")
        return cls(text, mode, int(number))

    def nodes_or(self, default: int | None) -> int | None:
        """The number to send: its own, else the default; None for a mode that takes none."""
        if self.mode in _MODES_WITHOUT_NODES:
            return None
        return default if self.num_nodes is None else self.num_nodes
