"""What the tests with the real stack share: a tiny model, recipes, one cluster per session, a look at what is left."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import pytest_asyncio

from recipes.quickstart.prepare import build
from schemas.recipe import RLRecipe
from stages.workers.cluster import Cluster, open_cluster
from storage.runs import RunFolder

REPOSITORY = Path(__file__).parents[2]
STACK = ("ray::", "raylet", "gcs_server", "VLLM::", "prefect.server", "ray/_private", "ray/dashboard")


@pytest.fixture(scope="session")
def build_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("build")
    build(folder)
    return folder


@pytest.fixture(scope="session")
def make_recipe(build_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., RLRecipe]:
    """A small recipe whose parts can be replaced by name."""
    root = tmp_path_factory.mktemp("runs")

    def make(name: str, **parts: Any) -> RLRecipe:
        values: dict[str, Any] = {
            "kind": "rl",
            "run": {"name": name, "root": str(root)},
            "model": {"path": str(build_folder / "model"), "dtype": "float32"},
            "prompts": {"path": str(build_folder / "prompts.jsonl")},
            "agent": {"entry": "tests.real.environments:Parity", "max_context_tokens": 64},
            "rollout": {"batch_groups": 8, "group_size": 4, "sampling": {"max_tokens": 8}},
            "trainer": {"optimizer": {"type": "adamw", "lr": 1e-3}},
            "engine": {"kv_cache_bytes": 64 << 20},
            "checkpoint": {"every": 2},
            "max_steps": 5,
            "device": "cpu",
        }
        return RLRecipe.model_validate(values | parts)

    return make


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def cluster(make_recipe: Callable[..., RLRecipe]) -> AsyncIterator[tuple[Cluster, RLRecipe, RunFolder]]:
    """Engine, trainer and agent host, opened once for all tests that drive stages directly."""
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    recipe = make_recipe("shared", max_steps=100)
    folder = RunFolder.start(recipe)
    async with open_cluster(recipe, folder.uri, folder.attempt) as opened:
        yield opened, recipe, folder
    folder.close()


@pytest.fixture
def nothing_left() -> Iterator[None]:
    """Fails when processes of the stack or files in shared memory are there after the test that were not before."""
    before, files = _stack(), set(os.listdir("/dev/shm"))
    yield
    gone, left = psutil.wait_procs([p for p in psutil.process_iter() if p.pid in _stack() - before], timeout=20)
    assert not left, f"left running: {[p.cmdline() for p in left]} (ended late: {len(gone)})"
    assert set(os.listdir("/dev/shm")) <= files


def _stack() -> set[int]:
    found = set()
    for process in psutil.process_iter(["cmdline"]):
        command = " ".join(process.info["cmdline"] or [])
        if any(name in command for name in STACK):
            found.add(process.pid)
    return found


def moltflow(*arguments: str, **options: Any) -> subprocess.Popen[str]:
    """The command as a user starts it, in the repository's root."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    return subprocess.Popen(
        [sys.executable, "-m", "flows.cli", *arguments],
        cwd=REPOSITORY,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **options,
    )
