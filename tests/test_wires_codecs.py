"""Golden requests and replies of each wire, worked out by hand."""

from __future__ import annotations

import json
from typing import Any

import pytest

from schemas.chat import ChatError, ChatRequest, Choice, ParsedTurn, Reply, RequestSampling, TokenLogprob, ToolCall
from stages.capture import anthropic, models, openai_chat, openai_responses, reading, writing

WIRES = {"chat": openai_chat, "responses": openai_responses, "anthropic": anthropic}
PIXEL = "data:image/png;base64,iVBORw0KGgo="
CALLS = (ToolCall("call_a", "bash", '{"cmd": "ls"}'), ToolCall("call_b", "read", '{ "path":"é.txt" }'))
TURN = ParsedTurn(content="I look.", reasoning="Files first.", tool_calls=CALLS)


def reply(*turns: ParsedTurn, finish: Any = "stop", **choice: Any) -> Reply:
    choices = tuple(Choice(turn, finish, **choice) for turn in turns)
    return Reply("0f", 1_700_000_000, "policy", choices, prompt_tokens=11, completion_tokens=7)


def request(wire: str, **fields: Any) -> ChatRequest:
    key = "input" if wire == "responses" else "messages"
    return WIRES[wire].decode({"model": "policy", key: [{"role": "user", "content": "hi"}], **fields})


def refused(wire: str, **fields: Any) -> ChatError:
    with pytest.raises(ChatError) as caught:
        request(wire, **fields)
    return caught.value


def parsed(chunks: Any) -> list[Any]:
    """The data of SSE chunks, checked against their event names."""
    found = []
    for chunk in chunks:
        *event, data = chunk.removesuffix("\n\n").split("\n")
        value = data.removeprefix("data: ")
        found.append(value if value == "[DONE]" else json.loads(value))
        if event:
            assert event == [f"event: {found[-1]['type']}"]
    return found


def test_chat_reads_every_role():
    body = {
        "model": "policy",
        "messages": [
            {"role": "system", "content": "One."},
            {"role": "developer", "content": [{"type": "text", "text": "Two."}, {"type": "text", "text": "Three."}]},
            {
                "role": "user",
                "content": [{"type": "text", "text": "See"}, {"type": "image_url", "image_url": {"url": PIXEL}}],
            },
            {
                "role": "assistant",
                "content": None,
                "reasoning": "Hm.",
                "refusal": None,
                "tool_calls": [
                    {"id": "a", "type": "function", "function": {"name": "f", "arguments": '{"x":1}'}},
                    {"id": "b", "type": "function", "function": {"name": "g", "arguments": ""}},
                ],
            },
            {"role": "tool", "tool_call_id": "a", "content": "1", "name": "f"},
            {"role": "tool", "tool_call_id": "b", "content": [{"type": "text", "text": "2"}]},
            {"role": "system", "content": "Late."},
        ],
        "tools": [
            {
                "type": "function",
                "function": {"name": "f", "description": "d", "parameters": {"type": "object"}, "strict": True},
            },
            {"type": "custom", "custom": {"name": "raw"}},
        ],
        "tool_choice": "none",
        "max_tokens": 9,
        "max_completion_tokens": 8,
        "temperature": 0,
        "top_p": 0.5,
        "top_k": 0,
        "seed": 3,
        "stop": "END",
        "n": 2,
        "logprobs": True,
        "stream": True,
        "stream_options": {"include_usage": True, "include_obfuscation": False},
        "response_format": {"type": "text"},
        "presence_penalty": 0.0,
        "logit_bias": {},
        "metadata": {"a": "b"},
        "user": None,
    }
    assert openai_chat.decode(body) == ChatRequest(
        model="policy",
        messages=[
            {"role": "system", "content": "One.\n\nTwo.\nThree."},
            {"role": "user", "content": [{"type": "text", "text": "See"}, {"type": "image", "url": PIXEL}]},
            {
                "role": "assistant",
                "content": "",
                "reasoning_content": "Hm.",
                "tool_calls": [
                    {"id": "a", "type": "function", "function": {"name": "f", "arguments": {"x": 1}}},
                    {"id": "b", "type": "function", "function": {"name": "g", "arguments": {}}},
                ],
            },
            {"role": "tool", "tool_call_id": "a", "content": "1"},
            {"role": "tool", "tool_call_id": "b", "content": "2"},
            {"role": "system", "content": "Late."},
        ],
        tools=[
            {"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object"}}},
        ],
        tool_choice="none",
        sampling=RequestSampling(temperature=0, top_p=0.5, top_k=-1, max_tokens=8, stop=("END",), seed=3),
        n=2,
        logprobs=True,
        stream=True,
        include_usage=True,
        ignored=("metadata", "messages.name", "tools.strict", "tools.custom", "stream_options.include_obfuscation"),
    )


