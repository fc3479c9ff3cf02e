"""Stage function -> Prefect task, one line each, with the part of the critical path that it counts to.

No stage is retried by Prefect: a batch that failed halfway is trained again by resuming the run, never by repeating one
stage of it. Every wait inside a stage has a timeout of its own that names the peer.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any, Protocol

from prefect import task
from prefect.cache_policies import NO_CACHE

import stages.advantage
import stages.checkpoint
import stages.evaluate
import stages.filtering
import stages.refit
import stages.rollout
import stages.score
import stages.train_step
from flows.monitor import current_monitor


class _Call:
    """Arguments of a stage as one plain object: Prefect walks through dataclasses and models, but not through this."""

    def __init__(self, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
        self.arguments = arguments
        self.options = options


def staged(stage: Callable[..., Any], part: str | None, name: str | None = None) -> Callable[..., Awaitable[Any]]:
    """The stage as a Prefect task whose time counts to `part` and whose metrics go to the line of the batch; with None
    it is beside the critical path, and the flow writes its metrics."""

    @task(name=name or stage.__name__, cache_policy=NO_CACHE, persist_result=False)
    async def run(call: _Call) -> Any:
        monitor = current_monitor()
        with monitor.measure(part):
            result = stage(*call.arguments, **call.options)
            if inspect.isawaitable(result):
                result = await result
        if part is not None:
            monitor.record(getattr(result, "metrics", {}), part)
        return result

    async def call_stage(*arguments: Any, **options: Any) -> Any:
        return await run(_Call(arguments, options))

    return call_stage


filtering = staged(stages.filtering.filtering, "waiting")
score = staged(stages.score.score, "score")
advantage = staged(stages.advantage.advantage, "score")
train_step = staged(stages.train_step.train_step, "train")
sft_step = staged(stages.train_step.sft_step, "train")
refit = staged(stages.refit.refit, "refit")
checkpoint = staged(stages.checkpoint.checkpoint, "store")
restore = staged(stages.checkpoint.restore, "store")
load_checkpoint = staged(stages.checkpoint.load_checkpoint, "store")
evaluate = staged(stages.evaluate.evaluate, None)


@task(name="rollout", cache_policy=NO_CACHE, persist_result=False)
async def _rollout_task(call: _Call) -> None:
    await stages.rollout.rollout(*call.arguments, **call.options)


async def rollout(*arguments: Any) -> None:
    """The streaming task: one for the whole flow, beside the batches and outside their accounting."""
    await _rollout_task(_Call(arguments, {}))


class Closable(Protocol):
    def close(self) -> None: ...


@asynccontextmanager
async def streaming(stream: Coroutine[Any, Any, None], window: Closable) -> AsyncIterator[None]:
    """Run the stream beside the body. Whichever ends first closes the window, which ends the other; an error of the
    stream is raised here."""
    running = asyncio.create_task(stream)
    running.add_done_callback(lambda _: window.close())
    try:
        yield
    finally:
        window.close()
        await running
