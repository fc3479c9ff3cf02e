"""The framework-driven turn loop of an `Env`: sample, step, append, until the rollout ends. Token ids are never
re-rendered: the trajectory is the prompt, then sampled ids and rendered observations in turn."""

from __future__ import annotations

import asyncio
import inspect
import math
import time
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import Executor
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from schemas.errors import AgentError, MoltflowError, WorkerError
from schemas.recipe import AgentConfig, SamplingConfig
from schemas.types import Generation, GroupTask, Status
from stages.agents.contract import Env, Result, as_messages
from stages.agents.rendering import ChatRenderer

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
        covered = 0
        for version, first, last in generation.versions:
            if first != covered or last > count:
                raise MoltflowError(f"engine versions {generation.versions} do not cover {count} tokens")
            if last > first:
                turn = len(self.turns)
                self.spans.append({"start": start + first, "end": start + last, "turn": turn, "version": version})
            covered = last
        if covered != count or len(generation.logprobs) != count:
            raise MoltflowError(
                f"engine gave {count} tokens, {len(generation.logprobs)} log-probs and versions for {covered}"
            )
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
        return Status.INFRASTRUCTURE_ERROR, str(failure)
    return Status.AGENT_ERROR, f"{type(failure).__name__}: {failure}"


async def _turns(
    env: Env,
    task: GroupTask,
    rollout: Rollout,
    generate: Generate,
    renderer: ChatRenderer,
    config: AgentConfig,
    threads: Executor,
) -> None:
    label = task.prompt.label
    started = await _call(
        threads, env.reset, {"observation": list(rollout.messages), "label": label, "seed": rollout.seed}
    )
    if isinstance(started, Mapping) and "observation" in started:
        rollout.messages = as_messages(started["observation"])
    rollout.append_context(renderer.prompt(rollout.messages))
    if len(rollout.token_ids) >= config.max_context_tokens:
        rollout.status = Status.PROMPT_TOO_LONG
        rollout.error = f"prompt of {len(rollout.token_ids)} tokens; allowed: below {config.max_context_tokens}"
        return
    for _ in range(config.max_turns):
        action = await _sample(rollout, task.sampling, generate, renderer, config)
        state = {
            "observation_text": _as_text(rollout.messages),
            "action_text": action,
            "messages": [*rollout.messages, {"role": "assistant", "content": action}],
            "label": label,
        }
        result = await _call(threads, env.step, state)
        _add(rollout, result)
        before = rollout.messages
        rollout.messages = state["messages"]
        if result.truncated or rollout.turns[-1]["finish_reason"] == "length":
            rollout.status = Status.TRUNCATED
        if result.terminated or result.truncated:
            return
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
        if value is not None and not math.isfinite(value):
            raise AgentError(f"step returned {name} {value}; allowed: finite numbers, or None where there is none")
    rollout.reward_components = {name: float(value) for name, value in result.reward_components.items()}
    rollout.info = dict(result.info)


async def _close(env: Env, rollout: Rollout, threads: Executor, config: AgentConfig) -> None:
    try:
        async with asyncio.timeout(config.timeout_seconds):
            await _call(threads, env.close)
    except Exception as failure:  # the rollout is over: it keeps its outcome and tells what went wrong
        rollout.info["close_error"] = f"{type(failure).__name__}: {failure}"


async def _call(threads: Executor, method: Callable[..., Any], *arguments: Any) -> Any:
    """Await an async method here; run a plain one in a thread, where it may block."""
    if inspect.iscoroutinefunction(method):
        return await method(*arguments)
    return await asyncio.get_running_loop().run_in_executor(threads, partial(method, *arguments))


def _as_text(messages: list[dict[str, Any]]) -> str:
    return "\n".join(str(message.get("content", "")) for message in messages)