def test_anthropic_reads_blocks_in_the_order_that_templates_want():
    body = {
        "model": "policy",
        "max_tokens": 32000,
        "system": [
            {"type": "text", "text": "A"},
            {"type": "text", "text": "B", "cache_control": {"type": "ephemeral"}},
        ],
        "messages": [
            {"role": "user", "content": "go"},
            {"role": "system", "content": "Late."},
            {
                "role": "assistant",
                "content": [
                    {"type": "redacted_thinking", "data": "x"},
                    {"type": "thinking", "thinking": "Hm.", "signature": "s"},
                    {"type": "text", "text": "ok"},
                    {"type": "tool_use", "id": "t1", "name": "f", "input": {"x": 1}},
                ],
            },
            {"role": "assistant", "content": [{"type": "tool_use", "id": "t2", "name": "f", "input": {}}]},
            {
                "role": "user",
                "content": [
                    {
                        "type": "tool_result",
                        "tool_use_id": "t1",
                        "content": [{"type": "text", "text": "1"}],
                        "is_error": False,
                    },
                    {"type": "tool_result", "tool_use_id": "t2", "is_error": True},
                    {"type": "text", "text": "and"},
                    {"type": "text", "text": "then"},
                    {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "iVBORw0KGgo="}},
                ],
            },
        ],
        "tools": [
            {"name": "f", "description": "d", "input_schema": {"type": "object"}},
            {"type": "web_search_20250305", "name": "web_search"},
        ],
        "tool_choice": {"type": "auto", "disable_parallel_tool_use": True},
        "stop_sequences": ["END"],
        "thinking": {"type": "adaptive"},
    }
    read = anthropic.decode(body)
    assert read.messages == [
        {"role": "system", "content": "A\nB"},
        {"role": "user", "content": "go"},
        {"role": "system", "content": "Late."},
        {
            "role": "assistant",
            "content": "ok",
            "reasoning_content": "Hm.",
            "tool_calls": [
                {"id": "t1", "type": "function", "function": {"name": "f", "arguments": {"x": 1}}},
                {"id": "t2", "type": "function", "function": {"name": "f", "arguments": {}}},
            ],
        },
        {"role": "tool", "tool_call_id": "t1", "content": "1"},
        {"role": "tool", "tool_call_id": "t2", "content": ""},
        {"role": "user", "content": [{"type": "text", "text": "and\nthen"}, {"type": "image", "url": PIXEL}]},
    ]
    assert read.tools == [
        {"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object"}}}
    ]
    assert read.sampling == RequestSampling(max_tokens=32000, stop=("END",))
    assert set(read.ignored) == {
        "thinking",
        "cache_control",
        "messages.is_error",
        "tools.web_search_20250305",
        "tool_choice.disable_parallel_tool_use",
    }


def test_w1_system_as_text_and_as_blocks_is_the_first_message():
    for system in ("Be brief.", [{"type": "text", "text": "Be brief."}]):
        assert request("anthropic", system=system).messages[0] == {"role": "system", "content": "Be brief."}


