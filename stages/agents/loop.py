"""The framework-driven turn loop of an `Env`: sample, step, append, until the rollout ends. Token ids are never
re-rendered: the trajectory is the prompt, then sampled ids and rendered observations in turn."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import Executor
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

from schemas.errors import AgentError
from schemas.recipe import AgentConfig, SamplingConfig
from schemas.types import Generation, GroupTask, Status
from stages.agents.attempt import Attempt, add_result, call_user, run_attempt
from stages.agents.contract import Env, as_messages
from stages.agents.messages import unreadable
from stages.agents.rendering import ChatRenderer
from stages.agents.sampling import chosen
from stages.agents.segment import Segment

Generate = Callable[[list[int], SamplingConfig], Awaitable[Generation]]
"""(token_ids, sampling) -> what the engine sampled."""


@dataclass(kw_only=True)
class Rollout(Segment, Attempt):
    """One attempt of an environment as it grows: a single segment, and what became of it."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] = field(default_factory=list)

    @property
    def segments(self) -> list[Rollout]:
        return [self]


async def run_env(
    make_env: Callable[..., Any],
    task: GroupTask,
    seed: int,
    generate: Generate,
    renderer: ChatRenderer,
    config: AgentConfig,
    threads: Executor,
) -> Rollout:
    """Run one rollout to its end and say how it ended; only a dead engine raises (WorkerError)."""
    rollout = Rollout(messages=list(task.prompt.messages), tools=task.prompt.tools, seed=seed)

    async def play(env: Env) -> None:
        await _turns(env, task, rollout, generate, renderer, config, threads)

    await run_attempt(rollout, make_env, play, config, threads)
    return rollout


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
    started = await call_user(
        threads, env.reset, {"observation": as_messages(rollout.messages), "label": label, "seed": rollout.seed}
    )
    if started is not None:
        if not isinstance(started, Mapping) or "observation" not in started:
            raise AgentError(f"reset returned {type(started).__name__}; allowed: None, or a mapping with `observation`")
        rollout.messages = as_messages(started["observation"])
    rollout.append_context(renderer.prompt(_text_only(rollout.messages), task.prompt.tools))
    if len(rollout.token_ids) >= config.max_context_tokens:
        rollout.status = Status.PROMPT_TOO_LONG
        rollout.error = f"prompt of {len(rollout.token_ids)} tokens; allowed: below {config.max_context_tokens}"
        return
    sampling = task.sampling
    for turn in range(1, config.max_turns + 1):
        action = await _sample(rollout, sampling, generate, renderer, config)
        before, rollout.messages = rollout.messages, [*rollout.messages, {"role": "assistant", "content": action}]
        state = {
            "observation_text": _as_text(before),
            "action_text": action,
            "messages": as_messages(rollout.messages),
            "label": label,
            "sampling_params": sampling.model_copy(deep=True),
        }
        result = await call_user(threads, env.step, state)
        add_result(rollout, result)
        sampling = chosen(task.sampling, sampling, result.sampling_params)
        if result.terminated or result.truncated:
            if result.truncated or rollout.turns[-1]["finish_reason"] == "length":
                rollout.status = Status.TRUNCATED
            return
        if turn == config.max_turns:
            break
        new = _text_only(as_messages(result.observation))
        delta = renderer.delta(before, new, rollout.token_ids[-1], task.prompt.tools)
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
    rollout.append_turn(generation, sampling, time.perf_counter() - start)
    return renderer.text([int(token) for token in generation.token_ids])


def _text_only(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    if (kind := unreadable(messages)) is not None:
        raise AgentError(f"the messages for the policy have a part of type {kind}; allowed: text, as the model")
    return messages


def _as_text(messages: list[dict[str, Any]]) -> str:
    return "\n".join(str(message.get("content", "")) for message in messages)
