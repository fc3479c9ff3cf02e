"""The framework-driven turn loop of an `Env`: sample, step, append, until the rollout ends. Token ids are never
re-rendered: the trajectory is the prompt, then sampled ids and rendered observations in turn."""

from __future__ import annotations

import asyncio
import inspect
import json
import time
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import CancelledError, Executor
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

from schemas.errors import AgentError, MoltflowError, WorkerError
from schemas.recipe import AgentConfig, SamplingConfig
from schemas.types import Generation, GroupTask, Status
from stages.agents.contract import Env, Result, as_messages
from stages.agents.rendering import ChatRenderer

GRACE_SECONDS = 0.5
MAX_CLOSE_SECONDS = 30.0
"""How long a rollout that is over waits for its environment to close."""
MAX_ERROR_CHARACTERS = 2000
MAX_REWARD = 1e30
"""Sums and differences of rewards must fit float32, in which they are trained."""

Generate = Callable[[list[int], SamplingConfig], Awaitable[Generation]]
"""(token_ids, sampling) -> what the engine sampled."""


@dataclass
class Rollout:
    """One attempt as it grows. `logprobs` are as many as `token_ids`, 0 where not sampled; `spans` as in the store."""

    messages: list[dict[str, Any]]
    seed: int
    status: Status = Status.OK
    error: str | None = None
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    spans: list[dict[str, int]] = field(default_factory=list)
    turns: list[dict[str, Any]] = field(default_factory=list)
    reward: float | None = None
    score: float | None = None
    reward_components: dict[str, float] = field(default_factory=dict)
    info: dict[str, Any] = field(default_factory=dict)
    started_at: float = field(default_factory=time.time)
    seconds: float = 0.0

    def append_context(self, token_ids: list[int]) -> None:
        self.token_ids += token_ids
        self.logprobs += [0.0] * len(token_ids)

    def append_turn(self, generation: Generation, sampling: SamplingConfig, seconds: float) -> None:
        start, count = len(self.token_ids), len(generation.token_ids)
        ends = [0, *(last for _, _, last in generation.versions)]
        if [first for _, first, _ in generation.versions] != ends[:-1] or ends != sorted(ends) or ends[-1] != count:
            raise MoltflowError(f"engine versions {generation.versions} do not cover its {count} tokens")
        if len(generation.logprobs) != count:
            raise MoltflowError(f"engine gave {count} tokens and {len(generation.logprobs)} log-probs")
        self.spans += [
            {"start": start + first, "end": start + last, "turn": len(self.turns), "version": version}
            for version, first, last in generation.versions
            if last > first
        ]
        self.token_ids += [int(token) for token in generation.token_ids]
        self.logprobs += [float(logprob) for logprob in generation.logprobs]
        self.turns.append(
            {
                "temperature": sampling.temperature,
                "top_p": sampling.top_p,
                "top_k": sampling.top_k,
                "max_tokens": sampling.max_tokens,
                "finish_reason": generation.finish_reason,
                "seconds": seconds,
            }
        )


async def run_env(
    make_env: Callable[..., Any],
    task: GroupTask,
    seed: int,
    generate: Generate,
    renderer: ChatRenderer,
    config: AgentConfig,
    threads: Executor,
) -> Rollout:
    """Run one rollout to its end and say how it ended; only a dead engine raises (WorkerError).

    The agent's exceptions, a missing reward and the deadline become the rollout's status, never reward 0.
    """
    rollout = Rollout(messages=list(task.prompt.messages), seed=seed)
    start = time.perf_counter()
    env: Env | None = None
    deadline = asyncio.timeout(config.timeout_seconds)
    try:
        async with deadline:
            env = await _call(threads, make_env)
            await _turns(env, task, rollout, generate, renderer, config, threads)
        if rollout.status.trainable and rollout.reward is None:
            rollout.status, rollout.error = Status.NO_REWARD, "the rollout ended and no step returned a reward"
    except WorkerError:
        raise
    except Exception as failure:  # whatever ended it is this rollout's recorded outcome
        rollout.status, rollout.error = _outcome(failure, deadline, config)
    finally:
        if env is not None:
            await _close(env, rollout, threads, config)
        rollout.seconds = time.perf_counter() - start
    if not rollout.status.trainable:
        rollout.reward = rollout.score = None
    return rollout


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


