"""Running a flow from a command: what the process needs before Prefect, Ray or torch is imported."""

from __future__ import annotations

import asyncio
import atexit
import logging
import os
import sys
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from schemas.recipe import RLRecipe, SFTRecipe
from stages.agents.contract import load_agent
from stages.prompts import read_prompts
from stages.workers.guard import Guard, start_guard
from storage.runs import check_model

QUIET = {
    "PREFECT_LOGGING_LEVEL": "ERROR",
    "PREFECT_SERVER_LOGGING_LEVEL": "ERROR",
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS": "120",
    "DO_NOT_TRACK": "1",
    "TRANSFORMERS_VERBOSITY": "error",
    "TQDM_DISABLE": "1",
}

CHECKOUT_HOME = Path(".moltflow/prefect")
"""Prefect's folder where `make setup` created its database; elsewhere Prefect's own settings count."""


def prepare_process() -> None:
    """Quiet libraries unless the user's environment says otherwise, importable recipes, and bytecode for children."""
    for name, value in QUIET.items():
        os.environ.setdefault(name, value)
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    warnings.filterwarnings("ignore", message="lance is not fork-safe")  # Ray starts its processes by exec
    for name in ("torchao", "torch.utils._pytree"):
        logging.getLogger(name).setLevel(logging.ERROR)
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    if CHECKOUT_HOME.is_dir():
        os.environ.setdefault("PREFECT_HOME", str(CHECKOUT_HOME.resolve()))
    if home := os.environ.get("PREFECT_HOME"):
        Path(home).mkdir(parents=True, exist_ok=True)


def run_recipes(recipes: Sequence[RLRecipe | SFTRecipe]) -> list[dict[str, Any]]:
    """Run the recipes' flows one after another; nothing of them is left behind, whatever happens."""
    prepare_process()
    atexit.register(_close, start_guard())  # at exit, after Prefect has stopped its temporary server there
    try:
        return [_run(recipe) for recipe in recipes]
    except asyncio.CancelledError:  # by Ctrl-C or SIGTERM: everything is closed by now
        raise KeyboardInterrupt from None


def check_files(recipe: RLRecipe | SFTRecipe) -> None:
    """Raise RecipeError for what the recipe names and is not there, before anything slow is started."""
    check_model(recipe.model.path)
    if isinstance(recipe, RLRecipe):
        load_agent(recipe.agent.entry)
        for path in (recipe.prompts.path, recipe.evaluate.path if recipe.evaluate else None):
            if path is not None:
                read_prompts(recipe.prompts, path)


def _close(guard: Guard) -> None:
    for line in guard.close():
        print(f"moltflow: {line}", file=sys.stderr)


def _run(recipe: RLRecipe | SFTRecipe) -> dict[str, Any]:
    started_at = time.time()
    check_files(recipe)
    if isinstance(recipe, RLRecipe):
        from flows.train_rl import train_rl

        result = asyncio.run(train_rl(recipe))
    else:
        from flows.train_sft import train_sft

        result = asyncio.run(train_sft(recipe))
    return result | {"started_at": started_at}
