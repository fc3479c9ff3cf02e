"""When two messages are the same one: what clients change while they echo a conversation is left out of the key.

Left out: cache markers, item ids, status, signatures and other unknown fields, null against missing, the reasoning of
an assistant (clients drop it or echo it), outer whitespace of an assistant's text, the names that ids give to tool
calls, whitespace, key order and number formats of JSON arguments. Text equals a single block of that text, and
`developer` equals `system`.
"""

from __future__ import annotations

import json
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

UNSAID = frozenset({"cache_control", "id", "status", "signature"})
"""Keys of content blocks that say nothing."""
TEXT_BLOCKS = frozenset({"text", "input_text", "output_text"})


def identities(messages: Sequence[Mapping[str, Any]]) -> list[Hashable]:
    """A key for each message, equal for equal messages.

    Ids of tool calls are replaced by how many calls came before, so that a result still belongs to its call when a
    client renames them, and results that changed places differ.
    """
    calls: dict[Any, int] = {}
    keys: list[Hashable] = []
    num_calls = 0
    for message in messages:
        keys.append(_identity(message, calls))
        for call in message.get("tool_calls") or ():
            calls[call.get("id")] = num_calls
            num_calls += 1
    return keys


def _identity(message: Mapping[str, Any], calls: Mapping[Any, int]) -> Hashable:
    role, content = message["role"], _content(message.get("content"))
    if role == "assistant":
        functions = [call.get("function") or {} for call in message.get("tool_calls") or ()]
        said = content.strip() if isinstance(content, str) else content
        return (role, said, *((function.get("name"), _arguments(function.get("arguments"))) for function in functions))
    if role == "tool":
        return (role, content, calls.get(message.get("tool_call_id")))
    return ("system" if role == "developer" else role, content, message.get("name"))


def _content(content: Any) -> Hashable:
    if content is None or isinstance(content, str):
        return content or ""
    blocks = [_block(block) for block in content]
    return blocks[0] if len(blocks) == 1 and isinstance(blocks[0], str) else tuple(blocks) or ""


def _block(block: Any) -> Hashable:
    if isinstance(block, str):
        return block
    if block.get("type") in TEXT_BLOCKS and isinstance(block.get("text"), str):
        return str(block["text"])
    # a tuple, so that no text can pass for it
    return ("block", _json({key: value for key, value in block.items() if key not in UNSAID and value is not None}))


def _arguments(arguments: Any) -> Hashable:
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            return ("text", arguments.strip())
    return _json({} if arguments is None else arguments)


def _json(value: Any) -> str:
    return json.dumps(_as_doubles(value), sort_keys=True)


def _as_doubles(value: Any) -> Any:
    """JavaScript clients write 1.0 as 1 and keep 53 bits of an integer."""
    if isinstance(value, int) and not isinstance(value, bool):
        try:
            return float(value)
        except OverflowError:
            return value
    if isinstance(value, Mapping):
        return {str(key): _as_doubles(item) for key, item in value.items()}
    return [_as_doubles(item) for item in value] if isinstance(value, list | tuple) else value
