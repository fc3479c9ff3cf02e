"""The chat server over HTTP, with the SDKs that agents use; the engine says what the test tells it."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

import anthropic
import httpx
import openai
import pytest

from schemas.chat import ParsedTurn, ToolCall
from schemas.errors import WorkerError
from schemas.recipe import AgentConfig, SamplingConfig
from schemas.types import Generation, GroupTask, ParseOptions, Prompt, Status
from stages.agents import ChatAgent, ChatContext, Result
from stages.capture import server as server_module
from stages.capture.marks import Marks
from stages.capture.recorder import Recorder
from stages.capture.rollout import ChatRollout, run_chat
from stages.capture.server import CaptureServer
from tests.chats import generation, renderer

TOOL = {
    "type": "function",
    "function": {"name": "add", "description": "a + b", "parameters": {"type": "object", "properties": {}}},
}
HI = [{"role": "user", "content": "hi"}]


class Engine:
    """Says the scripted turns one after another, the last one for ever: text, text with calls, or an error to raise."""

    def __init__(self, *turns: Any, seconds: float = 0.0) -> None:
        self.turns = list(turns)
        self.prompts: list[list[int]] = []
        self.samplings: list[SamplingConfig] = []
        self.options: list[ParseOptions] = []
        self.seconds = seconds
        self.aborted = 0

    async def sample(self, token_ids: list[int], sampling: SamplingConfig, options: ParseOptions) -> Generation:
        self.prompts.append(token_ids)
        self.samplings.append(sampling)
        self.options.append(options)
        said = self.turns.pop(0) if len(self.turns) > 1 else self.turns[0]
        try:
            await asyncio.sleep(self.seconds)
        except asyncio.CancelledError:
            self.aborted += 1
            raise
        if isinstance(said, Exception):
            raise said
        text, calls = said if isinstance(said, tuple) else (said, ())
        ids = renderer().tokenize(text)[: sampling.max_tokens]
        reason = "stop" if text.endswith("<e>") and len(ids) == len(renderer().tokenize(text)) else "length"
        parsed = ParsedTurn(renderer().text(ids) if not calls else "", "", calls)
        return replace(generation(ids, reason), parsed=parsed)


@dataclass
class Open:
    server: CaptureServer
    recorder: Recorder
    url: str

    def openai(self, **options: Any) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(base_url=f"{self.url}/v1", api_key=self.recorder.key, **options)

    def anthropic(self, **options: Any) -> anthropic.AsyncAnthropic:
        return anthropic.AsyncAnthropic(base_url=self.url, api_key=self.recorder.key, **options)

    def parts(self) -> list[list[str]]:
        from tests.chats import split

        decode = renderer().tokenizer.decode
        return [[str(decode(part)) for part in split(segment)] for segment in self.recorder.session.segments()]


@asynccontextmanager
async def opened(engine: Engine, **config: Any) -> AsyncIterator[Open]:
    server = CaptureServer()
    await server.start()
    try:
        recorder = _recorder(engine, **config)
        async with server.open(recorder) as url:
            yield Open(server, recorder, url)
    finally:
        await server.close()


def _recorder(engine: Engine, **config: Any) -> Recorder:
    agent = AgentConfig(entry="a:B", **({"max_context_tokens": 1000} | config))
    return Recorder(engine.sample, renderer(), Marks(renderer()), agent, SamplingConfig(max_tokens=100))


# ---- wires ----


async def test_a_conversation_over_chat_completions_is_recorded_token_by_token() -> None:
    async with opened(Engine("A<e>", "B<e>")) as at:
        client = at.openai()
        first = await client.chat.completions.create(model="policy", messages=HI)
        assert first.choices[0].message.content == "A" and first.choices[0].finish_reason == "stop"
        assert first.usage is not None
        assert (first.usage.prompt_tokens, first.usage.completion_tokens) == (5, 2)  # <u>hi<e><a>, A<e>
        messages: Any = [*HI, first.choices[0].message, {"role": "user", "content": "go"}]
        await client.chat.completions.create(model="policy", messages=messages)
        assert at.parts() == [["<u>hi<e><a>", "A<e>", "<u>go<e><a>", "B<e>"]]


@pytest.mark.parametrize("stream", [False, True])
async def test_calls_and_results_go_round_over_chat_completions(stream: bool) -> None:
    calls = (ToolCall("call_1", "add", '{"a": 1}'), ToolCall("call_2", "add", '{"a": 2}'))
    async with opened(Engine(('<c>add{"a": 1}<c>add{"a": 2}<e>', calls), "3<e>")) as at:
        client = at.openai()
        if stream:
            async with client.chat.completions.stream(model="policy", messages=HI, tools=[TOOL]) as events:  # type: ignore[arg-type]
                message: Any = (await events.get_final_completion()).choices[0].message
        else:
            answer = await client.chat.completions.create(model="policy", messages=HI, tools=[TOOL])  # type: ignore[arg-type]
            message = answer.choices[0].message
        assert [json.loads(call.function.arguments) for call in message.tool_calls] == [{"a": 1}, {"a": 2}]
        results: Any = [{"role": "tool", "tool_call_id": c.id, "content": "ok"} for c in message.tool_calls]
        echo: Any = {"role": "assistant", "content": message.content, "tool_calls": [
            {"id": c.id, "type": "function", "function": {"name": "add", "arguments": c.function.arguments.replace(" ", "")}}  # noqa: E501
            for c in message.tool_calls
        ]}  # fmt: skip
        await client.chat.completions.create(model="policy", messages=[*HI, echo, *results], tools=[TOOL])  # type: ignore[arg-type]
        (parts,) = at.parts()
        assert parts[1:] == ['<c>add{"a": 1}<c>add{"a": 2}<e>', "<t>ok<e><t>ok<e><a>", "3<e>"]


@pytest.mark.parametrize("stream", [False, True])
async def test_calls_and_results_go_round_over_messages(stream: bool) -> None:
    tools: Any = [{"name": "add", "description": "a + b", "input_schema": {"type": "object", "properties": {}}}]
    system: Any = "be brief" if stream else [{"type": "text", "text": "be"}, {"type": "text", "text": "brief"}]
    asked: dict[str, Any] = {"model": "policy", "max_tokens": 50, "system": system, "tools": tools}
    async with opened(Engine(('<c>add{"a": 1}<e>', (ToolCall("call_1", "add", '{"a": 1}'),)), "3<e>")) as at:
        client = at.anthropic()
        if stream:
            async with client.messages.stream(messages=HI, **asked) as events:  # type: ignore[arg-type]
                message = await events.get_final_message()
        else:
            message = await client.messages.create(messages=HI, **asked)  # type: ignore[arg-type]
        assert message.stop_reason == "tool_use"
        (use,) = [block for block in message.content if block.type == "tool_use"]
        assert use.input == {"a": 1}
        result: Any = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": use.id, "content": "ok"}]}
        await client.messages.create(messages=[*HI, {"role": "assistant", "content": message.content}, result], **asked)  # type: ignore[list-item]
        (parts,) = at.parts()
        assert parts[0].endswith("<s>be brief<e><u>hi<e><a>" if stream else "<s>be\nbrief<e><u>hi<e><a>")
        assert parts[1:] == ['<c>add{"a": 1}<e>', "<t>ok<e><a>", "3<e>"]


@pytest.mark.parametrize("stream", [False, True])
async def test_calls_and_results_go_round_over_responses(stream: bool) -> None:
    tools: Any = [
        {"type": "function", "name": "add", "parameters": {"type": "object", "properties": {}}, "strict": False}
    ]
    async with opened(Engine(('<c>add{"a": 1}<e>', (ToolCall("call_1", "add", '{"a": 1}'),)), "3<e>")) as at:
        client = at.openai()
        if stream:
            async with client.responses.stream(model="policy", input="hi", tools=tools) as events:
                response: Any = await events.get_final_response()
        else:
            response = await client.responses.create(model="policy", input="hi", tools=tools)
        (called,) = [item for item in response.output if item.type == "function_call"]
        items: Any = [
            {"role": "user", "content": "hi"},
            {"type": "function_call", "call_id": called.call_id, "name": "add", "arguments": called.arguments},
            {"type": "function_call_output", "call_id": called.call_id, "output": "ok"},
        ]
        last = await client.responses.create(model="policy", input=items, tools=tools)
        assert last.output_text == "3" and last.status == "completed"
        (parts,) = at.parts()
        assert parts[1:] == ['<c>add{"a": 1}<e>', "<t>ok<e><a>", "3<e>"]


async def test_models_and_token_counts() -> None:
    async with opened(Engine("A<e>")) as at:
        assert [model.id async for model in at.openai().models.list()] == ["policy", "policy-unrecorded"]
        assert (await at.anthropic().models.retrieve("policy")).id == "policy"
        counted = await at.anthropic().messages.count_tokens(model="policy", messages=HI)  # type: ignore[arg-type]
        assert counted.input_tokens == 5
        assert at.parts() == []


async def test_n_samples_are_segments_that_share_their_prompt() -> None:
    async with opened(Engine("A<e>", "B<e>", "C<e>")) as at:
        answer = await at.openai().chat.completions.create(model="policy", messages=HI, n=3)
        assert [choice.message.content for choice in answer.choices] == ["A", "B", "C"]
        assert at.parts() == [["<u>hi<e><a>", said] for said in ("A<e>", "B<e>", "C<e>")]


async def test_side_calls_to_the_unrecorded_model_leave_no_trace() -> None:
    async with opened(Engine("A<e>"), max_turns=1) as at:
        for _ in range(3):
            await at.openai().chat.completions.create(model="policy-unrecorded", messages=HI)
        await at.openai().chat.completions.create(model="policy", messages=HI)
        assert at.parts() == [["<u>hi<e><a>", "A<e>"]]


async def test_a_judge_on_the_unrecorded_model_is_sampled_as_it_asks() -> None:
    engine = Engine("ABCDEFGH<e>")
    async with opened(engine) as at:
        await at.openai().chat.completions.create(
            model="policy-unrecorded", messages=HI, temperature=0, top_p=0.5, max_tokens=400
        )
        assert engine.samplings == [SamplingConfig(temperature=0, top_p=0.5, max_tokens=400)]
        assert at.recorder.overridden == {}


async def test_a_limit_above_that_of_the_recipe_is_lowered_and_noted() -> None:
    engine = Engine("A<e>")
    async with opened(engine) as at:
        for most in (400, 50, 400):
            await at.openai().chat.completions.create(model="policy", messages=HI, max_tokens=most)
        assert [sampling.max_tokens for sampling in engine.samplings] == [100, 50, 100]
        assert at.recorder.overridden == {"max_tokens": [400]}


async def test_tools_that_no_parser_would_find_calls_of_are_refused() -> None:
    tools: Any = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    engine = Engine("A<e>")
    agent = AgentConfig(entry="a:B", max_context_tokens=1000)
    recorder = Recorder(engine.sample, renderer(), Marks(renderer()), agent, SamplingConfig(), parses_calls=False)
    server = CaptureServer()
    await server.start()
    async with server.open(recorder) as url:
        client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=recorder.key)
        with pytest.raises(openai.BadRequestError, match=r"found tools without engine.tool_parser; allowed: none"):
            await client.chat.completions.create(model="policy", messages=HI, tools=tools)
        await client.chat.completions.create(model="policy", messages=HI, tools=tools, tool_choice="none")
    await server.close()
    assert len(engine.prompts) == 1


def test_names_of_ignored_fields_are_kept_up_to_the_limit_however_often_they_come() -> None:
    recorder = _recorder(Engine("A<e>"))
    many = [f"f{index}" for index in range(60)]
    recorder._name(many)
    recorder._name([*many, "new"])
    assert list(recorder.ignored) == [*many, "new"]


async def test_a_request_decides_length_and_stop_and_the_rollout_the_rest() -> None:
    engine = Engine("ABCDEFGH<e>")
    async with opened(engine) as at:
        answer = await at.openai().chat.completions.create(
            model="policy", messages=HI, max_tokens=3, stop=["x"], temperature=0.25, top_p=0.5, logprobs=True
        )
        assert answer.choices[0].finish_reason == "length" and answer.choices[0].message.content == "ABC"
        logprobs = answer.choices[0].logprobs
        assert logprobs is not None and logprobs.content is not None
        assert [(token.token, token.logprob) for token in logprobs.content] == [
            ("A", -0.125),
            ("B", -0.25),
            ("C", -0.375),
        ]
        assert engine.samplings == [SamplingConfig(max_tokens=3, stop=["x"])]
        assert at.recorder.overridden == {"temperature": [0.25], "top_p": [0.5]}


@pytest.mark.parametrize("wire", ["chat", "responses", "anthropic"])
async def test_a_request_decides_its_temperature_where_that_is_honoured(wire: str) -> None:
    engine = Engine("A<e>")
    async with opened(engine, honor_request_sampling=True) as at:
        for temperature in (0.25, 1.5, None):
            options: dict[str, Any] = {} if temperature is None else {"temperature": temperature}
            await _ask(at, wire, **options)
        assert [sampling.temperature for sampling in engine.samplings] == [0.25, 1.5, 1.0]
        stored = [turn["temperature"] for segment in at.recorder.session.segments() for turn in segment.turns]
        assert stored == [0.25, 1.5, 1.0]
        assert at.recorder.overridden == {}


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"temperature": 0}, "temperature: found 0; allowed: 0.01 and more"),
        ({"temperature": 0.009}, "temperature: found 0.009; allowed: 0.01 and more"),
        ({"top_p": 0.5}, "top_p: found 0.5; allowed: 1, as what is sampled is trained"),
        ({"extra_body": {"top_k": 5}}, "top_k: found 5; allowed: -1"),
    ],
)
async def test_sampling_that_cannot_be_trained_is_refused_where_it_is_honoured(
    options: dict[str, Any], says: str
) -> None:
    engine = Engine("A<e>")
    async with opened(engine, honor_request_sampling=True, max_turns=1) as at:
        with pytest.raises(openai.BadRequestError, match=says):
            await _ask(at, "chat", **options)
        await _ask(at, "chat", model="policy-unrecorded", **options)  # a judge is not trained
        await _ask(at, "chat", temperature=1, top_p=1)
        assert at.parts() == [["<u>hi<e><a>", "A<e>"]], "the refused request has taken no turn"


async def _post(at: Open, wire: str, **fields: Any) -> httpx.Response:
    """A request as it is on the wire, without an SDK that would refuse it."""
    path, key = {"chat": ("chat/completions", "messages"), "responses": ("responses", "input")}.get(
        wire, ("messages", "messages")
    )
    body = {"model": "policy", key: HI, "max_output_tokens" if wire == "responses" else "max_tokens": 99, **fields}
    headers = {"authorization": f"Bearer {at.recorder.key}"}
    async with httpx.AsyncClient(headers=headers, timeout=30.0) as http:
        return await http.post(f"{at.url}/v1/{path}", json=body)


@pytest.mark.parametrize(
    ("wire", "limit", "stop"),
    [
        ("chat", "max_completion_tokens", "stop"),
        ("chat", "max_tokens", "stop"),
        ("responses", "max_output_tokens", "stop"),
        ("anthropic", "max_tokens", "stop_sequences"),
    ],
)
async def test_length_and_stop_are_honoured_on_every_wire(wire: str, limit: str, stop: str) -> None:
    engine = Engine("ABCDEFGH<e>")
    async with opened(engine) as at:
        answer = (await _post(at, wire, **{limit: 3, stop: ["x", "y"]})).json()
        assert engine.samplings == [SamplingConfig(max_tokens=3, stop=["x", "y"])]
        assert {
            "chat": lambda: answer["choices"][0]["finish_reason"],
            "responses": lambda: answer["incomplete_details"]["reason"],
            "anthropic": lambda: answer["stop_reason"],
        }[wire]() == {"chat": "length", "responses": "max_output_tokens", "anthropic": "max_tokens"}[wire]


async def test_the_sequence_that_ended_a_turn_is_told_where_the_wire_has_a_place_for_it() -> None:
    class Stopping(Engine):
        async def sample(self, token_ids: list[int], sampling: SamplingConfig, options: ParseOptions) -> Generation:
            return replace(await super().sample(token_ids, sampling, options), stop=sampling.stop[0])

    async with opened(Stopping("A<e>")) as at:
        answer = (await _post(at, "anthropic", stop_sequences=["END"])).json()
        assert (answer["stop_reason"], answer["stop_sequence"]) == ("stop_sequence", "END")
        assert (await _post(at, "chat", stop="END")).json()["choices"][0]["finish_reason"] == "stop"


@pytest.mark.parametrize("wire", ["chat", "responses", "anthropic"])
async def test_without_tool_choice_calls_are_not_looked_for_but_the_prompt_shows_the_same_tools(wire: str) -> None:
    function = TOOL["function"]
    tools: Any = {
        "chat": [TOOL],
        "responses": [{"type": "function", **function}],  # type: ignore[dict-item]
        "anthropic": [{"name": "add", "description": "a + b", "input_schema": function["parameters"]}],  # type: ignore[index]
    }[wire]
    engine = Engine("A<e>")
    async with opened(engine) as at:
        for choice in ("auto", "none"):
            given = {"type": choice} if wire == "anthropic" else choice
            assert (await _post(at, wire, tools=tools, tool_choice=given)).status_code == 200
    assert [options.tools for options in engine.options] == [[TOOL], []]
    assert engine.prompts[0] == engine.prompts[1] and len(engine.prompts[0]) > 50


@pytest.mark.parametrize("wire", ["chat", "responses", "anthropic"])
async def test_a_seed_is_accepted_and_named_in_the_rollout(wire: str) -> None:
    engine = Engine("A<e>")
    async with opened(engine, honor_request_sampling=True) as at:
        for seed in (3, 3, None, -1):
            assert (await _post(at, wire, seed=seed)).status_code == 200
        refused = await _post(at, wire, seed="x")
        assert refused.status_code == 400 and "seed: found 'x'; allowed: a whole number" in refused.text
    assert at.recorder.overridden == {"seed": [3, -1]}


async def test_usage_is_streamed_only_when_it_is_asked_for() -> None:
    async with opened(Engine("A<e>")) as at:
        for options in ({"stream_options": {"include_usage": True}}, {}):
            stream: Any = await at.openai().chat.completions.create(model="policy", messages=HI, stream=True, **options)  # type: ignore[call-overload]
            chunks = [chunk async for chunk in stream]
            used = [chunk.usage for chunk in chunks if chunk.usage is not None]
            assert [(usage.prompt_tokens, usage.completion_tokens) for usage in used] == ([(5, 2)] if options else [])
            assert all(chunk.choices for chunk in chunks) == (not options)


async def test_several_streamed_choices_and_their_log_probs_are_those_that_are_stored() -> None:
    async with opened(Engine("A<e>", "B<e>")) as at:
        async with at.openai().chat.completions.stream(model="policy", messages=HI, n=2, logprobs=True) as events:  # type: ignore[arg-type]
            choices = (await events.get_final_completion()).choices
        assert [choice.message.content for choice in choices] == ["A", "B"]
        assert at.parts() == [["<u>hi<e><a>", "A<e>"], ["<u>hi<e><a>", "B<e>"]]
        for choice, segment in zip(choices, at.recorder.session.segments(), strict=True):
            assert choice.logprobs is not None and choice.logprobs.content is not None
            assert [token.logprob for token in choice.logprobs.content] == segment.logprobs[5:] == [-1 / 8, -2 / 8]


async def test_log_probs_over_responses_are_included_when_asked_for() -> None:
    async with opened(Engine("A<e>")) as at:
        answer = await at.openai().responses.create(
            model="policy", input="hi", include=["message.output_text.logprobs"]
        )
        (message,) = answer.output
        assert [token.logprob for token in message.content[0].logprobs] == [-1 / 8, -2 / 8]  # type: ignore[union-attr]


@pytest.mark.parametrize("wire", ["chat", "responses", "anthropic"])
async def test_an_image_is_refused_and_takes_no_turn(wire: str) -> None:
    pixel = "data:image/png;base64,iVBORw0KGgo="
    part: Any = {
        "chat": {"type": "image_url", "image_url": {"url": pixel}},
        "responses": {"type": "input_image", "image_url": pixel},
        "anthropic": {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "iVBORw0KGgo="}},
    }[wire]
    async with opened(Engine("A<e>"), max_turns=1) as at:
        messages = [{"role": "user", "content": [part]}]
        refused = await _post(at, wire, **{"input" if wire == "responses" else "messages": messages})
        assert refused.status_code == 400
        assert refused.json()["error"]["message"] == "messages: found an image; allowed: text, as the model"
        assert (await _post(at, wire)).status_code == 200


async def _ask(at: Open, wire: str, **options: Any) -> None:
    asked: Any = {"model": "policy"} | ({} if wire == "anthropic" else options)
    if wire == "chat":
        await at.openai(max_retries=0).chat.completions.create(messages=HI, **asked)
    elif wire == "responses":
        await at.openai(max_retries=0).responses.create(input="hi", **asked)
    else:
        await at.anthropic(max_retries=0).messages.create(messages=HI, max_tokens=9, **asked, extra_body=options)  # type: ignore[arg-type]


# ---- refusals and failures ----


async def test_only_the_own_key_opens_an_open_session() -> None:
    engine = Engine("A<e>")
    async with opened(engine) as at:
        other = _recorder(engine)
        async with at.server.open(other) as url:
            stolen = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=at.recorder.key, max_retries=0)
            with pytest.raises(openai.AuthenticationError, match="unknown or closed session"):
                await stolen.chat.completions.create(model="policy", messages=HI)
        closed = anthropic.AsyncAnthropic(base_url=url, api_key=other.key, max_retries=0)
        with pytest.raises(anthropic.AuthenticationError, match="unknown or closed session"):
            await closed.messages.create(model="policy", messages=HI, max_tokens=5)  # type: ignore[arg-type]
        with pytest.raises(openai.AuthenticationError):
            await at.openai().with_options(api_key="EMPTY").models.list()
    assert engine.prompts == []


async def test_refusals_are_in_the_form_of_the_wire() -> None:
    async with opened(Engine("A<e>"), max_turns=1) as at:
        client = at.openai(max_retries=0)
        with pytest.raises(openai.NotFoundError, match=r"model 'gpt'; allowed: policy"):
            await client.chat.completions.create(model="gpt", messages=HI)
        with pytest.raises(openai.BadRequestError):
            await client.chat.completions.create(model="policy", messages=[])
        await client.chat.completions.create(model="policy", messages=HI)
        with pytest.raises(openai.BadRequestError, match=r"used 1 of its 1 turns \(agent.max_turns\)") as refused:
            await client.chat.completions.create(model="policy", messages=HI)
        assert at.recorder.out_of_turns
        assert (refused.value.type, refused.value.code) == ("invalid_request_error", "turn_limit"), (
            "harnesses retry others"
        )
        with pytest.raises(anthropic.BadRequestError, match="invalid_request_error"):
            await at.anthropic(max_retries=0).messages.create(model="policy", messages=HI, max_tokens=5)  # type: ignore[arg-type]
        async with httpx.AsyncClient() as http:
            for path in ("", "/"):
                assert (await http.get(f"{at.url}{path}")).status_code in (200, 307, 404)
            found = await http.post(f"{at.url}/v1/embeddings", json={})
            assert found.status_code == 404 and "error" in found.json()


async def test_what_does_not_fit_the_context_ends_as_length_and_is_not_lost() -> None:
    async with opened(Engine("A<e>", "B<e>"), max_context_tokens=12) as at:
        client = at.openai()
        messages: Any = [*HI, {"role": "assistant", "content": "A"}]
        await client.chat.completions.create(model="policy", messages=HI)
        long: Any = [*messages, {"role": "user", "content": "too long"}]
        answer = await client.chat.completions.create(model="policy", messages=long)
        assert answer.choices[0].finish_reason == "length" and not answer.choices[0].message.content
        assert at.recorder.session.out_of_context
        assert at.parts() == [["<u>hi<e><a>", "A<e>"]]


async def test_a_failed_generation_leaves_no_trace_and_the_sdk_tries_again() -> None:
    failed = replace(generation([], "abort"), error="out of memory")

    class Failing(Engine):
        async def sample(self, token_ids: list[int], sampling: SamplingConfig, options: ParseOptions) -> Generation:
            sampled = await super().sample(token_ids, sampling, options)
            return failed if len(self.prompts) in (1, 3) else sampled

    async with opened(Failing("A<e>"), max_turns=2) as at:
        client = at.openai()
        for text in ("hi", "go"):
            messages: Any = (
                HI if text == "hi" else [*HI, {"role": "assistant", "content": "A"}, {"role": "user", "content": "go"}]
            )
            await client.chat.completions.create(model="policy", messages=messages)
        assert at.parts() == [["<u>hi<e><a>", "A<e>", "<u>go<e><a>", "A<e>"]]


async def test_a_client_that_gave_up_and_retries_gets_the_turn_that_is_under_way() -> None:
    engine = Engine("A<e>", seconds=0.6)
    async with opened(engine) as at:
        answer = await at.openai(timeout=0.4, max_retries=3).chat.completions.create(model="policy", messages=HI)
        assert answer.choices[0].message.content == "A"
        assert len(engine.prompts) == 1
        assert at.parts() == [["<u>hi<e><a>", "A<e>"]]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("patience", [0.01, 1.0])
async def test_a_client_whose_connection_broke_gets_the_turn_that_was_sampled_for_it(
    monkeypatch: pytest.MonkeyPatch, stream: bool, patience: float
) -> None:
    monkeypatch.setattr(server_module, "PATIENCE_SECONDS", patience)
    may_answer = asyncio.Event()

    class Slow(Engine):
        async def sample(self, token_ids: list[int], sampling: SamplingConfig, options: ParseOptions) -> Generation:
            sampled = await super().sample(token_ids, sampling, options)
            await may_answer.wait()
            return sampled

    engine = Slow("A<e>", "B<e>")
    async with opened(engine) as at:
        asked: Any = {"model": "policy", "messages": HI, "stream": stream}
        body = json.dumps(asked)
        host, port = at.url.removeprefix("http://").partition("/")[0].split(":")
        head = f"POST /s/{at.url.rpartition('/')[2]}/v1/chat/completions HTTP/1.1\r\nhost: x\r\n"
        head += f"authorization: Bearer {at.recorder.key}\r\ncontent-length: {len(body)}\r\n\r\n"
        _, writer = await asyncio.open_connection(host, int(port))
        writer.write((head + body).encode())
        while not engine.prompts:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.05)
        writer.transport.abort()
        async with asyncio.timeout(30):
            while at.recorder.num_active:  # until the server has noticed, long before there is an answer
                await asyncio.sleep(0.01)
        asyncio.get_running_loop().call_later(0.2, may_answer.set)
        async with httpx.AsyncClient(headers={"authorization": f"Bearer {at.recorder.key}"}, timeout=30.0) as http:
            answer = await http.post(f"{at.url}/v1/chat/completions", content=body)
        assert '"content":"A"' in answer.text and len(engine.prompts) == 1
        assert at.parts() == [["<u>hi<e><a>", "A<e>"]]


async def test_servers_take_free_ports_of_loopback_whatever_is_occupied() -> None:
    async with opened(Engine("A<e>")) as one, opened(Engine("B<e>")) as two:
        ports = [int(at.url.split(":")[2].split("/")[0]) for at in (one, two)]
        assert len(set(ports)) == 2 and one.url.startswith("http://127.0.0.1:")
        said = [await at.openai().chat.completions.create(model="policy", messages=HI) for at in (one, two)]
        assert [answer.choices[0].message.content for answer in said] == ["A", "B"]


async def test_equal_requests_without_a_retry_are_new_samples() -> None:
    async with opened(Engine("A<e>", "B<e>")) as at:
        client = at.openai()
        said = [
            (await client.chat.completions.create(model="policy", messages=HI)).choices[0].message.content for _ in "ab"
        ]
        assert said == ["A", "B"]
        assert at.parts() == [["<u>hi<e><a>", "A<e>"], ["<u>hi<e><a>", "B<e>"]]


async def test_a_stream_that_waits_shows_signs_of_life(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "PATIENCE_SECONDS", 0.05)
    monkeypatch.setattr(server_module, "KEEP_ALIVE_SECONDS", 0.05)
    async with opened(Engine("A<e>", seconds=0.3)) as at:
        stream = await at.openai().chat.completions.create(model="policy", messages=HI, stream=True)
        text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream if chunk.choices])
        assert text == "A"
        async with at.anthropic().messages.stream(model="policy", messages=HI, max_tokens=9) as events:  # type: ignore[arg-type]
            assert await events.get_final_text() == "A"


async def test_a_body_that_is_too_large_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "MAX_BODY_BYTES", 1000)
    async with opened(Engine("A<e>")) as at:
        with pytest.raises(openai.APIStatusError) as refused:
            await at.openai(max_retries=0).chat.completions.create(
                model="policy", messages=[{"role": "user", "content": "x" * 2000}]
            )
        assert refused.value.status_code == 413


# ---- agents ----


@pytest.fixture
def run() -> Callable[..., ChatRollout]:
    """One rollout of an agent against scripted turns."""

    def run_one(agent: Any, engine: Engine, label: Any = None, **config: Any) -> ChatRollout:
        return _run_one(agent, engine, Prompt(0, HI, label), **config)

    return run_one


def _run_one(agent: Any, engine: Engine, prompt: Prompt, **config: Any) -> ChatRollout:
    async def main() -> ChatRollout:
        server = CaptureServer()
        await server.start()
        agent_config = AgentConfig(entry="a:B", **({"max_context_tokens": 1000} | config))
        task = GroupTask(0, "0000-000000-0", prompt, 1, SamplingConfig(max_tokens=100), 0)
        with ThreadPoolExecutor(4) as threads:
            try:
                return await run_chat(agent, task, 7, server, _recorder(engine, **config), agent_config, threads)
            finally:
                await server.close()

    return asyncio.run(main())


class Asking(ChatAgent):
    async def run(self, ctx: ChatContext) -> Result:
        client = openai.AsyncOpenAI(base_url=ctx.base_url, api_key=ctx.api_key)
        resp = await client.chat.completions.create(
            model=ctx.model_name,
            messages=[{"role": "user", "content": ctx.prompt}],
            max_tokens=ctx.sampling_params.max_tokens,
            temperature=ctx.sampling_params.temperature,
        )
        return Result(reward=float(resp.choices[0].message.content == ctx.label))


class Blocking(ChatAgent):
    def run(self, ctx: ChatContext) -> Result:
        client = anthropic.Anthropic(base_url=ctx.session_url, api_key=ctx.api_key)
        message = client.messages.create(
            model=ctx.model_name, max_tokens=9, messages=[{"role": "user", "content": ctx.prompt}]
        )
        assert threading.current_thread() is not threading.main_thread()
        return Result(reward=float(message.content[0].text == ctx.label))  # type: ignore[union-attr]


@pytest.mark.parametrize("agent", [Asking, Blocking])
def test_an_agent_trains_as_it_is(run: Callable[..., ChatRollout], agent: Any) -> None:
    rollout = run(agent, Engine("A<e>"), label="A")
    assert (rollout.status, rollout.reward, rollout.error) == (Status.OK, 1.0, None)
    (segment,) = rollout.segments
    assert segment.token_ids == renderer().tokenize("<u>hi<e><a>A<e>")


def test_agents_that_block_every_thread_are_answered() -> None:
    """Nothing that an answer needs may run in the threads that agents block."""

    class Waiting(ChatAgent):
        def ask(self, ctx: ChatContext) -> Result:
            meeting.wait(30)  # all of them are in their threads now
            client = openai.OpenAI(base_url=ctx.base_url, api_key=ctx.api_key)
            answer = client.chat.completions.create(model=ctx.model_name, messages=ctx.messages)  # type: ignore[arg-type]
            return Result(reward=float(answer.choices[0].message.content == "A"))

    class InThreads(Waiting):
        async def run(self, ctx: ChatContext) -> Result:
            return await asyncio.to_thread(self.ask, ctx)

    class InOurs(Waiting):
        def run(self, ctx: ChatContext) -> Result:  # type: ignore[override]
            return self.ask(ctx)

    meeting = threading.Barrier(4)

    async def main() -> list[ChatRollout]:
        server, config = CaptureServer(), AgentConfig(entry="a:B", max_context_tokens=1000, timeout_seconds=60)
        await server.start()
        task = GroupTask(0, "0000-000000-0", Prompt(0, HI), 1, SamplingConfig(max_tokens=100), 0)
        with ThreadPoolExecutor(2) as ours, ThreadPoolExecutor(2) as default:
            asyncio.get_running_loop().set_default_executor(default)
            agents = [InThreads, InThreads, InOurs, InOurs]
            engine = Engine("A<e>", seconds=0.05)
            made = [run_chat(make(agent), task, 7, server, _recorder(engine), config, ours) for agent in agents]
            rollouts = await asyncio.gather(*made)
            await server.close()
            return rollouts

    def make(agent: type[ChatAgent]) -> Callable[[], Any]:
        async def made() -> ChatAgent:
            return agent()

        return made

    assert [(rollout.status, rollout.reward, rollout.error) for rollout in asyncio.run(main())] == [
        (Status.OK, 1.0, None)
    ] * 4


def test_what_has_no_effect_is_named_in_the_rollout() -> None:
    class Fussy(ChatAgent):
        async def run(self, ctx: ChatContext) -> Result:
            client = openai.AsyncOpenAI(base_url=ctx.base_url, api_key=ctx.api_key)
            search: Any = {"type": "web_search"}
            asked: Any = {"model": ctx.model_name, "input": "hi", "temperature": 0.5, "extra_body": {"seed": 4}}
            await client.responses.create(**asked, parallel_tool_calls=False, tools=[search])
            await client.responses.create(**asked, store=True, tools=[search])
            return Result(reward=1.0, info={"mine": 1})

    assert _run_one(Fussy, Engine("A<e>"), Prompt(0, HI)).info == {
        "mine": 1,
        "overridden_sampling": {"temperature": [0.5], "seed": [4]},
        "ignored_request_fields": ["parallel_tool_calls", "tools.web_search", "store"],
    }


PIXEL = "data:image/png;base64,iVBORw0KGgo="


@pytest.mark.parametrize(
    ("content", "prompt", "images"),
    [
        ("what?", "what?", []),
        ([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "a\nb", []),
        ([{"type": "image_url", "image_url": {"url": PIXEL}}, {"type": "text", "text": "what?"}], "what?", [PIXEL]),
        ([{"type": "text", "text": "a"}, {"type": "input_image", "image_url": PIXEL}], "a", [PIXEL]),
        ([{"type": "image_url", "image_url": {"url": PIXEL}}], "", [PIXEL]),
        ([], "", []),
    ],
)
def test_the_prompt_of_a_row_with_images_is_text_and_its_images_are_beside_it(
    content: Any, prompt: str, images: list[str]
) -> None:
    seen: list[ChatContext] = []

    class Looking(ChatAgent):
        async def run(self, ctx: ChatContext) -> Result:
            seen.append(ctx)
            client = openai.AsyncOpenAI(base_url=ctx.base_url, api_key=ctx.api_key)
            await client.chat.completions.create(model=ctx.model_name, messages=HI)
            return Result(reward=1.0)

    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": content}]
    rollout = _run_one(Looking, Engine("A<e>"), Prompt(0, messages))
    assert rollout.status == Status.OK
    assert (seen[0].prompt, seen[0].images, seen[0].messages) == (prompt, images, messages)


@pytest.mark.parametrize(
    ("result", "error"),
    [
        (
            Result(reward=1.0, images=[PIXEL]),
            "the agent returned 1 images; allowed: none, as the model reads text only",
        ),
        (
            Result(reward=1.0, sampling_params={"temperature": 0.5}),
            "a ChatAgent returned sampling_params; allowed: none, its requests decide how it goes on",
        ),
        (
            Result(reward=1.0, observation="go on", terminated=False),
            "a ChatAgent returned an observation, terminated=False; allowed: none, its requests decide how it goes on",
        ),
    ],
)
def test_what_a_chat_agent_cannot_decide_at_its_end_is_refused(
    run: Callable[..., ChatRollout], result: Result, error: str
) -> None:
    class Returning(Asking):
        async def run(self, ctx: ChatContext) -> Result:
            await super().run(ctx)
            return result

    rollout = run(Returning, Engine("A<e>"))
    assert (rollout.status, rollout.reward, rollout.error) == (Status.AGENT_ERROR, None, error)


def test_agents_that_end_badly_are_recorded_outcomes(run: Callable[..., ChatRollout]) -> None:
    class Raising(ChatAgent):
        async def run(self, ctx: ChatContext) -> Result:
            raise ValueError("no")

    class Silent(ChatAgent):
        async def run(self, ctx: ChatContext) -> Result:
            return Result(reward=1.0)

    class Rewardless(Asking):
        async def run(self, ctx: ChatContext) -> Result:
            await super().run(ctx)
            return Result()

    class Hanging(ChatAgent):
        async def run(self, ctx: ChatContext) -> Result:
            await asyncio.sleep(60)
            return Result(reward=1.0)

    for agent, status in (
        (Raising, Status.AGENT_ERROR),
        (Silent, Status.AGENT_ERROR),
        (Rewardless, Status.NO_REWARD),
        (Hanging, Status.TIMEOUT),
    ):
        rollout = run(agent, Engine("A<e>"), timeout_seconds=1.0)
        assert (rollout.status, rollout.reward) == (status, None), agent


def test_a_dead_engine_is_not_the_agents_doing(run: Callable[..., ChatRollout]) -> None:
    with pytest.raises(WorkerError, match="gone"):
        run(Asking, Engine(WorkerError("the engine is gone")), timeout_seconds=30.0)


def test_an_agent_whose_last_turn_ended_at_its_limit_is_truncated(run: Callable[..., ChatRollout]) -> None:
    assert run(Asking, Engine("A" * 101 + "<e>"), label="A" * 100).status is Status.TRUNCATED
    assert run(Asking, Engine("A" * 99 + "<e>"), label="A" * 99).status is Status.OK


def test_an_agent_that_lets_the_end_of_its_turns_through_has_no_reward_and_says_why(
    run: Callable[..., ChatRollout],
) -> None:
    class Endless(Asking):
        async def run(self, ctx: ChatContext) -> Result:
            for _ in range(3):
                await super().run(ctx)
            return Result(reward=1.0)

    rollout = run(Endless, Engine("A<e>"), max_turns=2)
    assert (rollout.status, rollout.reward, len(rollout.segments)) == (Status.AGENT_ERROR, None, 2)
    assert rollout.error is not None
    assert rollout.error.startswith("after its 2 turns (agent.max_turns) were used: BadRequestError")


def test_a_first_prompt_without_room_is_said_to_be_too_long(run: Callable[..., ChatRollout]) -> None:
    rollout = run(Asking, Engine("A<e>"), max_context_tokens=3)
    assert (rollout.status, rollout.reward) == (Status.PROMPT_TOO_LONG, None)
    assert rollout.error == "no request left room below agent.max_context_tokens = 3"


def test_an_agent_whose_turn_was_cut_off_is_truncated(run: Callable[..., ChatRollout]) -> None:
    rollout = run(Asking, Engine("ABCDEFGHIJ<e>"), label="ABCDE", max_context_tokens=10)
    assert (rollout.status, rollout.reward) == (Status.TRUNCATED, 1.0)
