"""What policy `auto` chooses among: off, a chain, and trees of a few sizes; and which batch sizes it joins.

    block size, largest tree --ladder--> (off, tree:4, chain, tree:8, ...) --> auto

Raises ConfigError.
"""

from __future__ import annotations

from dataclasses import dataclass

from dflash_online.errors import ConfigError
from dflash_online.tree.policy import PolicyMode

TREE_SIZES = (4, 8, 16, 32, 64)


@dataclass(frozen=True, slots=True)
class Choice:
    """One rung of the ladder. `Choice(PolicyMode.TREE, 16)` is named `tree:16`."""

    mode: PolicyMode
    num_nodes: int

    @property
    def name(self) -> str:
        """As acceptance counts name it."""
        return f"tree:{self.num_nodes}" if self.mode is PolicyMode.TREE else self.mode.value

    @property
    def width(self) -> int:
        """Nodes of the verify pass, root included."""
        return 1 + self.num_nodes

    def most_tokens(self, num_drafts: int) -> int:
        """Tokens of a step that accepts all it can."""
        return 1 + min(self.num_nodes, num_drafts)


def ladder(num_drafts: int, max_nodes: int) -> tuple[Choice, ...]:
    """off, a chain of `num_drafts`, and the trees of at most `max_nodes` nodes, in order of verify width.

    Raises:
        ConfigError: `num_drafts` is below 1, or `max_nodes` is negative.
    """
    if num_drafts < 1:
        raise ConfigError("num_drafts", num_drafts, ">= 1")
    if max_nodes < 0:
        raise ConfigError("max_nodes", max_nodes, ">= 0")
    trees = [Choice(PolicyMode.TREE, size) for size in TREE_SIZES if size <= max_nodes]
    rungs = [Choice(PolicyMode.OFF, 0), Choice(PolicyMode.CHAIN, num_drafts), *trees]
    return tuple(sorted(rungs, key=lambda choice: choice.num_nodes))


def bucket_of(batch_size: int) -> int:
    """The smallest power of two that is not below the batch size. Raises ConfigError below 1."""
    if batch_size < 1:
        raise ConfigError("batch_size", batch_size, ">= 1")
    return 1 << (batch_size - 1).bit_length()
