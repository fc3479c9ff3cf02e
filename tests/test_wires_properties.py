"""For any JSON a request is read or refused; for any turn the stream is the reply, and its echo is the turn."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from schemas.chat import ChatError, ChatRequest, Choice, ParsedTurn, Reply, ToolCall
from stages.capture import anthropic, openai_chat, openai_responses, writing
from tests.test_wires_codecs import PIXEL, WIRES, parsed
from tests.test_wires_sdks import CHAT, MESSAGES, RESPONSES

scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters(), max_size=8)
jsons = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=12,
)
WORDS = (
    "auto none user assistant tool system function text image image_url tool_use tool_result thinking reasoning "
    "message function_call function_call_output"
)
odd = jsons | st.sampled_from([{}, [], "", 0, -1, 2**70, 1e308, *WORDS.split(" ")])
HISTORIES: dict[str, dict[str, Any]] = {
    "chat": CHAT
    | {
        "messages": [
            {"role": "system", "content": "s"},
            {
                "role": "user",
                "content": [{"type": "text", "text": "go"}, {"type": "image_url", "image_url": {"url": PIXEL}}],
            },
            {
                "role": "assistant",
                "content": None,
                "reasoning_content": "r",
                "tool_calls": [{"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}],
            },
            {"role": "tool", "tool_call_id": "a", "content": "1"},
        ],
        "tool_choice": "auto",
        "stop": ["END"],
        "n": 1,
        "max_tokens": 5,
        "stream_options": {"include_usage": True},
        "response_format": {"type": "text"},
        "logit_bias": {},
    },
    "responses": RESPONSES
    | {
        "input": [
            {"role": "user", "content": [{"type": "input_text", "text": "go"}]},
            {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "r"}]},
            {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "t"}]},
            {"type": "function_call", "call_id": "a", "name": "f", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "a", "output": "1"},
        ],
        "include": [],
        "text": {"format": {"type": "text"}},
        "tool_choice": "auto",
    },
    "anthropic": MESSAGES
    | {
        "system": [{"type": "text", "text": "s"}],
        "messages": [
            {
                "role": "user",
                "content": [{"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "x"}}],
            },
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "r", "signature": ""},
                    {"type": "text", "text": "t"},
                    {"type": "tool_use", "id": "a", "name": "f", "input": {}},
                ],
            },
            {
                "role": "user",
                "content": [{"type": "tool_result", "tool_use_id": "a", "content": "1", "is_error": True}],
            },
        ],
        "tool_choice": {"type": "auto"},
        "stop_sequences": ["END"],
        "output_config": {"format": None},
    },
}


def read_or_refused(wire: str, body: Any) -> None:
    try:
        read = WIRES[wire].decode(body)
    except ChatError as failure:
        status, answer = WIRES[wire].error(failure)
        assert status == 400 and len(json.dumps(answer)) < 2_000
        return
    assert isinstance(read, ChatRequest) and read.messages
    for message in read.messages:
        assert message["role"] in ("system", "user", "assistant", "tool") and "content" in message
        for call in message.get("tool_calls", ()):
            assert isinstance(call["function"]["arguments"], dict | str) and call["id"]
    json.dumps([read.messages, read.tools], allow_nan=False, ensure_ascii=False).encode()


@pytest.mark.parametrize("wire", WIRES)
@given(body=odd | st.dictionaries(st.sampled_from([*CHAT, *RESPONSES, *MESSAGES, "system", "n", "stop"]), odd))
def test_any_json_is_read_or_refused(wire, body):
    read_or_refused(wire, body)


@st.composite
def mutated(draw: st.DrawFn, wire: str) -> Any:
    """A valid body with a few places replaced, removed or doubled."""
    body = copy.deepcopy(HISTORIES[wire])
    for _ in range(draw(st.integers(1, 3))):
        node: Any = body
        for _ in range(draw(st.integers(0, 5))):
            inner = [
                value for value in (node.values() if isinstance(node, dict) else node) if isinstance(value, dict | list)
            ]
            if not any(inner):
                break
            node = draw(st.sampled_from([value for value in inner if value]))
        key = draw(st.sampled_from(sorted(node) if isinstance(node, dict) else range(len(node))))
        what = draw(st.sampled_from(["replace", "remove", "double"]))
        if what == "replace":
            node[key] = draw(odd)
        elif what == "remove" and len(node) > 1:
            del node[key]
        elif isinstance(node, list):
            node.insert(key, copy.deepcopy(node[key]))
    return body


@pytest.mark.parametrize("wire", WIRES)
@given(data=st.data())
@settings(max_examples=200)
def test_a_mutated_body_is_read_or_refused(wire, data):
    read_or_refused(wire, data.draw(mutated(wire)))


texts = st.text(st.characters(codec="utf-8"), max_size=200)
objects = st.dictionaries(texts, jsons.filter(lambda value: not has_odd_numbers(value)), max_size=3).map(json.dumps)
calls = st.builds(
    ToolCall, id=st.sampled_from(["", "a", "b"]), name=st.sampled_from(["f", "g"]), arguments=objects | texts
)
turns = st.builds(ParsedTurn, content=texts, reasoning=texts, tool_calls=st.lists(calls, max_size=4).map(tuple))


def has_odd_numbers(value: Any) -> bool:
    try:
        json.dumps(value, allow_nan=False)
    except ValueError:
        return True
    return False


def said(turn: ParsedTurn) -> Reply:
    return Reply("0f", 0, "policy", (Choice(turn, "stop"),), prompt_tokens=1, completion_tokens=1)


@given(turn=turns)
def test_a_chat_stream_adds_up_to_the_message_and_its_echo_to_the_turn(turn):
    read = openai_chat.decode(CHAT)
    message = openai_chat.encode(said(turn), read)["choices"][0]["message"]
    built: dict[str, Any] = {}
    for chunk in parsed(openai_chat.events(said(turn), read))[:-1]:
        delta = chunk["choices"][0]["delta"]
        for name in ("content", "reasoning_content"):
            if delta.get(name) is not None:
                built[name] = built.get(name, "") + delta[name]
        for call in delta.get("tool_calls", ()):
            if "id" in call:
                built.setdefault("tool_calls", []).append({name: call[name] for name in ("id", "type", "function")})
            else:
                built["tool_calls"][call["index"]]["function"]["arguments"] += call["function"]["arguments"]
    assert built == {name: value for name, value in message.items() if value is not None and name != "role"}
    echo = openai_chat.decode(CHAT | {"messages": [*CHAT["messages"], json.loads(json.dumps(message))]})
    assert echo.messages[1] == writing.assistant_message(writing.spoken(said(turn), 0))


@given(turn=turns)
def test_a_messages_stream_adds_up_to_the_blocks_and_its_echo_to_the_turn(turn):
    read = anthropic.decode(MESSAGES)
    whole = anthropic.encode(said(turn), read)["content"]
    blocks: list[Any] = []
    for event in parsed(anthropic.events(said(turn), read)):
        if event["type"] == "content_block_start":
            blocks.append(event["content_block"])
        elif event["type"] == "content_block_delta":
            assert event["index"] == len(blocks) - 1
            field, piece = next((name, value) for name, value in event["delta"].items() if name != "type")
            field = "input" if field == "partial_json" else field
            blocks[-1][field] = (blocks[-1][field] or "") + piece
        elif event["type"] == "content_block_stop" and blocks[-1]["type"] == "tool_use":
            blocks[-1]["input"] = json.loads(blocks[-1]["input"])
    assert blocks == whole
    history = [*MESSAGES["messages"], {"role": "assistant", "content": whole}, {"role": "user", "content": "on"}]
    echo = anthropic.decode(MESSAGES | {"messages": json.loads(json.dumps(history))})
    assert echo.messages[1] == writing.assistant_message(writing.spoken(said(turn), 0))


@given(turn=turns)
def test_a_responses_stream_adds_up_to_the_items_and_their_echo_to_the_turn(turn):
    read = openai_responses.decode(RESPONSES)
    whole = openai_responses.encode(said(turn), read)
    *events, last = parsed(openai_responses.events(said(turn), read))
    assert last["response"] == whole
    assert [event["item"] for event in events if event["type"] == "response.output_item.done"] == whole["output"]
    deltas: dict[str, str] = {}
    for event in events:
        if event["type"].endswith(".delta"):
            deltas[event["item_id"]] = deltas.get(event["item_id"], "") + event["delta"]
    for item in whole["output"]:
        text = item["arguments"] if item["type"] == "function_call" else item["content"][0]["text"]
        assert deltas.get(item["id"], "") == text
    echo = openai_responses.decode(
        RESPONSES | {"input": [*RESPONSES["input"], *json.loads(json.dumps(whole["output"]))]}
    )
    assert echo.messages[1] == writing.assistant_message(writing.spoken(said(turn), 0))
