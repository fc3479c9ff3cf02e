"""Unmodified SDKs and agent libraries against the chat server and a real engine: what they sampled is what is stored.

The short form has every client with and without streaming; `--long` adds a model that thinks before it speaks, under a
template that drops the thoughts of earlier exchanges.
"""

from __future__ import annotations

import os
import re
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import pytest_asyncio

from recipes.calculator.prepare import TOOL
from schemas.recipe import AgentConfig, RLRecipe, SamplingConfig
from schemas.types import Generation, GroupTask, ParseOptions, Prompt, Status
from stages.agents.rendering import ChatRenderer
from stages.capture.marks import Marks
from stages.capture.recorder import Recorder
from stages.capture.segments import CapturedSegment
from stages.capture.server import CaptureServer
from stages.workers.agent import EngineClient
from stages.workers.agent_pool import AgentPool
from stages.workers.cluster import open_engines
from stages.workers.engine_pool import EnginePool
from storage.runs import RunFolder
from storage.traces import Traces
from tests.real.clients import CLIENTS, QUESTIONS, Place
from tests.real.warm_start import MAX_TOKENS, warm_model

pytestmark = [
    pytest.mark.real,
    pytest.mark.conformance,
    pytest.mark.timeout(600),
    pytest.mark.asyncio(loop_scope="session"),
]


@dataclass
class Policy:
    """A chat server in front of a real engine, and every sample that the engine gave: prompt and generation."""

    recipe: RLRecipe
    thinks: bool
    renderer: ChatRenderer
    marks: Marks
    engines: EnginePool
    engine: EngineClient
    server: CaptureServer
    samples: list[tuple[list[int], Generation]] = field(default_factory=list)

    def recorder(self) -> Recorder:
        self.samples.clear()
        return Recorder(self._sample, self.renderer, self.marks, self.recipe.agent, self.recipe.rollout.sampling)

    async def _sample(self, token_ids: list[int], sampling: SamplingConfig, options: ParseOptions) -> Generation:
        generation = await self.engine.generate(token_ids, sampling, options)
        self.samples.append((token_ids, generation))
        return generation

    def text(self, token_ids: list[int]) -> str:
        return str(self.renderer.tokenizer.decode(token_ids, clean_up_tokenization_spaces=False))


@pytest_asyncio.fixture(scope="module", loop_scope="session", params=[False, True], ids=["calls", "thinks-and-calls"])
async def policy(
    request: pytest.FixtureRequest, make_recipe: Callable[..., RLRecipe], tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Policy]:
    if request.param and not request.config.getoption("--long"):
        pytest.skip("part of the long form: --long")
    async for opened in _opened(make_recipe, tmp_path_factory.mktemp("policy"), thinks=request.param):
        yield opened


async def _opened(make_recipe: Callable[..., RLRecipe], folder: Path, thinks: bool) -> AsyncIterator[Policy]:
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    model = str(warm_model(folder, thinks))
    recipe = make_recipe(
        "conformance",
        model={"path": model, "dtype": "float32"},
        agent={"entry": "tests.real.environments:Parity", "max_context_tokens": MAX_TOKENS, "max_turns": 50},
        rollout={"sampling": {"max_tokens": 64, "temperature": 0.7}},
        engine={
            "tool_parser": "hermes",
            "reasoning_parser": "deepseek_r1" if thinks else None,
            "kv_cache_bytes": 64 << 20,
        },
    )
    server, renderer = CaptureServer(), ChatRenderer(model)
    await server.start()
    try:
        async with open_engines(recipe, 0) as engines:
            engine = EngineClient("conformance", engines.actors[0], merge=False)
            yield Policy(recipe, thinks, renderer, Marks(renderer), engines, engine, server)
    finally:
        await server.close()


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


def holds(policy: Policy, segments: list[CapturedSegment]) -> None:
    """Every sample of the engine is one turn of one segment, behind exactly the tokens that the engine was given."""
    stored = []
    for segment in segments:
        assert len(segment.logprobs) == len(segment.token_ids)
        assert sorted({span["turn"] for span in segment.spans}) == list(range(len(segment.turns)))
        in_spans = {place for span in segment.spans for place in range(span["start"], span["end"])}
        assert all(segment.logprobs[place] == 0 for place in set(range(len(segment.token_ids))) - in_spans)
        for start, end in _turns(segment):
            stored.append((segment.token_ids[:start], segment.token_ids[start:end], segment.logprobs[start:end]))
        assert in_spans == {place for start, end in _turns(segment) for place in range(start, end)}
        assert max(in_spans) == len(segment.token_ids) - 1, "nothing is kept behind the last sampled token"
    sampled = [
        (prompt, [int(token) for token in generation.token_ids], [float(value) for value in generation.logprobs])
        for prompt, generation in policy.samples
    ]
    assert sorted(stored) == sorted(sampled)


def _turns(segment: CapturedSegment) -> Iterator[tuple[int, int]]:
    """Where each sampled turn starts and ends."""
    for turn in range(len(segment.turns)):
        spans = [span for span in segment.spans if span["turn"] == turn]
        yield spans[0]["start"], spans[-1]["end"]


def is_rendered_as_stored(policy: Policy, segment: CapturedSegment) -> None:
    """The template's render of the conversation before its last turn, and the stored tokens of it, differ at most in
    the turns that the policy sampled."""
    edges = list(_turns(segment))
    starts = [0, *(end for _, end in edges[:-1])]
    context = [policy.text(segment.token_ids[first:last]) for first, (last, _) in zip(starts, edges, strict=True)]
    rendered = policy.renderer.render(segment.messages[:-1], segment.tools)
    pattern = "(.*?)".join(re.escape(text) for text in context)
    assert re.fullmatch(pattern, rendered, re.DOTALL), (rendered, context)
    whole = policy.text(segment.token_ids[: edges[-1][0]])
    said = [policy.text(segment.token_ids[start:end]) for start, end in edges]
    if not any(_is_changed_by_parsing(text) for text in said):
        assert rendered == whole


def _is_changed_by_parsing(said: str) -> bool:
    """Whether a turn comes back from the parser in another form than the one that the template gives to all turns."""
    form = r'(so )?(<tool_call>\{"name": "calculator", "arguments": \{"expression": "[^"\\<>]*"\}\}</tool_call>)*'
    return re.fullmatch(rf"({form}|[^<]*)<\|end\|>", said) is None
