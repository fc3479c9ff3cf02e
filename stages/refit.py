"""Refit: make the trained weights live in the engines, under requests that are in flight.

pause (requests freeze) -> transfer -> label with the version -> resume (they go on under the new weights)
"""

from __future__ import annotations

import asyncio
import time

from schemas.protocols import Engines, Trainer
from schemas.recipe import RefitConfig
from schemas.types import StepResult


async def refit(trainer: Trainer, engines: Engines, version: int, config: RefitConfig) -> StepResult:
    """After this, every token is sampled by the trainer's current weights and labelled `version`."""
    start = time.perf_counter()
    names, dtypes, shapes = await trainer.weight_names()
    await engines.pause(clear_cache=config.cache == "recompute")
    await asyncio.gather(engines.receive(names, dtypes, shapes), trainer.send_weights(config.timeout_seconds))
    await engines.resume(version)
    return StepResult({"refit/seconds": time.perf_counter() - start, "refit/version": float(version)})
