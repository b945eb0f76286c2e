"""What a check says: nothing, or the first difference with its likely cause."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from dflash_online.doctor.causes import CAUSES, Cause


@dataclass(frozen=True, slots=True)
class Finding:
    """A difference. `found` against `bound`, at `where`."""

    check: str
    where: str
    found: str
    bound: str
    cause: Cause

    @classmethod
    def of(cls, check: str, where: str, found: object, bound: object, cause: int) -> Finding:
        """By the cause's number."""
        return cls(check, where, str(found), str(bound), CAUSES[cause])


@dataclass(slots=True)
class Diagnosis:
    """Checks in the order in which they ran."""

    passed: list[tuple[str, str]] = field(default_factory=list)
    """Name of the check, and what was compared."""
    skipped: list[tuple[str, str]] = field(default_factory=list)
    """Name of the check, and why it could not be made."""
    finding: Finding | None = None

    def to_json(self) -> dict[str, Any]:
        """As JSON values."""
        return {
            "is_healthy": self.finding is None,
            "finding": None if self.finding is None else asdict(self.finding),
            "passed": [{"check": name, "compared": what} for name, what in self.passed],
            "skipped": [{"check": name, "reason": why} for name, why in self.skipped],
        }