def test_responses_reads_items_into_turns():
    body = {
        "model": "policy",
        "instructions": "One.",
        "input": [
            {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "Two."}]},
            {"role": "user", "content": "go"},
            {"type": "reasoning", "id": "rs", "summary": [{"type": "summary_text", "text": "Hm."}]},
            {"type": "message", "id": "m", "role": "assistant", "content": [{"type": "output_text", "text": "ok"}]},
            {"type": "function_call", "call_id": "a", "name": "f", "arguments": '{"x":1}'},
            {"type": "function_call", "call_id": "b", "name": "g", "arguments": "nope"},
            {"type": "function_call_output", "call_id": "a", "output": "1"},
            {"type": "function_call_output", "call_id": "b", "output": [{"type": "input_text", "text": "2"}]},
            {"type": "web_search_call", "id": "w", "status": "completed"},
            {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c", "output": "3"},
            {"role": "assistant", "content": "first"},
            {"role": "assistant", "content": "second"},
            {"role": "user", "content": [{"type": "input_image", "image_url": PIXEL}]},
        ],
        "tools": [
            {"type": "function", "name": "f", "description": None, "parameters": {"type": "object"}, "strict": False},
            {"type": "namespace", "name": "n", "tools": []},
            {"type": "web_search"},
        ],
        "max_output_tokens": 5,
        "store": False,
        "include": ["reasoning.encrypted_content", "message.output_text.logprobs"],
        "text": {"format": {"type": "text"}, "verbosity": "low"},
    }
    read = openai_responses.decode(body)
    assert read.messages == [
        {"role": "system", "content": "One.\n\nTwo."},
        {"role": "user", "content": "go"},
        {
            "role": "assistant",
            "content": "ok",
            "reasoning_content": "Hm.",
            "tool_calls": [
                {"id": "a", "type": "function", "function": {"name": "f", "arguments": {"x": 1}}},
                {"id": "b", "type": "function", "function": {"name": "g", "arguments": "nope"}},
            ],
        },
        {"role": "tool", "tool_call_id": "a", "content": "1"},
        {"role": "tool", "tool_call_id": "b", "content": "2"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"id": "c", "type": "function", "function": {"name": "f", "arguments": {}}}],
        },
        {"role": "tool", "tool_call_id": "c", "content": "3"},
        {"role": "assistant", "content": "first"},
        {"role": "assistant", "content": "second"},
        {"role": "user", "content": [{"type": "image", "url": PIXEL}]},
    ]
    assert [tool["function"]["name"] for tool in read.tools] == ["f"]
    assert read.logprobs and read.sampling.max_tokens == 5
    assert set(read.ignored) == {
        "store",
        "include",
        "text.verbosity",
        "tools.strict",
        "tools.namespace",
        "tools.web_search",
        "input.web_search_call",
    }


