"""Peak memory of every process of the demo, looked at once a second.

    Service.processes, the demo itself --PeakMemory--> {"target": MB, "target/sglang::scheduler": MB, ...}

A thread, because peaks also happen while the main thread waits. It only looks. Resident sizes: pages that two
processes share count in both.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Mapping
from pathlib import PurePath
from typing import Self

import psutil

from dflash_online.process.service import Service

_PERIOD_S = 1.0
_WORTH_NAMING_MB = 50.0


class PeakMemory:
    """A context manager: looks as long as it is open."""

    def __init__(self) -> None:
        self._services: dict[str, Service] = {}
        self._peaks_mb: dict[str, float] = {}
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="peak-memory", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *details: object) -> None:
        self._is_over.set()
        self._thread.join()

    def add(self, service: Service) -> None:
        """Look at this service from now on."""
        self._services = {**self._services, service.name: service}

    def peaks_mb(self) -> Mapping[str, float]:
        """Highest sum per service, and highest size per process that is worth naming."""
        return {name: round(peak, 1) for name, peak in sorted(self._peaks_mb.items())}

    def look(self) -> None:
        """Take one sample."""
        self._note("demo", psutil.Process().memory_info().rss / 2**20)
        for name, service in self._services.items():
            per_label: defaultdict[str, float] = defaultdict(float)
            for process in service.processes():
                try:
                    label, size_mb = process_label(process.cmdline()), process.memory_info().rss / 2**20
                except psutil.Error:
                    continue  # it ended meanwhile
                per_label[label] += size_mb
            self._note(name, sum(per_label.values()))
            for label, size_mb in per_label.items():
                if size_mb >= _WORTH_NAMING_MB:
                    self._note(f"{name}/{label}", size_mb)

    def _note(self, name: str, size_mb: float) -> None:
        self._peaks_mb[name] = max(self._peaks_mb.get(name, 0.0), size_mb)

    def _watch(self) -> None:
        while not self._is_over.wait(_PERIOD_S):
            self.look()


def process_label(command: list[str]) -> str:
    """A short name of a process: its title, its module, or its program."""
    if not command:
        return "unknown"
    if "-m" in command[:-1] and command[0].rpartition("/")[2].startswith("python"):
        return command[command.index("-m") + 1]
    if " " not in command[0] and "/" not in command[0]:
        return command[0]  # a title that the process gave itself, such as sglang::scheduler
    return PurePath(command[0].split()[0]).name
