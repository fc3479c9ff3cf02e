"""Asynchronous RL, whole: rollout streams beside the batches; each batch is filtered, weighed, trained and published.

    prompts -> rollout (streaming) -> traces -> filtering -> score -> advantage -> train_step -> refit
                 ^                                                                                |
                 +----------------------- window: places, policy version ------------------------+

`step` is the policy version: every batch ends with one refit. So batch `step` is trained from version `step` to the
next, and an evaluation at `step` is one of that version.
"""

from __future__ import annotations

from typing import Any

from prefect import flow

from flows import tasks
from flows.runs import open_run
from schemas.recipe import RLRecipe
from stages.window import Window


@flow(name="train-rl", persist_result=False)
async def train_rl(recipe: RLRecipe) -> dict[str, Any]:
    async with open_run(recipe) as run:
        step = await tasks.restore(run.trainer, run.checkpoints, run.batches, run.tables, run.monitor.write_replayed)
        await tasks.refit(run.trainer, run.engines, step, recipe.refit)
        ledger = run.ledger()
        window = Window(recipe.window, recipe.rollout.batch_groups, version=step)
        for group in run.finished_groups(ledger):
            window.resume(group)
        await run.evaluate(step)

        stream = tasks.rollout(run.prompt_stream(ledger), window, run.agents, run.traces, run.outcomes)
        async with tasks.streaming(stream, window):
            run.monitor.start_loop(step)
            while step < recipe.max_steps:
                groups = await tasks.filtering(
                    window, run.outcomes, step, recipe.rollout, recipe.window, recipe.filtering
                )
                if groups is None:
                    break
                if recipe.reference is not None:
                    await tasks.score(groups, step, run.trainer, run.scores)
                batch = await tasks.advantage(groups, step, recipe)
                await tasks.train_step(batch, run.batches, run.trainer, recipe)
                await tasks.refit(run.trainer, run.engines, step + 1, recipe.refit)
                window.publish(step + 1)
                run.monitor.end_step(step, window.metrics())
                step += 1
                if step % recipe.checkpoint.every == 0 or step == recipe.max_steps:
                    await tasks.checkpoint(step, run.trainer, run.checkpoints, run.tables)
                if run.evaluates_at(step):
                    await run.evaluate(step)

        await run.trainer.export(recipe.export or f"{run.folder.path}/exports/final")
        return run.summary(step)
