"""Opening a run: its folder, its tables, everything that computes. Closed on every way out."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

from flows import tasks
from flows.inputs import Inputs, read_inputs
from flows.monitor import Monitor
from schemas.recipe import RLRecipe, SFTRecipe
from schemas.types import GroupTask, StoredGroup
from stages.prompts import prompt_stream
from stages.workers.cluster import Cluster, open_cluster, open_trainer
from stages.workers.trainer_group import TrainerGroup
from storage.batches import Batches, Outcomes
from storage.checkpoints import Checkpoints
from storage.ledger import Ledger, read_ledger
from storage.runs import RunFolder
from storage.scores import Scores
from storage.tables import Table
from storage.traces import Traces


class Run:
    """An open RL run: what its flow hands to the stages."""

    def __init__(self, recipe: RLRecipe, folder: RunFolder, inputs: Inputs) -> None:
        self.recipe = recipe
        self.folder = folder
        self.held_out = inputs.held_out
        self._prompts = inputs.prompts
        self.traces = Traces(folder.uri)
        self.evaluations = Traces(folder.uri, "evaluations")
        self.batches = Batches(folder.uri, folder.attempt)
        self.outcomes = Outcomes(folder.uri, folder.attempt)
        self.scores = Scores(folder.uri)
        self.checkpoints = Checkpoints(folder, recipe.checkpoint.keep)
        self.monitor = Monitor(folder, recipe.max_steps)
        self._evaluations: dict[int, float] = {}

    def attach(self, cluster: Cluster) -> None:
        self.engines = cluster.engines
        self.agents = cluster.agents
        self.trainer = cluster.trainer

    @property
    def tables(self) -> dict[str, Table]:
        return {
            "traces": self.traces.table,
            "batches": self.batches.table,
            "outcomes": self.outcomes.table,
            "scores": self.scores.table,
            "evaluations": self.evaluations.table,
        }

    def ledger(self) -> Ledger:
        return read_ledger(self.traces, self.batches, self.outcomes)

    def prompt_stream(self, ledger: Ledger) -> Iterator[GroupTask]:
        """What the ledger says was lost, then what was never dispatched."""
        return prompt_stream(
            self._prompts,
            self.recipe.rollout,
            shuffle=self.recipe.prompts.shuffle,
            seed=self.recipe.run.seed,
            start=ledger.dispatched,
            again=ledger.lost,
            attempt=self.folder.attempt,
        )

    def finished_groups(self, ledger: Ledger) -> list[StoredGroup]:
        """Groups that an earlier attempt finished and did not train."""
        wanted = ", ".join(map(str, sorted(ledger.finished)))
        return self.traces.groups(f"sequence IN ({wanted})") if wanted else []

    def evaluates_at(self, step: int) -> bool:
        every = self.recipe.evaluate.every if self.recipe.evaluate else None
        return step == self.recipe.max_steps or (every is not None and step % every == 0)

    async def evaluate(self, step: int) -> None:
        """Evaluate policy version `step` as the recipe says, and write what came out to the line of that step."""
        config = self.recipe.evaluate
        if config is None:
            return
        sampling = config.sampling or self.recipe.rollout.sampling
        result = await tasks.evaluate(
            self.held_out,
            self.agents,
            self.evaluations,
            step,
            sampling,
            config.samples_per_prompt,
            self.recipe.run.seed,
        )
        self.monitor.write(step, result.metrics)
        self._evaluations[step] = result.metrics["evaluate/reward_mean"]

    def summary(self, step: int) -> dict[str, Any]:
        """What the flow returns, as plain values."""
        return {
            "run": self.folder.uri,
            "step": step,
            "evaluations": self._evaluations,
            "steps_trained": self.monitor.steps,
            "steps_without_update": self.monitor.steps_without_update,
            "first_step_at": self.monitor.first_step_at,
            "seconds_per_step": self.monitor.seconds_per_step(),
            "shares": self.monitor.shares(),
            "ledger": self.ledger().summary(),
        }


@asynccontextmanager
async def open_run(recipe: RLRecipe) -> AsyncIterator[Run]:
    """Check what the recipe names, open or resume its run folder, start everything."""
    inputs = read_inputs(recipe)
    folder = RunFolder.start(recipe)
    try:
        run = Run(recipe, folder, inputs)
        with _ending_on_signals(), run.monitor.showing():
            async with open_cluster(recipe, folder.uri, folder.attempt) as cluster:
                run.attach(cluster)
                with _ending_on_signals():
                    yield run
    finally:
        folder.close()


class SFTRun:
    """An open SFT run."""

    def __init__(self, recipe: SFTRecipe, folder: RunFolder, trainer: TrainerGroup, monitor: Monitor) -> None:
        self.recipe = recipe
        self.folder = folder
        self.trainer = trainer
        self.monitor = monitor
        self.checkpoints = Checkpoints(folder, recipe.checkpoint.keep)


@asynccontextmanager
async def open_sft_run(recipe: SFTRecipe) -> AsyncIterator[SFTRun]:
    """The same for supervised training, which needs the training ranks alone."""
    read_inputs(recipe)
    folder = RunFolder.start(recipe)
    monitor = Monitor(folder, recipe.max_steps)
    try:
        with _ending_on_signals(), monitor.showing():
            async with open_trainer(recipe, folder.uri) as trainer:
                with _ending_on_signals():
                    yield SFTRun(recipe, folder, trainer, monitor)
    finally:
        folder.close()


@contextmanager
def _ending_on_signals() -> Iterator[None]:
    """SIGTERM and Ctrl-C cancel the flow, so that everything is closed in order; a second one ends the process at once.

    Installed before the start-up and again after it: Ray and Prefect bring handlers of their own."""
    loop, flow = asyncio.get_running_loop(), asyncio.current_task()
    assert flow is not None
    signals = (signal.SIGTERM, signal.SIGINT)
    for number in signals:
        loop.add_signal_handler(number, flow.cancel)
    try:
        yield
    finally:
        for number in signals:
            loop.remove_signal_handler(number)
