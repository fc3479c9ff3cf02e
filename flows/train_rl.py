"""Asynchronous RL, whole: rollout streams beside the batches; each batch is filtered, weighed, trained and published.

    prompts -> rollout (streaming) -> traces -> filtering -> score -> advantage -> train_step -> refit
                 ^                                                                                |
                 +----------------------- window: places, policy version ------------------------+

`step` counts trained batches and is also the policy version: every batch ends with one refit.
"""

from __future__ import annotations

from typing import Any

from prefect import flow

from flows import tasks
from flows.runs import Run, open_run
from schemas.recipe import RLRecipe
from stages.score import score
from stages.window import Window


@flow(name="train-rl", persist_result=False)
async def train_rl(recipe: RLRecipe) -> dict[str, Any]:
    async with open_run(recipe) as run:
        step = await tasks.restore(run.trainer, run.checkpoints, run.batches, run.monitor.end_step)
        await tasks.refit(run.trainer, run.engines, step, recipe.refit)
        ledger = run.ledger()
        window = Window(recipe.window, recipe.rollout.batch_groups, version=step)
        for group in run.traces.groups():
            if group.sequence in ledger.finished:
                window.resume(group)
        evaluations = {step: await evaluate(run, step)}

        stream = tasks.rollout(run.prompt_stream(ledger), window, run.agents, run.traces, run.outcomes)
        async with tasks.streaming(stream, window):
            run.monitor.start_loop(step)
            while step < recipe.max_steps:
                groups = await tasks.filtering(
                    window, run.outcomes, step, recipe.rollout, recipe.window, recipe.filtering
                )
                if groups is None:
                    break
                batch = await tasks.advantage(score(groups), step, recipe.advantage)
                await tasks.train_step(batch, run.batches, run.trainer, recipe.trainer)
                step += 1
                await tasks.refit(run.trainer, run.engines, step, recipe.refit)
                window.publish(step)
                run.monitor.end_step(step, window.metrics())
                if step % recipe.checkpoint.every == 0 or step == recipe.max_steps:
                    await tasks.checkpoint(step, run.trainer, run.checkpoints, run.tables)
                if is_due(recipe, step):
                    evaluations[step] = await evaluate(run, step)

        await run.trainer.export(recipe.export or f"{run.folder.path}/exports/final")
        return run.summary(step, evaluations)


def is_due(recipe: RLRecipe, step: int) -> bool:
    every = recipe.evaluate.every if recipe.evaluate else None
    return step == recipe.max_steps or (every is not None and step % every == 0)


async def evaluate(run: Run, step: int) -> float | None:
    config = run.recipe.evaluate
    if config is None:
        return None
    sampling = config.sampling or run.recipe.rollout.sampling
    result = await tasks.evaluate(
        run.held_out, run.agents, run.evaluations, step, sampling, config.samples_per_prompt, run.recipe.run.seed
    )
    return float(result.metrics["evaluate/reward_mean"])
