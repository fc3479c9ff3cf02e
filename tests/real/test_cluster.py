"""Stages against the real engine, trainer and agent hosts of one shared cluster."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from typing import Any

import psutil
import pytest

from schemas.errors import RolloutsFailed, WorkerError
from schemas.recipe import AgentConfig, RLRecipe
from schemas.types import Filtered
from stages.advantage import advantage
from stages.filtering import filtering
from stages.prompts import prompt_stream, read_prompts
from stages.rollout import rollout
from stages.train_step import train_step
from stages.window import Window
from stages.workers.agent_pool import AgentPool
from stages.workers.cluster import Cluster, open_trainer
from storage.batches import Batches, Outcomes
from storage.runs import RunFolder
from storage.traces import Traces

pytestmark = [pytest.mark.real, pytest.mark.timeout(600), pytest.mark.asyncio(loop_scope="session")]
Opened = tuple[Cluster, RLRecipe, RunFolder]


@pytest.mark.parametrize(
    ("how", "start", "options", "status", "says"),
    [
        ("raises", 1000, {}, "agent_error", "this environment is broken"),
        ("no_reward", 2000, {}, "no_reward", "no step returned a reward"),
        ("hangs", 3000, {"timeout_seconds": 1.0}, "timeout", "no end within 1 s"),
    ],
)
async def test_when_every_group_fails_the_run_stops_with_the_reason(
    cluster: Opened, how: str, start: int, options: dict[str, Any], status: str, says: str
) -> None:
    opened, recipe, folder = cluster
    agent = AgentConfig(entry="tests.real.environments:Broken", args={"how": how}, max_context_tokens=64, **options)
    recipe = recipe.model_copy(
        update={"agent": agent, "rollout": recipe.rollout.model_copy(update={"max_failed_groups": 3})}
    )
    with pytest.raises(RolloutsFailed, match=f"3 groups .*{status}.*{says}"):
        await _first_batch(opened, recipe, folder, start)


async def test_an_environment_that_never_ends_is_truncated_and_trained(cluster: Opened) -> None:
    opened, recipe, folder = cluster
    agent = AgentConfig(
        entry="tests.real.environments:Broken", args={"how": "never_ends"}, max_context_tokens=64, max_turns=3
    )
    groups = await _first_batch(opened, recipe.model_copy(update={"agent": agent}), folder, 4000)
    assert {segment.status for group in groups for segment in group.segments} == {"truncated"}
    assert {segment.reward for group in groups for segment in group.segments} <= {1.0, 2.0, 3.0}


async def test_the_trainer_recomputes_each_turn_at_the_temperature_that_a_request_chose(cluster: Opened) -> None:
    opened, recipe, folder = cluster
    agent = AgentConfig(
        entry="tests.real.environments:TwoTemperatures", max_context_tokens=64, honor_request_sampling=True
    )
    groups = await _first_batch(opened, recipe.model_copy(update={"agent": agent}), folder, 6000)
    rows = Traces(folder.uri).tokens([segment.row for group in groups for segment in group.segments])
    chosen = {tuple(round(turn["temperature"], 4) for turn in row["turns"]) for row in rows}
    assert (0.5, 1.7) in chosen
    batch = advantage(Filtered(groups), 0, recipe)
    trained = await train_step(batch, Batches(folder.uri), opened.trainer, recipe)
    assert trained.metrics["train/trained_tokens"] > 0 and trained.metrics["mismatch/abs_max"] < 1e-4


async def _first_batch(opened: Cluster, recipe: RLRecipe, folder: RunFolder, start: int) -> Any:
    """Rollout and filtering with agents of their own on the shared engines; `start` is the first sequence."""
    traces, outcomes = Traces(folder.uri), Outcomes(folder.uri)
    agents = AgentPool(recipe, folder.uri, 0, opened.engines.actors)
    try:
        await agents.ready()
        window = Window(recipe.window, recipe.rollout.batch_groups)
        tasks = prompt_stream(read_prompts(recipe.prompts), recipe.rollout, shuffle=True, seed=0, start=start)
        stream = asyncio.create_task(rollout(tasks, window, agents, traces, outcomes))
        try:
            filtered = await filtering(window, outcomes, 0, recipe.rollout, recipe.window, recipe.filtering)
            assert filtered is not None
            return filtered.groups
        finally:
            window.close()
            await stream
    finally:
        agents.close()


async def test_a_trainer_rank_or_an_agent_host_that_is_killed_is_named_within_seconds(cluster: Opened) -> None:
    opened, recipe, folder = cluster
    agents = AgentPool(recipe, folder.uri, 0, opened.engines.actors)
    await agents.ready()
    waiting = asyncio.create_task(agents.collect("traces"))
    await asyncio.sleep(0)
    os.kill(await _pid(agents._hosts[0]), signal.SIGKILL)
    with pytest.raises(WorkerError, match="agent host0: its process died"):
        await asyncio.wait_for(waiting, timeout=30)
    agents.close()

    async with open_trainer(recipe, folder.uri) as trainer:
        os.kill(await _pid(trainer._actors[0]), signal.SIGKILL)
        with pytest.raises(WorkerError, match="trainer rank 0: its process died"):
            await asyncio.wait_for(trainer.train(0), timeout=30)


async def test_an_engine_that_is_killed_is_noticed_and_leaves_no_process(
    cluster: Opened, make_recipe: Callable[..., RLRecipe]
) -> None:
    """Last in this file: the shared engine is gone afterwards."""
    opened, recipe, folder = cluster
    traces, outcomes = Traces(folder.uri), Outcomes(folder.uri)
    window = Window(recipe.window, recipe.rollout.batch_groups)
    tasks = prompt_stream(read_prompts(recipe.prompts), recipe.rollout, shuffle=True, seed=1, start=5000)
    stream = asyncio.create_task(rollout(tasks, window, opened.agents, traces, outcomes))
    consumer = asyncio.create_task(_release_all(window))
    pid = await _pid(opened.engines.actors[0])
    children = psutil.Process(pid).children(recursive=True)
    assert children, "the engine core is a child of the engine actor"
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(WorkerError, match="engine"):
        await asyncio.wait_for(stream, timeout=30)
    window.close()
    await consumer
    _, alive = psutil.wait_procs(children, timeout=20)
    assert not alive


async def _release_all(window: Window) -> None:
    """Keeps the engine busy: every finished group gives its place back."""
    while (group := await window.take()) is not None:
        window.release(group)


async def _pid(actor: Any) -> int:
    def pid(_: Any) -> int:
        return os.getpid()

    return int(await actor.__ray_call__.remote(pid))
