"""Checkpoint and restore: what makes a killed run go on as if nothing had happened.

Restore loads the newest complete checkpoint and trains the stored batches after it again, in their order.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

from schemas.errors import StoreError
from schemas.protocols import Trainer
from storage.batches import Batches
from storage.checkpoints import Checkpoints, CheckpointState
from storage.tables import Table

Report = Callable[[int, Mapping[str, float]], None]


async def checkpoint(step: int, trainer: Trainer, checkpoints: Checkpoints, tables: Mapping[str, Table]) -> None:
    """Save the state after `step` batches; complete only once every rank has written."""
    folder = await asyncio.to_thread(checkpoints.begin, step)
    await trainer.save(folder)
    for table in tables.values():
        await asyncio.to_thread(table.compact)
    versions = {name: table.version for name, table in tables.items()}
    await asyncio.to_thread(checkpoints.complete, CheckpointState(step, versions))


async def restore(
    trainer: Trainer, checkpoints: Checkpoints, batches: Batches, tables: Mapping[str, Table], report: Report
) -> int:
    """Bring the trainer to the last committed batch; returns how many batches it has trained.

    `report` gets each step and its metrics, which are those of the first time: the weights are the same. What was
    trained again is saved, so that it is not needed once more.

    Raises StoreError when a batch between the checkpoint and the last one is missing.
    """
    step = saved = await load_checkpoint(trainer, checkpoints)
    for stored in await asyncio.to_thread(batches.steps, step):
        if stored != step:
            raise StoreError(f"batch {step} is missing from the store, but batch {stored} is there")
        report(step, await trainer.train(step))
        step += 1
    if step > saved:
        await checkpoint(step, trainer, checkpoints, tables)
    return step


async def load_checkpoint(trainer: Trainer, checkpoints: Checkpoints) -> int:
    """Load the newest complete checkpoint, if there is one; returns how many steps it has trained."""
    state = await asyncio.to_thread(checkpoints.newest)
    if state is None:
        return 0
    await trainer.load(checkpoints.folder(state.step))
    return state.step
