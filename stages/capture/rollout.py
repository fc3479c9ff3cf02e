"""A rollout of an agent that owns its loop: its context, its attempt, its recorded segments."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

from schemas.errors import AgentError
from schemas.recipe import AgentConfig
from schemas.types import GroupTask, Status
from stages.agents.attempt import Attempt, add_result, call_user, run_attempt
from stages.agents.chat import ChatAgent, ChatContext, last_user_text
from stages.agents.contract import Result, as_messages
from stages.agents.messages import images
from stages.capture.recorder import Recorder
from stages.capture.segments import CapturedSegment
from stages.capture.server import CaptureServer


@dataclass(kw_only=True)
class ChatRollout(Attempt):
    """What became of one attempt of an agent, and the segments that it sampled."""

    segments: list[CapturedSegment] = field(default_factory=list)


async def run_chat(
    make_agent: Callable[..., Any],
    task: GroupTask,
    seed: int,
    server: CaptureServer,
    recorder: Recorder,
    config: AgentConfig,
    threads: Executor,
) -> ChatRollout:
    """Run one rollout to its end and say how it ended; only a dead engine raises (WorkerError)."""
    rollout = ChatRollout(seed=seed)

    async def play(agent: ChatAgent) -> None:
        async with server.open(recorder) as url:
            context = ChatContext(
                base_url=f"{url}/v1",
                session_url=url,
                api_key=recorder.key,
                messages=as_messages(task.prompt.messages),
                prompt=last_user_text(task.prompt.messages),
                label=deepcopy(task.prompt.label),
                sampling_params=task.sampling.model_copy(deep=True),
                seed=seed,
                tools=deepcopy(task.prompt.tools),
                images=images(task.prompt.messages),
            )
            result = await call_user(threads, agent.run, context)
        add_result(rollout, result)
        _refuse_what_only_environments_decide(result)
        if result.truncated or recorder.out_of_turns or recorder.was_cut_off or recorder.session.out_of_context:
            rollout.status = Status.TRUNCATED

    try:
        await run_attempt(rollout, make_agent, play, config, threads)
    finally:
        await recorder.close()
    if recorder.failure is not None:
        raise recorder.failure
    rollout.segments = recorder.session.segments()
    if recorder.overridden:
        rollout.info["overridden_sampling"] = recorder.overridden
    if recorder.ignored:
        rollout.info["ignored_request_fields"] = list(recorder.ignored)
    if not rollout.segments:
        _explain_empty(rollout, recorder, config)
    elif rollout.status is Status.AGENT_ERROR and recorder.out_of_turns:
        rollout.error = f"after its {config.max_turns} turns (agent.max_turns) were used: {rollout.error}"
    return rollout


def _refuse_what_only_environments_decide(result: Result) -> None:
    has = {
        "sampling_params": result.sampling_params is not None,
        "an observation": bool(result.observation),
        "terminated=False": not (result.terminated or result.truncated),
    }
    if found := [name for name, there in has.items() if there]:
        raise AgentError(f"a ChatAgent returned {', '.join(found)}; allowed: none, its requests decide how it goes on")


def _explain_empty(rollout: ChatRollout, recorder: Recorder, config: AgentConfig) -> None:
    """Nothing was sampled, so there is nothing to reward."""
    if recorder.session.out_of_context:
        rollout.status = Status.PROMPT_TOO_LONG
        rollout.error = f"no request left room below agent.max_context_tokens = {config.max_context_tokens}"
    elif rollout.status.trainable:
        rollout.status, rollout.error = Status.AGENT_ERROR, "the agent ended without asking the policy anything"
    rollout.reward = rollout.score = None
