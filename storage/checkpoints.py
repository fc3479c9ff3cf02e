"""Checkpoint folders of a run: complete only with their marker, which is written last and atomically."""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass

from storage.runs import RunFolder, write_atomically

MARKER = "COMPLETE.json"


@dataclass(frozen=True)
class CheckpointState:
    """What a checkpoint remembers beside weights, optimizer, schedule and random states.

    `step` batches had been trained; the versions are those of the run's tables. The data cursor is not here: it
    follows from the ledger.
    """

    step: int
    table_versions: dict[str, int]


class Checkpoints:
    """`folder(step)` is where the ranks write; `complete` makes it count; `newest` is what a resume starts from."""

    def __init__(self, run: RunFolder, keep: int) -> None:
        self._run = run
        self._keep = keep

    def folder(self, step: int) -> str:
        return f"{self._run.path}/checkpoints/batch-{step:06d}"

    def begin(self, step: int) -> str:
        """An empty folder for the ranks to write to; whatever an interrupted attempt left there is removed."""
        folder = self.folder(step)
        self._remove(folder)
        self._run.fs.makedirs(folder)
        return folder

    def complete(self, state: CheckpointState) -> None:
        """Write the marker, then remove complete checkpoints beyond the newest `keep`."""
        marker = f"{self.folder(state.step)}/{MARKER}"
        write_atomically(self._run.fs, marker, json.dumps(asdict(state)))
        for step in self.steps()[: -self._keep]:
            self._remove(self.folder(step))

    def _remove(self, folder: str) -> None:
        """The marker goes first: what is left if this is interrupted does not count."""
        if self._run.fs.exists(f"{folder}/{MARKER}"):
            self._run.fs.rm_file(f"{folder}/{MARKER}")
        if self._run.fs.exists(folder):
            self._run.fs.rm(folder, recursive=True)

    def steps(self) -> list[int]:
        """Steps of the complete checkpoints, ascending."""
        root = f"{self._run.path}/checkpoints"
        if not self._run.fs.exists(root):
            return []
        names = [entry.rstrip("/").rsplit("/", 1)[-1] for entry in self._run.fs.ls(root, detail=False)]
        steps = [int(found[1]) for name in names if (found := re.fullmatch(r"batch-(\d+)", name))]
        return sorted(step for step in steps if self._run.fs.exists(f"{self.folder(step)}/{MARKER}"))

    def newest(self) -> CheckpointState | None:
        steps = self.steps()
        if not steps:
            return None
        return CheckpointState(**json.loads(self._run.fs.cat_file(f"{self.folder(steps[-1])}/{MARKER}")))
