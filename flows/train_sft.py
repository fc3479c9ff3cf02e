"""Supervised fine-tuning: the same trainer and checkpoints as RL, fed with conversations instead of rollouts."""

from __future__ import annotations

from typing import Any

from prefect import flow

from flows import tasks
from flows.runs import open_sft_run
from schemas.recipe import SFTRecipe


@flow(name="train-sft", persist_result=False)
async def train_sft(recipe: SFTRecipe) -> dict[str, Any]:
    async with open_sft_run(recipe) as run:
        step = await tasks.load_checkpoint(run.trainer, run.checkpoints)
        run.monitor.start_loop(step)
        while step < recipe.max_steps:
            await tasks.sft_step(step, run.trainer)
            run.monitor.end_step(step, {})
            step += 1
            if step % recipe.checkpoint.every == 0 or step == recipe.max_steps:
                await tasks.checkpoint(step, run.trainer, run.checkpoints, {})
        exported = await run.trainer.export(recipe.export or f"{run.folder.path}/exports/final")
        return {"run": run.folder.uri, "step": step, "export": exported}
