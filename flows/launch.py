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

from flows.inputs import check_inputs
from schemas.recipe import RLRecipe, SFTRecipe
from stages.workers.guard import Guard, start_guard

QUIET = {
    "PREFECT_LOGGING_LEVEL": "ERROR",
    "PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL": "CRITICAL",  # the command reports an error once; the API has them all
    "PREFECT_SERVER_LOGGING_LEVEL": "ERROR",
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "DO_NOT_TRACK": "1",
    "TRANSFORMERS_VERBOSITY": "error",
    "TQDM_DISABLE": "1",
}

CHECKOUT_HOME = Path(".moltflow/prefect")
"""Prefect's folder where `make setup` created its database; elsewhere Prefect's own settings count."""


def prepare_process() -> None:
    """Quiet libraries unless the user's environment says otherwise, and bytecode for children."""
    for name, value in QUIET.items():
        os.environ.setdefault(name, value)
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    warnings.filterwarnings("ignore", message="lance is not fork-safe")  # Ray starts its processes by exec
    for name in ("torchao", "torch.utils._pytree"):
        logging.getLogger(name).setLevel(logging.ERROR)
    if CHECKOUT_HOME.is_dir():
        os.environ.setdefault("PREFECT_HOME", str(CHECKOUT_HOME.resolve()))
    if home := os.environ.get("PREFECT_HOME"):
        Path(home).mkdir(parents=True, exist_ok=True)


def run_recipes(recipes: Sequence[RLRecipe | SFTRecipe]) -> list[dict[str, Any]]:
    """Run the recipes' flows one after another; nothing of them is left behind, whatever happens."""
    prepare_process()
    check_inputs(recipes[0])  # before anything is started
    atexit.register(_close, start_guard())  # at exit, after the temporary server is stopped there
    from flows.server import start_server

    server = start_server()
    flows = [_flow(recipe) for recipe in recipes]  # imports that take as long as the server does
    if server:
        server.wait()
    try:
        return [_run(flow, recipe) for flow, recipe in zip(flows, recipes, strict=True)]
    except asyncio.CancelledError:  # by Ctrl-C or SIGTERM: everything is closed by now
        raise KeyboardInterrupt from None


def _close(guard: Guard) -> None:
    for line in guard.close():
        print(f"moltflow: {line}", file=sys.stderr)


def _flow(recipe: RLRecipe | SFTRecipe) -> Any:
    if isinstance(recipe, RLRecipe):
        from flows.train_rl import train_rl

        return train_rl
    from flows.train_sft import train_sft

    return train_sft


def _run(flow: Any, recipe: RLRecipe | SFTRecipe) -> dict[str, Any]:
    started_at = time.time()
    result: dict[str, Any] = asyncio.run(flow(recipe))
    return result | {"started_at": started_at}
