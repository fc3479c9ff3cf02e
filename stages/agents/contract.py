"""What a user writes: an `Env` that answers the policy and rewards it.

    class GuessEnv(Env):
        def step(self, state):
            return Result(reward=float(state["action_text"] == state["label"]))

The framework owns the loop: it renders the prompt, samples a turn, calls `step`, appends the observation, and repeats
until the result is terminated or truncated. Methods may be plain or async; plain ones run in a thread, so they may
block. One instance serves one rollout.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from schemas.entries import load_module
from schemas.errors import AgentError, RecipeError
from schemas.recipe import SamplingConfig
from stages.agents.chat import ChatAgent
from stages.agents.runners import StepEnvRunner


@dataclass
class Result:
    """What a step gave. Rewards of a rollout's steps add up; `score`, `info` and `reward_components` are the last ones.

    `observation` is what the policy sees next: text (one user message) or a list of chat messages. It is not needed
    when the rollout ends. `score` is the unshaped measure of success that filters look at; unset takes the reward.

    `sampling_params` is how an `Env`'s following turns are sampled: a mapping changes the keys that it has, such as
    `{"temperature": 0.7}`, a `SamplingConfig` all. Each turn is trained at the temperature it was sampled at. `images`
    is refused unless it is empty, since the models that are trained read text only.
    """

    reward: float | None = None
    observation: str | list[dict[str, Any]] = ""
    terminated: bool = True
    truncated: bool = False
    info: dict[str, Any] = field(default_factory=dict)
    score: float | None = None
    images: list[Any] | None = None
    sampling_params: Mapping[str, Any] | SamplingConfig | None = None
    reward_components: dict[str, float] = field(default_factory=dict)


class Env:
    """Base class of environments.

    `state` holds `observation_text` (the messages before this action, as text), `action_text` (what the policy said,
    special tokens removed), `messages` (the conversation as chat messages), `label` (from the data row) and
    `sampling_params` (the `SamplingConfig` of this turn).
    """

    async def reset(self, state: dict[str, Any]) -> Any:
        """Called once before the first turn with `observation` (the prompt's messages), `label` and `seed`.

        The seed is the same for all rollouts of a group, so that an environment which draws its problem from it
        compares attempts at one problem; evaluations have seeds of their own.

        Return None to keep the prompt, or a mapping with a new `observation` (text or messages).
        """
        return None

    async def step(self, state: dict[str, Any]) -> Any:
        """Judge the policy's turn and answer it with a `Result`."""
        raise NotImplementedError(f"{type(self).__name__} must define step(state) -> Result")

    async def close(self) -> Any:
        """Free what the rollout held; called once on every way out."""
        return None


def load_agent(entry: str) -> type[Env] | type[ChatAgent]:
    """The class named by `module:Class` or `path/to/file.py:Class`, which may be a runner's. Raises RecipeError naming
    what is wrong."""
    where, _, name = entry.rpartition(":")
    if not where or not name:
        raise RecipeError(f"agent.entry: found {entry!r}; allowed: module:Class or path/to/file.py:Class")
    module = load_module(where, "agent.entry")
    if not hasattr(module, name):
        classes = [name for name, value in vars(module).items() if _is_agent(value)]
        raise RecipeError(f"agent.entry: {where} has no {name!r}; its agents are {classes}")
    agent = getattr(module, name)
    if isinstance(agent, type) and issubclass(agent, StepEnvRunner):
        agent = _named(entry, agent)
    if not _is_agent(agent):
        raise RecipeError(f"agent.entry: {entry} is {agent!r}; allowed: a subclass of stages.agents' Env or ChatAgent")
    method = "step" if issubclass(agent, Env) else "run"
    if getattr(agent, method) in (Env.step, ChatAgent.run):
        argument = "state" if method == "step" else "ctx"
        raise RecipeError(f"agent.entry: {entry} defines no {method}({argument}); allowed: an agent that does")
    return agent


def _named(entry: str, runner: Callable[[], StepEnvRunner]) -> Any:
    try:
        return runner().agent
    except Exception as failure:  # user code
        raise RecipeError(f"agent.entry: cannot make {entry}: {type(failure).__name__}: {failure}") from failure


def _is_agent(value: Any) -> bool:
    return isinstance(value, type) and issubclass(value, Env | ChatAgent) and value not in (Env, ChatAgent)


def check_arguments(entry: str, agent: type[Env] | type[ChatAgent], arguments: Mapping[str, Any]) -> None:
    """Raise RecipeError when the constructor does not take the arguments: found once, not in every rollout."""
    try:
        signature = inspect.signature(agent)
    except ValueError:  # written in C: it says so itself when it is called
        return
    try:
        signature.bind(**arguments)
    except TypeError as problem:
        raise RecipeError(f"agent.args: {problem}; allowed: what {entry} takes, {signature}") from None


def as_messages(observation: Any) -> list[dict[str, Any]]:
    """An observation or prompt as chat messages of its own: text becomes one user message, messages are copied.

    Raises AgentError for anything else, TypeError for messages that are not plain JSON.
    """
    if isinstance(observation, str):
        return [{"role": "user", "content": observation}]
    if not isinstance(observation, Sequence) or not all(isinstance(m, Mapping) and "role" in m for m in observation):
        raise AgentError(
            f"the observation is a {type(observation).__name__}; allowed: text, or a list of messages that have a role"
        )
    messages: list[dict[str, Any]] = json.loads(json.dumps([dict(message) for message in observation]))
    return messages
