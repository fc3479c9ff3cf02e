"""Unmodified SDKs and agent libraries against the chat server and a real engine: what they sampled is what is stored.

The short form has every client with and without streaming; `--long` adds a model that thinks before it speaks, under a
template that drops the thoughts of earlier exchanges.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable

import pytest
import pytest_asyncio

from recipes.calculator.prepare import TOOL
from schemas.recipe import AgentConfig, RLRecipe
from schemas.types import GroupTask, Prompt, Status
from stages.workers.agent_pool import AgentPool
from storage.runs import RunFolder
from storage.traces import Traces
from tests.real.clients import CLIENTS, QUESTIONS, Place
from tests.real.policies import Policy, holds, is_rendered_as_stored, open_policy
from tests.real.warm_start import MAX_TOKENS, warm_model

pytestmark = [
    pytest.mark.real,
    pytest.mark.conformance,
    pytest.mark.timeout(600),
    pytest.mark.asyncio(loop_scope="session"),
]


@pytest_asyncio.fixture(scope="module", loop_scope="session", params=[False, True], ids=["calls", "thinks-and-calls"])
async def policy(
    request: pytest.FixtureRequest, make_recipe: Callable[..., RLRecipe], tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Policy]:
    if request.param and not request.config.getoption("--long"):
        pytest.skip("part of the long form: --long")
    model = warm_model(tmp_path_factory.mktemp("policy"), thinks=request.param)
    recipe = make_recipe(
        "conformance",
        model={"path": str(model), "dtype": "float32"},
        agent={"entry": "tests.real.environments:Parity", "max_context_tokens": MAX_TOKENS, "max_turns": 50},
        rollout={"sampling": {"max_tokens": 64, "temperature": 0.7}},
        engine={
            "tool_parser": "hermes",
            "reasoning_parser": "deepseek_r1" if request.param else None,
            "kv_cache_bytes": 64 << 20,
        },
    )
    async with open_policy(recipe) as opened:
        yield opened


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("client", CLIENTS)
async def test_what_a_client_sampled_is_stored_token_by_token(policy: Policy, client: str, stream: bool) -> None:
    recorder = policy.recorder()
    async with policy.server.open(recorder) as url:
        place = Place(f"{url}/v1", url, recorder.key)
        await CLIENTS[client](place, stream)
    assert len(place.calls) > 0, [policy.text(list(generation.token_ids)) for _, generation in policy.samples]
    segments = recorder.session.segments()
    holds(policy, segments)
    for segment in segments:
        is_rendered_as_stored(policy, segment)
    last = segments[-1].messages
    assert tuple(message["content"] for message in last if message["role"] == "user") == QUESTIONS
    answered = sum(message["role"] == "tool" for message in last)
    unanswered = len(last[-1].get("tool_calls", ()))  # a client may take the text beside calls as the end
    assert answered <= len(place.calls) <= answered + unanswered
    if not policy.thinks:
        assert [segment.opened for segment in segments] == ["new"]
        return
    assert [segment.opened for segment in segments] == ["new", "rewritten"], "the second question drops thoughts"
    for segment in segments:
        thoughts = [message.get("reasoning_content") for message in segment.messages if message["role"] == "assistant"]
        assert all(thoughts[-len(segment.turns) :]), "what was sampled here is shown with its thoughts"


AGENTS = {
    "env": "recipes.calculator.variants:CalculatorEnv",
    "openai": "recipes.calculator.agent:Calculator",
    "anthropic": "recipes.calculator.variants:CalculatorAnthropic",
    "library": "recipes.calculator.library:CalculatorLibrary",
}


async def test_every_kind_of_agent_runs_on_a_host_and_starts_from_the_same_tokens(
    policy: Policy, request: pytest.FixtureRequest
) -> None:
    if policy.thinks or not request.config.getoption("--long"):
        pytest.skip("part of the long form: --long")
    pytest.importorskip("pydantic_ai.models.openai", reason="pydantic-ai is missing: install moltflow[dev]")
    prompts = {name: await _prompts(policy, name, entry) for name, entry in AGENTS.items()}
    assert all(len(found) == 1 for found in prompts.values()), "all rollouts of a row start from the same tokens"
    assert prompts["env"] == prompts["openai"] == prompts["anthropic"]
    assert prompts["library"] != prompts["env"], "the library describes its tool itself"


async def _prompts(policy: Policy, name: str, entry: str) -> set[tuple[int, ...]]:
    """First prompts of 8 rollouts of one row, which all have a reward; some of them called the tool."""
    agent = AgentConfig(entry=entry, max_context_tokens=MAX_TOKENS, max_turns=4)
    run = policy.recipe.run.model_copy(update={"name": f"agents-{name}"})
    recipe = policy.recipe.model_copy(update={"agent": agent, "run": run})
    messages = [{"role": "system", "content": "Add nothing."}, {"role": "user", "content": "3^2"}]
    task = GroupTask(0, "g", Prompt(0, messages, "9", [TOOL]), 8, recipe.rollout.sampling, seed=0)
    folder = RunFolder.start(recipe)
    agents = AgentPool(recipe, folder.uri, 0, policy.engines.actors)
    try:
        await agents.ready()
        await agents.submit("traces", [task])
        traces = Traces(folder.uri)
        (group,) = traces.commit(await agents.collect("traces"))
    finally:
        agents.close()
        folder.close()
    assert [segment.status for segment in group.segments if not segment.status.trainable] == []
    assert sum(segment.status is Status.OK for segment in group.segments) > 0
    rows = traces.table.take([segment.row for segment in group.segments], ["token_ids", "spans", "turns"])
    assert any(len(row["turns"]) > 1 for row in rows), "a call and what followed it"
    return {tuple(row["token_ids"][: row["spans"][0]["start"]]) for row in rows}
