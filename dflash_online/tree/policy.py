"""Which tree a server grows for each request. A value that may change between two steps.

Source of the modes: architecture, decision 2 (one worker for off, chain and tree).
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from dflash_online.errors import ConfigError


class PolicyMode(enum.StrEnum):
    """How drafts are used."""

    OFF = "off"
    """Root only: no drafter pass, one token per step."""
    CHAIN = "chain"
    """One path of `num_nodes` drafts."""
    TREE = "tree"
    """The best tree of `num_nodes` draft nodes (`dflash_online.tree.build`)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Policy:
    """One server-wide policy. Example: `Policy(mode=PolicyMode.CHAIN, num_nodes=7, max_batch_size=4)`."""

    mode: PolicyMode
    num_nodes: int
    """Draft nodes verified per step; the root is not counted. 0 with mode off."""
    max_batch_size: int | None = None
    """Largest running batch that still drafts; above it steps are root only. None: no limit. With many
    requests a verify pass becomes compute-bound and drafting loses."""
    probe_interval: int | None = None
    """Above `max_batch_size`, every n-th step drafts all the same, so that acceptance stays measured where
    drafting does not pay. None: never."""

    def __post_init__(self) -> None:
        if self.mode is PolicyMode.OFF and self.num_nodes != 0:
            raise ConfigError("num_nodes", self.num_nodes, "0 when mode is off")
        if self.mode is not PolicyMode.OFF and self.num_nodes < 1:
            raise ConfigError("num_nodes", self.num_nodes, f">= 1 when mode is {self.mode.value}")
        if self.max_batch_size is not None and self.max_batch_size < 1:
            raise ConfigError("max_batch_size", self.max_batch_size, ">= 1, or null for no limit")
        if self.probe_interval is not None and self.probe_interval < 2:
            raise ConfigError("probe_interval", self.probe_interval, ">= 2 steps, or null for never")

    def num_drafts(self, batch_size: int, step: int) -> int:
        """Draft nodes per request at this batch size.

        Args:
            step: number of the decode step, equal on all ranks; decides which steps are probes.
        """
        if self.mode is PolicyMode.OFF:
            return 0
        is_too_large = self.max_batch_size is not None and batch_size > self.max_batch_size
        is_probe = self.probe_interval is not None and step % self.probe_interval == 0
        return 0 if is_too_large and not is_probe else self.num_nodes
