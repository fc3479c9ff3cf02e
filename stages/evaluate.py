"""Evaluate: held-out prompts under the weights that are live now. Traces are stored, in the table `evaluations`."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from statistics import fmean

from schemas.errors import RolloutsFailed
from schemas.protocols import Agents
from schemas.recipe import SamplingConfig
from schemas.types import GroupTask, Prompt, StepResult, StoredGroup
from storage.traces import Traces


async def evaluate(
    prompts: Sequence[Prompt],
    agents: Agents,
    evaluations: Traces,
    step: int,
    sampling: SamplingConfig,
    samples_per_prompt: int,
    seed: int,
) -> StepResult:
    """Mean reward over prompts, each the mean over its samples that succeeded; failed ones are counted apart.

    All samples come from one policy version: nothing is trained or refitted while this runs.
    """
    tasks = [
        GroupTask(index, f"eval-{step:06d}-{prompt.index:06d}", prompt, samples_per_prompt, sampling, seed)
        for index, prompt in enumerate(prompts)
    ]
    await agents.submit(evaluations.name, tasks)
    groups: list[StoredGroup] = []
    while len(groups) < len(tasks):
        groups += await asyncio.to_thread(evaluations.commit, await agents.collect(evaluations.name))
    rewards = [fmean(group.rewards().values()) for group in groups if group.rewards()]
    if not rewards:
        error = next((segment.error for group in groups for segment in group.segments if segment.error), "")
        raise RolloutsFailed(f"evaluation at step {step}: no rollout of {len(groups)} prompts succeeded: {error}")
    failed = sum(group.num_failed for group in groups)
    return StepResult(
        {
            "evaluate/reward_mean": fmean(rewards),
            "evaluate/prompts": float(len(rewards)),
            "evaluate/failed_rollouts": float(failed),
        }
    )
