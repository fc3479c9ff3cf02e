"""What READMEs show runs as it stands there.

Agents written for another framework's contract run with only their imports changed: an `Env`, and a `ChatAgent` over
the SDKs of OpenAI and Anthropic, each behind an `AgentRunner`."""

from __future__ import annotations

import asyncio
import textwrap
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from schemas.errors import RecipeError
from schemas.recipe import AgentConfig, SamplingConfig
from schemas.types import Filtered, GroupTask, ParseOptions, Prompt, Status
from stages.advantage import advantage
from stages.agents.contract import load_agent
from stages.agents.loop import run_env
from stages.capture.marks import Marks
from stages.capture.recorder import Recorder
from stages.capture.rollout import run_chat
from stages.capture.server import CaptureServer
from tests.builders import group, recipe
from tests.chats import renderer
from tests.test_capture_server import Engine

GRADE = """
def grade(answer, label):
    return float(answer == label)
"""
ENV = """
from stages.agents import Env, Result, StepEnvRunner

class MathEnv(Env):
    async def step(self, state) -> Result:
        # state: observation_text, action_text, label, sampling_params
        reward = grade(state["action_text"], state["label"])
        return Result(reward=reward, terminated=True)

class AgentRunner(StepEnvRunner):
    def __init__(self):
        super().__init__(MathEnv)
"""
OPENAI = """
from openai import AsyncOpenAI
from stages.agents import ChatAgent, ChatAgentRunner, ChatContext, Result

class MyAgent(ChatAgent):
    async def run(self, ctx: ChatContext) -> Result:
        # ctx.base_url carries the session id and auto-captures the token
        # trace — no extra_body, no logprobs=True, no session plumbing.
        client = AsyncOpenAI(base_url=ctx.base_url, api_key=ctx.api_key)
        resp = await client.chat.completions.create(
            model=ctx.model_name,
            messages=[{"role": "user", "content": ctx.prompt}],
            max_tokens=ctx.sampling_params.max_tokens,
            temperature=ctx.sampling_params.temperature,
        )
        return Result(reward=grade(resp.choices[0].message.content, ctx.label))

class AgentRunner(ChatAgentRunner):
    def __init__(self):
        super().__init__(MyAgent)
"""
ANTHROPIC = """
from anthropic import AsyncAnthropic
from stages.agents import ChatAgent, ChatAgentRunner, ChatContext, Result

class MyAgent(ChatAgent):
    async def run(self, ctx: ChatContext) -> Result:
        client = AsyncAnthropic(base_url=ctx.session_url, api_key=ctx.api_key)
        msg = await client.messages.create(
            model=ctx.model_name,
            messages=[{"role": "user", "content": ctx.prompt}],
            max_tokens=ctx.sampling_params.max_tokens,
        )
        text = msg.content[0].text
        return Result(reward=grade(text, ctx.label))

class AgentRunner(ChatAgentRunner):
    def __init__(self):
        super().__init__(MyAgent)
"""


def load(folder: Path, text: str) -> Any:
    file = folder / "agent.py"
    file.write_text(GRADE + text)
    return load_agent(f"{file}:AgentRunner")


@pytest.mark.parametrize("said", ["4", "5"])
@pytest.mark.parametrize("snippet", [ENV, OPENAI, ANTHROPIC], ids=["env", "openai", "anthropic"])
def test_an_agent_of_the_other_contract_trains(tmp_path: Path, snippet: str, said: str) -> None:
    rollout, segments = asyncio.run(_play(load(tmp_path, snippet), Engine(f"{said}<e>")))
    assert (rollout.status, rollout.reward, rollout.error) == (Status.OK, float(said == "4"), None)
    (segment,) = segments
    assert segment.token_ids == renderer().tokenize(f"<u>2+2<e><a>{said}<e>"), "one row, the same ids on every way"
    assert [(span["start"], span["end"]) for span in segment.spans] == [(6, 8)]


async def _play(agent: Any, engine: Engine) -> tuple[Any, Any]:
    config, sampling = AgentConfig(entry="a:B", max_context_tokens=100), SamplingConfig(max_tokens=9)
    task = GroupTask(0, "0000-000000-0", Prompt(0, [{"role": "user", "content": "2+2"}], "4"), 1, sampling, 0)
    with ThreadPoolExecutor(2) as threads:
        if agent.__name__ == "MathEnv":

            async def generate(token_ids: list[int], sampling: SamplingConfig) -> Any:
                return await engine.sample(token_ids, sampling, ParseOptions())

            rollout: Any = await run_env(agent, task, 7, generate, renderer(), config, threads)
            return rollout, rollout.segments
        server = CaptureServer()
        await server.start()
        recorder = Recorder(engine.sample, renderer(), Marks(renderer()), config, sampling)
        rollout = await run_chat(agent, task, 7, server, recorder, config, threads)
        await server.close()
        return rollout, rollout.segments


def test_a_runner_that_cannot_be_made_or_names_no_agent_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="AgentRunner: NameError: name 'Missing' is not defined"):
        load(tmp_path, ENV.replace("super().__init__(MathEnv)", "super().__init__(Missing)"))
    with pytest.raises(RecipeError, match=r"AgentRunner is 7; allowed: a subclass of stages\.agents' Env or ChatAgent"):
        load(tmp_path, ENV.replace("super().__init__(MathEnv)", "super().__init__(7)"))


def test_the_estimator_of_the_readme_takes_part_in_a_batch(tmp_path: Path) -> None:
    readme = (Path(__file__).parents[1] / "README.md").read_text()
    start = readme.index("    def median_baseline")
    code = readme[start : readme.index("\n\n    .venv", start)]
    (tmp_path / "mine.py").write_text(textwrap.dedent(code))
    custom = {"type": "custom", "function": f"{tmp_path}/mine.py:median_baseline"}
    batch = advantage(Filtered([group(0, rewards=[1, 2, 6]), group(1, rewards=[5, 0, 0])]), 0, recipe(advantage=custom))
    assert [segment.advantage for segment in batch.segments] == [-1, 0, 4, 5, 0, 0]  # medians 2 and 0
