"""The real SDKs parse what the codecs write, and what they send back is read as the turn that was said."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import anthropic as anthropic_sdk
import httpx2
import openai
import pytest

from schemas.chat import ChatError, ChatRequest, Choice, ParsedTurn, Reply, TokenLogprob, ToolCall
from stages.capture import anthropic, models, openai_chat, openai_responses, writing

CODECS = {
    "/v1/chat/completions": openai_chat,
    "/v1/responses": openai_responses,
    "/v1/messages": anthropic,
}
TURN = ParsedTurn(
    content="I look at the files, é and 😀. " * 9,
    reasoning="Files first. " * 9,
    tool_calls=(
        ToolCall("call_a", "bash", '{ "cmd":"ls", "n": 1.50 }'),
        ToolCall("call_b", "bash", json.dumps({"cmd": "é" * 99})),
    ),
)
TOOL = {"name": "bash", "description": "Runs.", "parameters": {"type": "object", "properties": {}}}
ARGUMENTS = [{"cmd": "ls", "n": 1.5}, {"cmd": "é" * 99}]


def reply(*turns: ParsedTurn, finish: Any = "stop", **choice: Any) -> Reply:
    return Reply("0f", 1_700_000_000, "policy", tuple(Choice(turn, finish, **choice) for turn in turns), 11, 7)


class Server:
    """Answers as a server on the codecs would, and keeps what it read."""

    def __init__(self, answer: Reply | ChatError, begin_stream: bool = False) -> None:
        self.answer = answer
        self.begin_stream = begin_stream
        self.requests: list[ChatRequest] = []

    def __call__(self, http: httpx2.Request) -> httpx2.Response:
        is_anthropic = "anthropic-version" in http.headers
        path = http.url.path
        if path.startswith("/v1/models"):
            name = path.removeprefix("/v1/models").strip("/")
            try:
                found = (
                    models.retrieved(name, ["policy"], 0, is_anthropic)
                    if name
                    else models.listed(["policy"], 0, is_anthropic)
                )
            except ChatError as failure:
                return self._failed(anthropic if is_anthropic else openai_chat, failure)
            return httpx2.Response(200, json=found)
        codec: Any = CODECS[path.removesuffix("/count_tokens")]
        try:
            decode = codec.decode_count if path.endswith("/count_tokens") else codec.decode
            request = decode(json.loads(http.content))
        except ChatError as failure:
            return self._failed(codec, failure)
        self.requests.append(request)
        if path.endswith("/count_tokens"):
            return httpx2.Response(200, json=anthropic.count(11))
        if isinstance(self.answer, ChatError):
            if not self.begin_stream:
                return self._failed(codec, self.answer)
            return self._stream([codec.keep_alive(), codec.error_event(self.answer)])
        if request.stream:
            return self._stream([codec.keep_alive(), *codec.events(self.answer, request)])
        return httpx2.Response(200, json=codec.encode(self.answer, request))

    def _failed(self, codec: Any, failure: ChatError) -> httpx2.Response:
        status, body = codec.error(failure)
        return httpx2.Response(status, json=body)

    def _stream(self, chunks: list[str]) -> httpx2.Response:
        return httpx2.Response(200, headers={"content-type": "text/event-stream"}, content="".join(chunks).encode())


def openai_client(server: Server) -> openai.OpenAI:
    client = httpx2.Client(transport=httpx2.MockTransport(server))
    return openai.OpenAI(api_key="k", base_url="http://x/v1", http_client=client, max_retries=0)


def anthropic_client(server: Server) -> anthropic_sdk.Anthropic:
    client = httpx2.Client(transport=httpx2.MockTransport(server))
    return anthropic_sdk.Anthropic(api_key="k", base_url="http://x", http_client=client, max_retries=0)


CHAT: dict[str, Any] = {
    "model": "policy",
    "messages": [{"role": "user", "content": "go"}],
    "tools": [{"type": "function", "function": TOOL}],
}
RESPONSES: dict[str, Any] = {
    "model": "policy",
    "input": [{"role": "user", "content": "go"}],
    "tools": [{"type": "function", "strict": False, **TOOL}],
    "store": False,
}
MESSAGES: dict[str, Any] = {
    "model": "policy",
    "max_tokens": 99,
    "messages": [{"role": "user", "content": "go"}],
    "tools": [{"name": "bash", "description": "Runs.", "input_schema": TOOL["parameters"]}],
}


def echoed(server: Server) -> dict[str, Any]:
    """The assistant message of the last request, after checking that its tool answers follow it."""
    *_, said, first, second = server.requests[-1].messages
    assert [message["tool_call_id"] for message in (first, second)] == [call["id"] for call in said["tool_calls"]]
    return said


def chat_whole(client: openai.OpenAI) -> Any:
    return client.chat.completions.create(**CHAT)


def chat_streamed(client: openai.OpenAI) -> Any:
    with client.chat.completions.stream(**CHAT, stream_options={"include_usage": True}) as stream:
        stream.until_done()
        return stream.get_final_completion()


@pytest.mark.parametrize("ask", [chat_whole, chat_streamed])
def test_chat_completions(ask: Callable[[openai.OpenAI], Any]):
    server = Server(reply(TURN))
    client = openai_client(server)
    completion = ask(client)
    message = completion.choices[0].message
    assert (message.content, message.reasoning_content) == (TURN.content, TURN.reasoning)
    assert [(call.id, json.loads(call.function.arguments)) for call in message.tool_calls] == [
        ("call_a", ARGUMENTS[0]),
        ("call_b", ARGUMENTS[1]),
    ]
    assert completion.choices[0].finish_reason == "tool_calls"
    assert (completion.usage.prompt_tokens, completion.usage.completion_tokens) == (11, 7)
    answers = [{"role": "tool", "tool_call_id": call.id, "content": "1"} for call in message.tool_calls]
    client.chat.completions.create(**CHAT | {"messages": [*CHAT["messages"], message, *answers]})
    assert echoed(server) == writing.assistant_message(writing.spoken(reply(TURN), 0))


def test_chat_completions_with_choices_and_logprobs_streamed():
    tokens = (TokenLogprob("Hi", 5, -0.5), TokenLogprob("!", 6, -0.25))
    server = Server(reply(ParsedTurn("Hi!"), ParsedTurn("Hi!"), logprobs=tokens))
    with openai_client(server).chat.completions.stream(
        model="policy", messages=CHAT["messages"], n=2, logprobs=True
    ) as stream:
        stream.until_done()
        choices = stream.get_final_completion().choices
    assert [choice.message.content for choice in choices] == ["Hi!", "Hi!"]
    assert [[token.logprob for token in choice.logprobs.content] for choice in choices] == [[-0.5, -0.25]] * 2


async def test_chat_completions_over_the_asynchronous_client():
    http = httpx2.AsyncClient(transport=httpx2.MockTransport(Server(reply(TURN))))
    client = openai.AsyncOpenAI(api_key="k", base_url="http://x/v1", http_client=http)
    chunks = [chunk async for chunk in await client.chat.completions.create(**CHAT, stream=True)]
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == TURN.content


def responses_whole(client: openai.OpenAI) -> Any:
    return client.responses.create(**RESPONSES)


def responses_streamed(client: openai.OpenAI) -> Any:
    with client.responses.stream(**RESPONSES) as stream:
        return stream.get_final_response()


@pytest.mark.parametrize("ask", [responses_whole, responses_streamed])
def test_responses(ask: Callable[[openai.OpenAI], Any]):
    server = Server(reply(TURN))
    client = openai_client(server)
    response = ask(client)
    assert [item.type for item in response.output] == ["reasoning", "message", "function_call", "function_call"]
    assert response.output_text == TURN.content and response.output[0].content[0].text == TURN.reasoning
    calls = response.output[2:]
    assert [json.loads(call.arguments) for call in calls] == ARGUMENTS
    assert (response.status, response.usage.input_tokens, response.usage.output_tokens) == ("completed", 11, 7)
    answers = [{"type": "function_call_output", "call_id": call.call_id, "output": "1"} for call in calls]
    items = [*RESPONSES["input"], *(item.model_dump() for item in response.output), *answers]
    client.responses.create(**RESPONSES | {"input": items})
    assert echoed(server) == writing.assistant_message(writing.spoken(reply(TURN), 0))


def test_responses_deltas_are_the_text():
    stream = openai_client(Server(reply(TURN))).responses.create(**RESPONSES, stream=True)
    texts: dict[str, str] = {}
    for event in stream:
        if event.type.endswith(".delta"):
            texts[f"{event.type} {event.item_id}"] = texts.get(f"{event.type} {event.item_id}", "") + event.delta
    assert list(texts.values()) == [TURN.reasoning, TURN.content, *(call.arguments for call in TURN.tool_calls)]


def test_a_response_that_was_cut_off():
    client = openai_client(Server(reply(ParsedTurn("cut"), finish="length")))
    response = client.responses.create(**RESPONSES)
    assert (response.status, response.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert [event.type for event in client.responses.create(**RESPONSES, stream=True)][-1] == "response.incomplete"


def messages_whole(client: anthropic_sdk.Anthropic) -> Any:
    return client.messages.create(**MESSAGES)


def messages_streamed(client: anthropic_sdk.Anthropic) -> Any:
    with client.messages.stream(**MESSAGES) as stream:
        return stream.get_final_message()


@pytest.mark.parametrize("ask", [messages_whole, messages_streamed])
def test_messages(ask: Callable[[anthropic_sdk.Anthropic], Any]):
    server = Server(reply(TURN))
    client = anthropic_client(server)
    message = ask(client)
    assert [block.type for block in message.content] == ["thinking", "text", "tool_use", "tool_use"]
    assert (message.content[0].thinking, message.content[1].text) == (TURN.reasoning, TURN.content)
    assert message.content[0].signature, "pydantic-ai sends unsigned thinking back as text of the user"
    assert [block.input for block in message.content[2:]] == ARGUMENTS
    assert (message.stop_reason, message.usage.input_tokens, message.usage.output_tokens) == ("tool_use", 11, 7)
    answers = [{"type": "tool_result", "tool_use_id": block.id, "content": "1"} for block in message.content[2:]]
    history = [{"role": "assistant", "content": message.content}, {"role": "user", "content": answers}]
    client.messages.create(**MESSAGES | {"messages": [*MESSAGES["messages"], *history]})
    assert echoed(server) == writing.assistant_message(writing.spoken(reply(TURN), 0))


async def test_messages_over_the_asynchronous_client():
    http = httpx2.AsyncClient(transport=httpx2.MockTransport(Server(reply(TURN))))
    client = anthropic_sdk.AsyncAnthropic(api_key="k", base_url="http://x", http_client=http)
    async with client.messages.stream(**MESSAGES) as stream:
        assert "".join([text async for text in stream.text_stream]) == TURN.content


def test_messages_stop_at_a_sequence():
    message = anthropic_client(Server(reply(ParsedTurn("x"), stop_sequence="END"))).messages.create(**MESSAGES)
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", "END")


def test_count_tokens():
    counted = anthropic_client(Server(reply(TURN))).messages.count_tokens(
        model="policy", system="Be brief.", messages=MESSAGES["messages"], tools=MESSAGES["tools"]
    )
    assert counted.input_tokens == 11


def test_models():
    server = Server(reply(TURN))
    assert [model.id for model in openai_client(server).models.list()] == ["policy"]
    assert openai_client(server).models.retrieve("policy").owned_by == "moltflow"
    assert [model.id for model in anthropic_client(server).models.list()] == ["policy"]
    assert anthropic_client(server).models.retrieve("policy").created_at.year == 1970
    with pytest.raises(openai.NotFoundError):
        openai_client(server).models.retrieve("gpt")
    with pytest.raises(anthropic_sdk.NotFoundError):
        anthropic_client(server).models.retrieve("claude")


FAILURES = [
    (400, "invalid_request", "BadRequestError"),
    (400, "context_length", "BadRequestError"),
    (401, "authentication", "AuthenticationError"),
    (404, "not_found", "NotFoundError"),
    (413, "too_large", "APIStatusError"),
    (503, "overloaded", "InternalServerError"),
    (500, "engine", "InternalServerError"),
]


@pytest.mark.parametrize(("status", "code", "name"), FAILURES)
def test_failures_are_the_errors_of_the_sdks(status, code, name):
    server = Server(ChatError(status, code, "what happened", "messages"))
    for ask in (chat_whole, responses_whole):
        with pytest.raises(getattr(openai, name)) as caught:
            ask(openai_client(server))
        assert caught.value.status_code == status and caught.value.body["message"] == "what happened"
        assert caught.value.param == "messages"
    with pytest.raises(getattr(anthropic_sdk, name)) as other:
        messages_whole(anthropic_client(server))
    assert other.value.status_code == status and other.value.body["error"]["message"] == "what happened"


def test_a_wrong_request_is_a_bad_request():
    with pytest.raises(openai.BadRequestError, match="tool_choice: found 'required'; allowed: auto or none"):
        openai_client(Server(reply(TURN))).chat.completions.create(**CHAT, tool_choice="required")
    with pytest.raises(anthropic_sdk.BadRequestError, match="tool_choice"):
        anthropic_client(Server(reply(TURN))).messages.create(**MESSAGES, tool_choice={"type": "any"})


def test_failures_inside_a_stream_are_raised():
    server = Server(ChatError(500, "engine", "what happened"), begin_stream=True)
    with pytest.raises(openai.APIError, match="what happened"):
        list(openai_client(server).chat.completions.create(**CHAT, stream=True))
    with pytest.raises(openai.APIError, match="what happened"):
        list(openai_client(server).responses.create(**RESPONSES, stream=True))
    with pytest.raises(anthropic_sdk.APIError, match="what happened"):
        list(anthropic_client(server).messages.create(**MESSAGES, stream=True))