async def _turns(
    env: Env,
    task: GroupTask,
    rollout: Rollout,
    generate: Generate,
    renderer: ChatRenderer,
    config: AgentConfig,
    threads: Executor,
) -> None:
    label = deepcopy(task.prompt.label)  # the other rollouts of the group have the same
    started = await _call(
        threads, env.reset, {"observation": as_messages(rollout.messages), "label": label, "seed": rollout.seed}
    )
    if started is not None:
        if not isinstance(started, Mapping) or "observation" not in started:
            raise AgentError(f"reset returned {type(started).__name__}; allowed: None, or a mapping with `observation`")
        rollout.messages = as_messages(started["observation"])
    rollout.append_context(renderer.prompt(rollout.messages))
    if len(rollout.token_ids) >= config.max_context_tokens:
        rollout.status = Status.PROMPT_TOO_LONG
        rollout.error = f"prompt of {len(rollout.token_ids)} tokens; allowed: below {config.max_context_tokens}"
        return
    for turn in range(1, config.max_turns + 1):
        action = await _sample(rollout, task.sampling, generate, renderer, config)
        before, rollout.messages = rollout.messages, [*rollout.messages, {"role": "assistant", "content": action}]
        state = {
            "observation_text": _as_text(before),
            "action_text": action,
            "messages": as_messages(rollout.messages),
            "label": label,
        }
        result = await _call(threads, env.step, state)
        _add(rollout, result)
        if result.terminated or result.truncated:
            if result.truncated or rollout.turns[-1]["finish_reason"] == "length":
                rollout.status = Status.TRUNCATED
            return
        if turn == config.max_turns:
            break
        new = as_messages(result.observation)
        delta = renderer.delta(before, new, rollout.token_ids[-1])
        if len(rollout.token_ids) + len(delta) >= config.max_context_tokens:
            break
        rollout.append_context(delta)
        rollout.messages = [*rollout.messages, *new]
    rollout.status = Status.TRUNCATED  # out of turns or context


async def _sample(
    rollout: Rollout,
    sampling: SamplingConfig,
    generate: Generate,
    renderer: ChatRenderer,
    config: AgentConfig,
) -> str:
    room = config.max_context_tokens - len(rollout.token_ids)
    sampling = sampling.model_copy(update={"max_tokens": min(sampling.max_tokens, room)})
    start = time.perf_counter()
    generation = await generate(rollout.token_ids, sampling)
    if generation.error is not None:
        raise MoltflowError(generation.error)
    if generation.finish_reason == "abort" or len(generation.token_ids) == 0:
        raise MoltflowError(f"the engine returned {len(generation.token_ids)} tokens: {generation.finish_reason}")
    rollout.append_turn(generation, sampling, time.perf_counter() - start)
    return renderer.text([int(token) for token in generation.token_ids])


def _add(rollout: Rollout, result: Any) -> None:
    if not isinstance(result, Result):
        raise AgentError(f"step returned {type(result).__name__}; allowed: stages.agents.Result")
    if result.reward is not None:
        rollout.reward = (rollout.reward or 0.0) + float(result.reward)
    rollout.score = float(result.score) if result.score is not None else rollout.reward
    for name, value in (("reward", rollout.reward), ("score", rollout.score)):
        if value is not None and not abs(value) <= MAX_REWARD:
            raise AgentError(
                f"step made the {name} {value}; allowed: numbers up to {MAX_REWARD:g} in size, None where there is none"
            )
    rollout.reward_components = {str(name): float(value) for name, value in result.reward_components.items()}
    rollout.info = json.loads(json.dumps(dict(result.info), default=str))


async def _close(env: Env, rollout: Rollout, threads: Executor, config: AgentConfig) -> None:
    try:
        async with asyncio.timeout(min(MAX_CLOSE_SECONDS, config.timeout_seconds)):
            await _call(threads, env.close)
    except Exception as failure:  # the rollout is over: it keeps its outcome and tells what went wrong
        rollout.info["close_error"] = _describe(failure)


async def _call(threads: Executor, method: Callable[..., Any], *arguments: Any) -> Any:
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


def _as_text(messages: list[dict[str, Any]]) -> str:
    return "\n".join(str(message.get("content", "")) for message in messages)