@pytest.mark.parametrize(
    "arguments", ['{"a": 1', "[1,2]", '"x"', "null", '__import__("os").system("touch X")', '{"a": NaN}']
)
def test_w9_w11_arguments_that_are_no_object_stay_text_in_history(arguments, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": arguments}}
    messages = [
        {"role": "user", "content": "go"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "a", "content": "bad arguments"},
    ]
    read = request("chat", messages=messages)
    assert read.messages[1]["tool_calls"][0]["function"]["arguments"] == arguments
    assert read.messages[2]["tool_call_id"] == "a"
    items = [
        {"role": "user", "content": "go"},
        {"type": "function_call", "call_id": "a", "name": "f", "arguments": arguments},
        {"type": "function_call_output", "call_id": "a", "output": "bad arguments"},
    ]
    assert request("responses", input=items).messages == read.messages
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize("arguments", ['{"a": 1', "[1,2]", '"x"', "null", '{"a": 1e999}'])
def test_w9_w12_a_sampled_call_with_bad_arguments_is_text_and_the_good_one_stays(wire, arguments):
    turn = ParsedTurn("", tool_calls=(ToolCall("a", "f", arguments), ToolCall("b", "g", '{"x": 1}')))
    shown = writing.spoken(reply(turn), 0)
    assert shown.content == f'{{"name": "f", "arguments": {arguments}}}'
    assert [call.id for call in shown.tool_calls] == ["b"]
    only_bad = reply(ParsedTurn("Hm.", tool_calls=turn.tool_calls[:1]))
    text = json.dumps(WIRES[wire].encode(only_bad, request(wire)))
    assert not any(f'"{name}"' in text for name in ("tool_use", "tool_calls", "function_call"))
    assert json.dumps(f'Hm.\n{{"name": "f", "arguments": {arguments}}}')[1:-1] in text


def test_ids_of_calls_are_unique_and_the_same_in_both_forms():
    calls = tuple(ToolCall(call_id, "f", "{}") for call_id in ("x", "x", "", "y"))
    said = reply(ParsedTurn("", tool_calls=calls))
    ids = ["x", "call_0f_0_1", "call_0f_0_2", "y"]
    assert [
        call["id"] for call in openai_chat.encode(said, request("chat"))["choices"][0]["message"]["tool_calls"]
    ] == ids
    chunks = parsed(openai_chat.events(said, request("chat")))[:-1]
    deltas = [call for chunk in chunks for call in chunk["choices"][0]["delta"].get("tool_calls", ())]
    assert [call["id"] for call in deltas if "id" in call] == ids


def test_white_space_between_reasoning_and_calls_is_no_content():
    said = reply(ParsedTurn("\n\n", "r", CALLS))
    assert [block["type"] for block in anthropic.encode(said, request("anthropic"))["content"]] == [
        "thinking",
        "tool_use",
        "tool_use",
    ]
    assert writing.spoken(reply(ParsedTurn("\n\n", "r")), 0).content == "\n\n"


def test_chat_reply():
    read = request("chat", logprobs=True, n=2)
    said = reply(TURN, ParsedTurn("Done."), logprobs=(TokenLogprob("é", 5, float("-inf")),))
    logprobs = {
        "content": [{"token": "é", "bytes": [195, 169], "logprob": -9999.0, "top_logprobs": []}],
        "refusal": None,
    }
    assert openai_chat.encode(said, read) == {
        "id": "chatcmpl-0f",
        "object": "chat.completion",
        "created": 1_700_000_000,
        "model": "policy",
        "choices": [
            {
                "index": 0,
                "message": {
                    "role": "assistant",
                    "content": "I look.",
                    "refusal": None,
                    "reasoning_content": "Files first.",
                    "tool_calls": [
                        {
                            "id": "call_a",
                            "type": "function",
                            "function": {"name": "bash", "arguments": '{"cmd": "ls"}'},
                        },
                        {
                            "id": "call_b",
                            "type": "function",
                            "function": {"name": "read", "arguments": '{ "path":"é.txt" }'},
                        },
                    ],
                },
                "logprobs": logprobs,
                "finish_reason": "tool_calls",
            },
            {
                "index": 1,
                "message": {"role": "assistant", "content": "Done.", "refusal": None},
                "logprobs": logprobs,
                "finish_reason": "stop",
            },
        ],
        "usage": {"prompt_tokens": 11, "completion_tokens": 7, "total_tokens": 18},
    }


def test_chat_events():
    read = request("chat", stream=True, stream_options={"include_usage": True})
    *chunks, usage, done = parsed(openai_chat.events(reply(TURN), read))
    assert done == "[DONE]"
    assert usage["choices"] == [] and usage["usage"]["total_tokens"] == 18
    assert all(chunk["usage"] is None and chunk["object"] == "chat.completion.chunk" for chunk in chunks)
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert deltas == [
        {"role": "assistant", "content": "", "refusal": None},
        {"reasoning_content": "Files first."},
        {"content": "I look."},
        {
            "tool_calls": [
                {"index": 0, "id": "call_a", "type": "function", "function": {"name": "bash", "arguments": ""}}
            ]
        },
        {"tool_calls": [{"index": 0, "function": {"arguments": '{"cmd": "ls"}'}}]},
        {
            "tool_calls": [
                {"index": 1, "id": "call_b", "type": "function", "function": {"name": "read", "arguments": ""}}
            ]
        },
        {"tool_calls": [{"index": 1, "function": {"arguments": '{ "path":"é.txt" }'}}]},
        {},
    ]
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None] * 7 + ["tool_calls"]
    assert "usage" not in parsed(openai_chat.events(reply(TURN), request("chat")))[0]


