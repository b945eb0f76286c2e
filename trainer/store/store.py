"""All tables of the runs folder in one object, and where each run keeps its files.

<runs>/runs.sqlite
<runs>/<run>/buffer/*.rec         train records (wire format v1)
<runs>/<run>/held_out/*.rec       held-out records
<runs>/<run>/checkpoints/v000004/ drafter folder, loadable by SGLang
<runs>/<run>/state/v000004/       optimizer, random state, data cursor of the same moment
<runs>/<run>/worker.log
"""

from __future__ import annotations

from pathlib import Path

from trainer.store.checkpoint_rows import CheckpointTable
from trainer.store.database import Database
from trainer.store.event_rows import EventTable
from trainer.store.record_rows import AddedPromptTable, RecordTable
from trainer.store.run_rows import RunTable
from trainer.store.step_rows import StepTable


class RunFolder:
    """Paths of one run."""

    def __init__(self, runs_dir: Path, run_id: str) -> None:
        self.path = runs_dir / run_id
        self.buffer = self.path / "buffer"
        self.held_out = self.path / "held_out"
        self.checkpoints = self.path / "checkpoints"
        self.state = self.path / "state"
        self.worker_log = self.path / "worker.log"

    def create(self) -> None:
        """Make all folders."""
        for folder in (self.buffer, self.held_out, self.checkpoints, self.state):
            folder.mkdir(parents=True, exist_ok=True)

    def checkpoint(self, number: int) -> Path:
        """Drafter folder of one version."""
        return self.checkpoints / f"v{number:06d}"

    def optimizer_state(self, number: int) -> Path:
        """The sibling folder with the optimizer's state."""
        return self.state / f"v{number:06d}"


class Store:
    """One process's view of the runs folder."""

    def __init__(self, runs_dir: Path) -> None:
        """Open the store.

        Raises:
            StoreError: the SQLite file cannot be used.
        """
        self.runs_dir = runs_dir
        self.db = Database(runs_dir / "runs.sqlite")
        self.runs = RunTable(self.db)
        self.events = EventTable(self.db)
        self.steps = StepTable(self.db)
        self.records = RecordTable(self.db)
        self.added_prompts = AddedPromptTable(self.db)
        self.checkpoints = CheckpointTable(self.db)

    def folder(self, run_id: str) -> RunFolder:
        """Paths of one run."""
        return RunFolder(self.runs_dir, run_id)

    def close(self) -> None:
        """Close the connection."""
        self.db.close()
