"""One attempt of a user's agent: its deadline, its calls, what became of it. Shared by all kinds of agents."""

from __future__ import annotations

import asyncio
import inspect
import json
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import CancelledError, Executor
from dataclasses import dataclass, field
from typing import Any

from schemas.errors import AgentError, MoltflowError, WorkerError
from schemas.recipe import AgentConfig
from schemas.types import Status
from stages.agents.contract import Result

GRACE_SECONDS = 0.5
MAX_CLOSE_SECONDS = 30.0
"""How long a rollout that is over waits for its environment to close."""
MAX_ERROR_CHARACTERS = 2000
MAX_REWARD = 1e30
"""Sums and differences of rewards must fit float32, in which they are trained."""


@dataclass(kw_only=True)
class Attempt:
    """What became of one rollout."""

    seed: int
    status: Status = Status.OK
    error: str | None = None
    reward: float | None = None
    score: float | None = None
    reward_components: dict[str, float] = field(default_factory=dict)
    info: dict[str, Any] = field(default_factory=dict)
    started_at: float = field(default_factory=time.time)
    seconds: float = 0.0


async def run_attempt(
    attempt: Attempt,
    make_agent: Callable[..., Any],
    play: Callable[[Any], Awaitable[None]],
    config: AgentConfig,
    threads: Executor,
) -> None:
    """Make an agent, let it play, close it, and record how that ended; only a dead engine raises (WorkerError).

    The agent's exceptions, a missing reward and the deadline become the attempt's status, never reward 0.
    """
    start = time.perf_counter()
    agent: Any = None
    deadline = asyncio.timeout(config.timeout_seconds)
    try:
        async with deadline:
            agent = await call_user(threads, make_agent)
            await play(agent)
        if attempt.status.trainable and attempt.reward is None:
            attempt.status, attempt.error = Status.NO_REWARD, "the rollout ended and no step returned a reward"
    except WorkerError:
        raise
    except Exception as failure:  # whatever ended it is this rollout's recorded outcome
        attempt.status, attempt.error = _outcome(failure, deadline, config)
    finally:
        if agent is not None:
            await _close(agent, attempt, threads, config)
        attempt.seconds = time.perf_counter() - start
    if not attempt.status.trainable:
        attempt.reward = attempt.score = None


def _outcome(failure: Exception, deadline: asyncio.Timeout, config: AgentConfig) -> tuple[Status, str]:
    if isinstance(failure, TimeoutError) and deadline.expired():
        return Status.TIMEOUT, f"no end within {config.timeout_seconds:g} s"
    if isinstance(failure, MoltflowError) and not isinstance(failure, AgentError):
        return Status.INFRASTRUCTURE_ERROR, _describe(failure)
    return Status.AGENT_ERROR, _describe(failure)


def _describe(failure: BaseException) -> str:
    """The error as text that can be stored, whatever user code put into it."""
    try:
        message = str(failure)
    except Exception:
        message = "(its message cannot be read)"
    own = isinstance(failure, MoltflowError)
    text = message if own else f"{type(failure).__name__}: {message}"
    return text[:MAX_ERROR_CHARACTERS].encode("utf-8", "replace").decode()


def add_result(attempt: Attempt, result: Any) -> None:
    if not isinstance(result, Result):
        raise AgentError(f"the agent returned {type(result).__name__}; allowed: stages.agents.Result")
    if result.reward is not None:
        attempt.reward = (attempt.reward or 0.0) + float(result.reward)
    attempt.score = float(result.score) if result.score is not None else attempt.reward
    for name, value in (("reward", attempt.reward), ("score", attempt.score)):
        if value is not None and not abs(value) <= MAX_REWARD:
            raise AgentError(
                f"the agent made the {name} {value}; allowed: numbers up to {MAX_REWARD:g} in size, None for none"
            )
    if result.images:
        raise AgentError(f"the agent returned {len(result.images)} images; allowed: none, as the model reads text only")
    attempt.reward_components = {str(name): float(value) for name, value in result.reward_components.items()}
    attempt.info = json.loads(json.dumps(dict(result.info), default=str))


async def _close(agent: Any, attempt: Attempt, threads: Executor, config: AgentConfig) -> None:
    try:
        async with asyncio.timeout(min(MAX_CLOSE_SECONDS, config.timeout_seconds)):
            await call_user(threads, agent.close)
    except Exception as failure:  # the rollout is over: it keeps its outcome and tells what went wrong
        attempt.info["close_error"] = _describe(failure)


async def call_user(threads: Executor, method: Callable[..., Any], *arguments: Any) -> Any:
    """Await an async method; run a plain one in a thread, where it may block.

    User code has a task or thread of its own. What it raises to end a task, a loop or a process ends only the rollout.
    """
    loop = asyncio.get_running_loop()
    if inspect.iscoroutinefunction(method):
        result = method(*arguments)
    else:
        result = await _left_behind_if_cancelled(loop.run_in_executor(threads, _in_thread, method, arguments))
    if inspect.isawaitable(result):
        result = await _left_behind_if_cancelled(loop.create_task(_in_task(result)))
    return result


async def _left_behind_if_cancelled(running: asyncio.Future[Any]) -> Any:
    """The deadline holds for code that catches its cancellation, too; others get a moment to clean up."""
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if task is None or not task.cancelling():
            raise AgentError("the environment cancelled its own task") from None
        running.cancel()
        await asyncio.wait((running,), timeout=GRACE_SECONDS)
        raise


async def _in_task(awaitable: Awaitable[Any]) -> Any:
    try:
        return await awaitable
    except (SystemExit, KeyboardInterrupt) as end:
        raise AgentError(_describe(end)) from end


def _in_thread(method: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    try:
        return method(*arguments)
    except BaseException as failure:
        if isinstance(failure, Exception) and not isinstance(failure, StopIteration | CancelledError):
            raise
        raise AgentError(_describe(failure)) from failure  # a future cannot carry the others