def test_anthropic_reply():
    assert anthropic.encode(reply(TURN), request("anthropic")) == {
        "id": "msg_0f",
        "type": "message",
        "role": "assistant",
        "model": "policy",
        "content": [
            {"type": "thinking", "thinking": "Files first.", "signature": "sig_0f"},
            {"type": "text", "text": "I look."},
            {"type": "tool_use", "id": "call_a", "name": "bash", "input": {"cmd": "ls"}},
            {"type": "tool_use", "id": "call_b", "name": "read", "input": {"path": "é.txt"}},
        ],
        "stop_reason": "tool_use",
        "stop_sequence": None,
        "usage": {
            "input_tokens": 11,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 0,
            "output_tokens": 7,
        },
    }
    assert anthropic.encode(reply(ParsedTurn("")), request("anthropic"))["content"] == [{"type": "text", "text": ""}]
    assert anthropic.count(12) == {"input_tokens": 12}
    ends = {"model": "policy", "messages": [{"role": "assistant", "content": "x"}]}
    assert anthropic.decode_count(ends).messages == ends["messages"]


def test_w7_anthropic_events_open_one_block_for_each_call():
    long = ToolCall("call_c", "bash", json.dumps({"cmd": "x" * 300, "é": [1, {"b": None}]}))
    events = parsed(anthropic.events(reply(ParsedTurn("Hi", "Hm", (*CALLS, long))), request("anthropic")))
    names = [event["type"] for event in events]
    assert names[0] == "message_start" and names[-2:] == ["message_delta", "message_stop"]
    assert events[0]["message"]["content"] == [] and events[0]["message"]["usage"]["input_tokens"] == 11
    blocks: dict[int, list[Any]] = {}
    for event in events[1:-2]:
        blocks.setdefault(event["index"], []).append(event)
    assert sorted(blocks) == [0, 1, 2, 3, 4]
    for block in blocks.values():
        assert block[0]["type"] == "content_block_start" and block[-1]["type"] == "content_block_stop"
        assert {event["type"] for event in block[1:-1]} == {"content_block_delta"}
    assert [block[0]["content_block"] for block in list(blocks.values())[2:]] == [
        {"type": "tool_use", "id": "call_a", "name": "bash", "input": {}},
        {"type": "tool_use", "id": "call_b", "name": "read", "input": {}},
        {"type": "tool_use", "id": "call_c", "name": "bash", "input": {}},
    ]
    fragments = [event["delta"]["partial_json"] for event in blocks[4][1:-1]]
    assert len(fragments) > 1 and json.loads("".join(fragments)) == json.loads(long.arguments)
    assert events[-2]["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}
    assert events[-2]["usage"]["output_tokens"] == 7


def test_responses_reply_and_events_in_order():
    said, read = reply(TURN), request("responses", max_output_tokens=50)
    whole = openai_responses.encode(said, read)
    assert whole["output"] == [
        {
            "type": "reasoning",
            "id": "rs_0f",
            "summary": [],
            "content": [{"type": "reasoning_text", "text": "Files first."}],
            "status": "completed",
        },
        {
            "type": "message",
            "id": "msg_0f",
            "role": "assistant",
            "content": [{"type": "output_text", "text": "I look.", "annotations": [], "logprobs": []}],
            "status": "completed",
        },
        {
            "type": "function_call",
            "id": "fc_0f_0",
            "call_id": "call_a",
            "name": "bash",
            "arguments": '{"cmd": "ls"}',
            "status": "completed",
        },
        {
            "type": "function_call",
            "id": "fc_0f_1",
            "call_id": "call_b",
            "name": "read",
            "arguments": '{ "path":"é.txt" }',
            "status": "completed",
        },
    ]
    assert (whole["status"], whole["incomplete_details"], whole["max_output_tokens"]) == ("completed", None, 50)
    assert (whole["usage"]["input_tokens"], whole["usage"]["output_tokens"], whole["usage"]["total_tokens"]) == (
        11,
        7,
        18,
    )
    events = parsed(openai_responses.events(said, read))
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    part = ["content_part.added", "{}.delta", "{}.done", "content_part.done"]
    call = ["output_item.added", "function_call_arguments.delta", "function_call_arguments.done", "output_item.done"]
    assert [event["type"].removeprefix("response.") for event in events] == [
        *("created", "in_progress"),
        *("output_item.added", *(name.format("reasoning_text") for name in part), "output_item.done"),
        *("output_item.added", *(name.format("output_text") for name in part), "output_item.done"),
        *call,
        *call,
        "completed",
    ]
    assert events[-1]["response"] == whole


@pytest.mark.parametrize(
    ("finish", "stop", "turn", "expected"),
    [
        ("stop", None, ParsedTurn("x"), ("stop", "end_turn", "completed")),
        ("stop", "END", ParsedTurn("x"), ("stop", "stop_sequence", "completed")),
        ("length", None, ParsedTurn("x"), ("length", "max_tokens", "incomplete")),
        ("length", None, ParsedTurn(""), ("length", "max_tokens", "incomplete")),
        ("stop", None, TURN, ("tool_calls", "tool_use", "completed")),
        ("length", None, TURN, ("length", "max_tokens", "incomplete")),
        ("stop", None, ParsedTurn("", tool_calls=(ToolCall("a", "f", "["),)), ("stop", "end_turn", "completed")),
    ],
)
def test_finish_reasons(finish, stop, turn, expected):
    said = reply(turn, finish=finish, stop_sequence=stop)
    response = openai_responses.encode(said, request("responses"))
    message = anthropic.encode(said, request("anthropic"))
    chat = openai_chat.encode(said, request("chat"))["choices"][0]
    assert (chat["finish_reason"], message["stop_reason"], response["status"]) == expected
    assert message["stop_sequence"] == (stop if expected[1] == "stop_sequence" else None)
    assert response["incomplete_details"] == ({"reason": "max_output_tokens"} if finish == "length" else None)
    *_, last = parsed(openai_responses.events(said, request("responses")))
    assert last["type"] == f"response.{expected[2]}"


@pytest.mark.parametrize(
    ("wires", "fields", "param"),
    [
        ("chat responses anthropic", {"model": ""}, "model"),
        ("chat responses anthropic", {"temperature": 2.1}, "temperature"),
        ("chat responses anthropic", {"temperature": True}, "temperature"),
        ("chat responses anthropic", {"top_p": 0}, "top_p"),
        ("chat responses anthropic", {"top_k": -2}, "top_k"),
        ("chat responses anthropic", {"stream": "yes"}, "stream"),
        ("chat responses anthropic", {"presence_penalty": 0.1}, "presence_penalty"),
        ("chat responses anthropic", {"tools": {}}, "tools"),
        ("chat responses", {"tool_choice": "required"}, "tool_choice"),
        ("chat responses", {"tool_choice": {"type": "function", "name": "f"}}, "tool_choice"),
        ("anthropic", {"tool_choice": {"type": "any"}}, "tool_choice"),
        ("anthropic", {"tool_choice": {"type": "tool", "name": "f"}}, "tool_choice"),
        ("chat responses", {"top_logprobs": 1}, "top_logprobs"),
        ("chat responses anthropic", {"seed": "x"}, "seed"),
        ("chat responses anthropic", {"seed": 2**63}, "seed"),
        ("chat responses anthropic", {"min_tokens": 5}, "min_tokens"),
        ("chat responses anthropic", {"min_p": 0.1}, "min_p"),
        ("chat responses anthropic", {"ignore_eos": True}, "ignore_eos"),
        ("chat responses anthropic", {"ignore_eos": 0}, "ignore_eos"),
        ("chat responses anthropic", {"stop_token_ids": [5]}, "stop_token_ids"),
        ("chat responses anthropic", {"best_of": 2}, "best_of"),
        ("chat responses anthropic", {"best_of": True}, "best_of"),
        ("chat responses anthropic", {"guided_json": {}}, "guided_json"),
        ("chat responses anthropic", {"structured_outputs": {"regex": "a"}}, "structured_outputs"),
        ("chat responses anthropic", {"chat_template": "{{ x }}"}, "chat_template"),
        ("chat responses anthropic", {"chat_template_kwargs": {"enable_thinking": False}}, "chat_template_kwargs"),
        ("chat responses anthropic", {"add_generation_prompt": False}, "add_generation_prompt"),
        ("chat responses anthropic", {"continue_final_message": True}, "continue_final_message"),
        ("responses anthropic", {"n": 2}, "n"),
        ("chat", {"n": 129}, "n"),
        ("chat", {"stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
        ("chat", {"n": 0}, "n"),
        ("chat", {"max_tokens": 0}, "max_tokens"),
        ("chat", {"stop": [""]}, "stop[0]"),
        ("chat", {"logit_bias": {"5": 1}}, "logit_bias"),
        ("chat", {"functions": []}, "functions"),
        ("chat", {"function_call": "auto"}, "function_call"),
        ("chat", {"response_format": {"type": "json_object"}}, "response_format"),
        ("chat", {"messages": []}, "messages"),
        ("chat", {"messages": [{"role": "user"}]}, "messages[0].content"),
        ("chat", {"messages": [{"role": "king", "content": "x"}]}, "messages[0].role"),
        ("chat", {"messages": [{"role": "user", "content": [{"type": "input_audio"}]}]}, "messages[0].content[0].type"),
        ("responses", {"text": {"format": {"type": "json_schema"}}}, "text.format"),
        ("responses", {"previous_response_id": "resp_1"}, "previous_response_id"),
        ("responses", {"conversation": "c"}, "conversation"),
        ("responses", {"background": True}, "background"),
        ("responses", {"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
        ("responses", {"input": None}, "input"),
        ("anthropic", {"output_config": {"format": {"type": "json_schema"}}}, "output_config.format"),
        ("anthropic", {"messages": [{"role": "assistant", "content": "{"}]}, "messages"),
    ],
)
def test_what_is_not_offered_is_refused_by_name(wires, fields, param):
    for wire in wires.split():
        failure = refused(wire, **fields)
        assert (failure.status, failure.code, failure.param) == (400, "invalid_request", param)
        assert failure.message.startswith(f"{param}: found ") and "; allowed: " in failure.message


@pytest.mark.parametrize("wire", WIRES)
def test_the_values_that_change_nothing_are_accepted(wire):
    neutral = {
        "n": 1,
        "best_of": 1,
        "min_p": 0.0,
        "min_tokens": 0,
        "repetition_penalty": 1.0,
        "ignore_eos": False,
        "echo": False,
        "add_generation_prompt": True,
        "chat_template_kwargs": {},
        "stop_token_ids": [],
        "guided_json": None,
    }
    assert request(wire, **neutral) == request(wire)


@pytest.mark.parametrize(
    "url", ["https://example.com/a.png", "/etc/passwd", "file:///etc/passwd", "data:text/html,x", None]
)
def test_images_are_data_uris_only(url):
    chat = {"type": "image_url", "image_url": {"url": url}}
    blocks = {
        "chat": [chat],
        "responses": [{"type": "input_image", "image_url": url}],
        "anthropic": [{"type": "image", "source": {"type": "url", "url": url}}],
    }
    for wire, content in blocks.items():
        key = "input" if wire == "responses" else "messages"
        failure = refused(wire, **{key: [{"role": "user", "content": content}]})
        assert "never fetched" in failure.message and failure.param == f"{key}[0].content[0]"


@pytest.mark.parametrize("wire", WIRES)
def test_what_is_null_is_what_is_missing(wire):
    names = (
        "temperature",
        "top_p",
        "top_k",
        "seed",
        "stop",
        "tools",
        "tool_choice",
        "stream",
        "metadata",
        "n",
        "logprobs",
    )
    assert request(wire, **dict.fromkeys(names)) == request(wire)


def test_half_an_emoji_does_not_reach_the_tokenizer():
    assert request("chat", messages=[{"role": "user", "content": "a\ud83d"}]).messages[0]["content"] == "a\ufffd"
    assert reading.clean({"k\udc00": ["\ud83d\ude00"]}) == {"k\ufffd": ["😀"]}


def test_bodies_that_are_no_plain_json_are_refused():
    deep: Any = {}
    for _ in range(200):
        deep = {"a": deep}
    for body in ([], None, "x", {"model": float("nan")}, {"model": 2**300}, {"metadata": deep}):
        for codec in WIRES.values():
            with pytest.raises(ChatError):
                codec.decode(body)


def test_dropped_ids_are_paired_in_order():
    calls = [{"type": "function", "function": {"name": name, "arguments": "{}"}} for name in "fg"]
    messages = [
        {"role": "user", "content": "go"},
        {"role": "assistant", "tool_calls": calls},
        {"role": "tool", "content": "1"},
        {"role": "tool", "content": "2"},
    ]
    read = request("chat", messages=messages).messages
    assert [call["id"] for call in read[1]["tool_calls"]] == ["call_1_0", "call_1_1"]
    assert [message["tool_call_id"] for message in read[2:]] == ["call_1_0", "call_1_1"]
    assert refused("chat", messages=messages[2:]).param == "messages"


def test_one_row_reads_the_same_on_every_wire():
    schema = {"type": "object", "properties": {"x": {"type": "number"}}}
    chat = openai_chat.decode(
        {
            "model": "policy",
            "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2+2?"}],
            "tools": [{"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": schema}}],
        }
    )
    responses = openai_responses.decode(
        {
            "model": "policy",
            "instructions": "Be brief.",
            "input": "2+2?",
            "tools": [
                {"type": "function", "name": "add", "description": "Adds.", "parameters": schema, "strict": None}
            ],
        }
    )
    messages = anthropic.decode(
        {
            "model": "policy",
            "max_tokens": 5,
            "system": "Be brief.",
            "messages": [{"role": "user", "content": [{"type": "text", "text": "2+2?"}]}],
            "tools": [{"name": "add", "description": "Adds.", "input_schema": schema}],
        }
    )
    assert chat.messages == responses.messages == messages.messages
    assert json.dumps(chat.tools) == json.dumps(responses.tools) == json.dumps(messages.tools)


def test_models_in_both_shapes():
    names = ("policy", "policy-unrecorded")
    assert models.listed(names, 0, is_anthropic=False)["data"][1] == {
        "id": "policy-unrecorded",
        "object": "model",
        "created": 0,
        "owned_by": "moltflow",
    }
    listed = models.listed(names, 0, is_anthropic=True)
    assert (listed["first_id"], listed["last_id"], listed["has_more"]) == ("policy", "policy-unrecorded", False)
    assert models.retrieved("policy", names, 0, is_anthropic=True)["created_at"] == "1970-01-01T00:00:00Z"
    with pytest.raises(ChatError) as caught:
        models.retrieved("gpt", names, 0, is_anthropic=False)
    assert caught.value.status == 404
