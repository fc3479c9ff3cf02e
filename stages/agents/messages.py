"""One form of messages and tools, whatever way they come: data rows, environments and the wires of all SDKs.

A data row has the same prompt for every kind of agent, since all of them are rendered in this form.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from stages.agents.plain_json import arguments

FUNCTION_FIELDS = ("name", "description", "parameters")
"""What all wires can carry, in the order in which it is rendered."""


def canonical_tools(tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Definitions with the fields that every wire carries, in one order; what is null is left out."""
    return [
        {"type": "function", "function": _function(tool["function"])} if "function" in tool else dict(tool)
        for tool in tools
    ]


def _function(function: Mapping[str, Any]) -> dict[str, Any]:
    return {name: function[name] for name in FUNCTION_FIELDS if function.get(name) is not None}


def canonical_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Messages as chat templates want them.

    `developer` is system. Parts that are all text become one text: joined by a newline, those of an assistant by
    nothing. System messages that come first are merged, a blank line between.
    """
    return merged_system([_message(message) for message in messages])


def readable_calls(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Messages with their calls in the form that a request of any wire has: no content is empty text, and arguments are
    a mapping where they are a JSON object, so that data rows in OpenAI's form are rendered as requests are."""
    return [{**message, **_with_calls(message)} if message.get("tool_calls") else dict(message) for message in messages]


def _with_calls(message: Mapping[str, Any]) -> dict[str, Any]:
    calls = [
        {**call, "function": {**call["function"], "arguments": arguments(call["function"].get("arguments"))}}
        if "function" in call
        else call
        for call in message["tool_calls"]
    ]
    return {"content": message.get("content") or "", "tool_calls": calls}


def merged_system(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Messages with the system messages that come first as one."""
    num_leading = next((index for index, m in enumerate(messages) if m["role"] != "system"), len(messages))
    if num_leading < 2 or not all(isinstance(message.get("content"), str) for message in messages[:num_leading]):
        return messages
    merged = "\n\n".join(message["content"] for message in messages[:num_leading])
    return [{"role": "system", "content": merged}, *messages[num_leading:]]


def _message(message: Mapping[str, Any]) -> dict[str, Any]:
    role, content = message["role"], message.get("content")
    changed = dict(message)
    if role == "developer":
        changed["role"] = "system"
    if isinstance(content, list) and all(is_text(part) for part in content):
        changed["content"] = ("" if role == "assistant" else "\n").join(part["text"] for part in content)
    return changed


def unreadable(messages: Sequence[Mapping[str, Any]]) -> str | None:
    """The type of the first part that is no text, such as an image; None where all is text, which models here read."""
    for message in messages:
        for part in message["content"] if isinstance(message.get("content"), list) else ():
            if not is_text(part):
                return str(part.get("type")) if isinstance(part, Mapping) else type(part).__name__
    return None


def images(messages: Sequence[Mapping[str, Any]]) -> list[str]:
    """Data URIs or addresses of the images in messages in the form of OpenAI's wires, in order."""
    found = []
    for message in messages:
        for part in message["content"] if isinstance(message.get("content"), list) else ():
            source = part.get("image_url") if isinstance(part, Mapping) else None
            url = source.get("url") if isinstance(source, Mapping) else source
            found += [url] if isinstance(url, str) else []
    return found


def is_text(part: Any) -> bool:
    return isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str)
