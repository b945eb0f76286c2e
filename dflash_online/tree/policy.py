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
    AUTO = "auto"
    """Whichever of the others commits most tokens per second (`dflash_online.tree.auto`); trees of at most
    `num_nodes`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Policy:
    """One server-wide policy. Example: `Policy(mode=PolicyMode.CHAIN, num_nodes=7, max_batch_size=4)`."""

    mode: PolicyMode
    num_nodes: int
    """Draft nodes verified per step; the root is not counted. 0 with mode off; with mode auto
    the largest tree that may be tried, 0 for no trees."""
    max_batch_size: int | None = None
    """Largest running batch that still drafts; above it steps are root only. None: no limit. With many
    requests a verify pass becomes compute-bound and drafting loses."""
    probe_interval: int | None = None
    """Above `max_batch_size`, every n-th step drafts all the same, so that acceptance stays measured where
    drafting does not pay. None: never."""

    def __post_init__(self) -> None:
        if self.mode is PolicyMode.OFF and self.num_nodes != 0:
            raise ConfigError("num_nodes", self.num_nodes, "0 when mode is off")
        if self.mode in (PolicyMode.CHAIN, PolicyMode.TREE) and self.num_nodes < 1:
            raise ConfigError("num_nodes", self.num_nodes, f">= 1 when mode is {self.mode.value}")
        if self.num_nodes < 0:
            raise ConfigError("num_nodes", self.num_nodes, ">= 0")
        if self.max_batch_size is not None and self.max_batch_size < 1:
            raise ConfigError("max_batch_size", self.max_batch_size, ">= 1, or null for no limit")
        if self.probe_interval is not None and self.probe_interval < 2:
            raise ConfigError("probe_interval", self.probe_interval, ">= 2 steps, or null for never")

    def num_drafts(self, batch_size: int, step: int) -> int:
        """Draft nodes per request at this batch size; with mode auto at most."""
        return self.num_nodes if self.may_draft(batch_size, step) else 0

    def may_draft(self, batch_size: int, step: int) -> bool:
        """Whether a step of this batch size drafts.

        Args:
            step: number of the decode step, equal on all ranks; decides which steps are probes.
        """
        is_probe = self.probe_interval is not None and step % self.probe_interval == 0
        return self.mode is not PolicyMode.OFF and (not self.is_above_limit(batch_size) or is_probe)

    def is_above_limit(self, batch_size: int) -> bool:
        """Whether the batch is larger than `max_batch_size`."""
        return self.max_batch_size is not None and batch_size > self.max_batch_size
