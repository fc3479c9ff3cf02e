"""Bodies of the shapes that command-line harnesses send, and what they change in the history that they echo."""

from __future__ import annotations

import json
from typing import Any

from schemas.chat import Choice, ParsedTurn, Reply, ToolCall
from stages.capture import anthropic, openai_chat, openai_responses, writing

TURN = ParsedTurn(
    content="",
    reasoning="Look first.",
    tool_calls=(
        ToolCall("call_a", "Bash", '{"command": "ls", "n": {"b": 1, "a": 2}}'),
        ToolCall("call_b", "Bash", "{}"),
    ),
)
REPLY = Reply("0f", 1_700_000_000, "policy", (Choice(TURN, "stop"),), prompt_tokens=11, completion_tokens=7)
SAID = writing.assistant_message(writing.spoken(REPLY, 0))
CACHED = {"cache_control": {"type": "ephemeral"}}
SCHEMA = {"type": "object", "properties": {"command": {"type": "string"}}, "additionalProperties": False}


def claude_code(messages: list[Any]) -> dict[str, Any]:
    return {
        "model": "policy",
        "max_tokens": 32000,
        "stream": True,
        "metadata": {"user_id": "user"},
        "thinking": {"type": "adaptive"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "output_config": {"effort": "high"},
        "system": [
            {"type": "text", "text": "Header."},
            {"type": "text", "text": "You are an agent.", **CACHED},
            {"type": "text", "text": "Be brief.", **CACHED},
        ],
        "messages": messages,
        "tools": [{"name": "Bash", "description": "Runs.", "input_schema": {"$schema": "x", **SCHEMA}}],
    }


def test_claude_code_moves_its_cache_marker():
    first = [
        {"role": "user", "content": [{"type": "text", "text": "<reminder>"}, {"type": "text", "text": "go", **CACHED}]},
        {"role": "system", "content": "The date is today."},
    ]
    asked = anthropic.decode(claude_code(first))
    assert asked.messages == [
        {"role": "system", "content": "Header.\nYou are an agent.\nBe brief."},
        {"role": "user", "content": "<reminder>\ngo"},
        {"role": "system", "content": "The date is today."},
    ]
    assert asked.ignored == ("metadata", "thinking", "context_management", "output_config", "cache_control")
    results = [
        {"type": "tool_result", "tool_use_id": "call_a", "content": "a.txt", "is_error": False},
        {"type": "tool_result", "tool_use_id": "call_b", "content": "Exit code 1", "is_error": True, **CACHED},
    ]
    unmarked = [
        {"role": "user", "content": [{"type": "text", "text": "<reminder>"}, {"type": "text", "text": "go"}]},
        first[1],
    ]
    content = json.loads(json.dumps(anthropic.encode(REPLY, asked)["content"]))
    history = [{"role": "assistant", "content": content}, {"role": "user", "content": results}]
    again = anthropic.decode(claude_code([*unmarked, *history])).messages
    assert again[:4] == [*asked.messages, SAID]
    assert again[4:] == [
        {"role": "tool", "tool_call_id": "call_a", "content": "a.txt"},
        {"role": "tool", "tool_call_id": "call_b", "content": "Exit code 1"},
    ]


def codex(items: list[Any]) -> dict[str, Any]:
    return {
        "model": "policy",
        "instructions": "You are Codex.",
        "input": items,
        "tools": [
            {"type": "function", "name": "Bash", "description": "Runs.", "strict": False, "parameters": SCHEMA},
            {"type": "namespace", "name": "mcp", "description": "More.", "tools": []},
            {"type": "web_search", "external_web_access": False},
        ],
        "tool_choice": "auto",
        "parallel_tool_calls": True,
        "reasoning": {"effort": "medium", "summary": "auto"},
        "store": False,
        "stream": True,
        "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": "key",
        "client_metadata": {"a": "b"},
    }


def test_codex_drops_the_reasoning_and_the_ids_of_items():
    def message(role: str, text: str) -> dict[str, Any]:
        return {"type": "message", "role": role, "content": [{"type": "input_text", "text": text}]}

    first = [
        message("developer", "Rules."),
        message("developer", "More rules."),
        message("user", "env"),
        message("user", "go"),
    ]
    asked = openai_responses.decode(codex(first))
    assert asked.messages == [
        {"role": "system", "content": "You are Codex.\n\nRules.\n\nMore rules."},
        {"role": "user", "content": "env"},
        {"role": "user", "content": "go"},
    ]
    assert [tool["function"]["name"] for tool in asked.tools] == ["Bash"]
    assert set(asked.ignored) >= {"reasoning", "store", "include", "prompt_cache_key", "client_metadata"}
    assert set(asked.ignored) >= {"tools.namespace", "tools.web_search"}
    items = []
    for item in openai_responses.encode(REPLY, asked)["output"]:
        if item["type"] != "reasoning":
            items.append({name: value for name, value in item.items() if name not in ("id", "status")})
    outputs = [
        {"type": "function_call_output", "call_id": "call_a", "output": "a.txt"},
        {"type": "function_call_output", "call_id": "call_b", "output": [{"type": "input_text", "text": "failed"}]},
    ]
    again = openai_responses.decode(codex([*first, *items, *outputs])).messages
    assert again[:3] == asked.messages
    assert again[3] == {name: value for name, value in SAID.items() if name != "reasoning_content"}
    assert [message["content"] for message in again[4:]] == ["a.txt", "failed"]


def opencode(messages: list[Any]) -> dict[str, Any]:
    return {
        "model": "policy",
        "max_tokens": 32000,
        "messages": messages,
        "tools": [{"type": "function", "function": {"name": "Bash", "description": "Runs.", "parameters": SCHEMA}}],
        "tool_choice": "auto",
        "stream": True,
        "stream_options": {"include_usage": True},
    }


def test_opencode_writes_arguments_anew():
    first = [{"role": "system", "content": "You are opencode."}, {"role": "user", "content": "go"}]
    asked = openai_chat.decode(opencode(first))
    assert asked.messages == first and asked.ignored == () and asked.include_usage
    message = openai_chat.encode(REPLY, asked)["choices"][0]["message"]
    calls = [
        {**call, "function": {"name": call["function"]["name"], "arguments": compact(call["function"]["arguments"])}}
        for call in message["tool_calls"]
    ]
    echo = {"role": "assistant", "content": "", "reasoning_content": message["reasoning_content"], "tool_calls": calls}
    results = [{"role": "tool", "tool_call_id": call["id"], "content": "ok"} for call in calls]
    again = openai_chat.decode(opencode([*first, echo, *results])).messages
    assert again[:3] == [*first, SAID]
    assert again[3:] == results


def compact(arguments: str) -> str:
    return json.dumps(json.loads(arguments), separators=(",", ":"), sort_keys=True)


def test_a_title_request_without_tools_has_two_user_messages_in_a_row():
    messages = [
        {"role": "system", "content": "You write titles."},
        {"role": "user", "content": "Write a title:"},
        {"role": "user", "content": "go"},
    ]
    assert openai_chat.decode({"model": "policy", "messages": messages, "stream": True}).messages == messages
