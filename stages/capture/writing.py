"""What the wires share in writing a reply: what of a sampled turn a client sees, finish reasons, pieces, SSE chunks.

Agents parse the arguments of a call without looking, so a call whose arguments are not a JSON object is shown as text
on every wire, behind the content. The rule is the same everywhere, so the message that a client echoes does not depend
on the wire that it came over: it is `assistant_message(spoken(reply, index))`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Literal

from schemas.chat import Choice, ParsedTurn, Reply, TokenLogprob, ToolCall
from stages.agents.plain_json import Json, arguments, json_object
from stages.capture.reading import assistant

FinishReason = Literal["stop", "length", "tool_calls"]
MIN_PIECE = 64
MAX_PIECES = 4
MIN_LOGPROB = -9999.0
"""JSON has no infinity."""


def spoken(reply: Reply, index: int) -> ParsedTurn:
    """The turn of a choice as clients see it.

    Calls with arguments that no client could parse become text, calls without a unique id get one, and white space
    between the reasoning and the calls is no content: clients drop it from what they echo.
    """
    turn = reply.choices[index].turn
    calls: list[ToolCall] = []
    texts = [turn.content]
    for place, call in enumerate(turn.tool_calls):
        if json_object(call.arguments) is None:
            texts.append(f'{{"name": {json.dumps(call.name, ensure_ascii=False)}, "arguments": {call.arguments}}}')
            continue
        is_new = call.id and all(call.id != other.id for other in calls)
        call_id = call.id if is_new else f"call_{reply.id}_{index}_{place}"
        calls.append(ToolCall(id=call_id, name=call.name, arguments=call.arguments.strip() or "{}"))
    if not texts[0].strip() and (calls or len(texts) > 1):
        texts = texts[1:]
    return ParsedTurn(content="\n".join(texts), reasoning=turn.reasoning, tool_calls=tuple(calls))


def assistant_message(turn: ParsedTurn) -> Json:
    """A turn that clients saw as a message in the form of templates; a `ChatRequest` that echoes it has the same."""
    calls = [
        {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": arguments(call.arguments)}}
        for call in turn.tool_calls
    ]
    return assistant(turn.content, turn.reasoning, calls)


def finish_reason(choice: Choice, turn: ParsedTurn) -> FinishReason:
    """Why a turn that clients see ended: calls that became text are none."""
    if choice.finish_reason == "length":
        return "length"
    return "tool_calls" if turn.tool_calls else "stop"


def pieces(text: str) -> Iterator[str]:
    """A text in a few pieces, as a stream sends it; none for no text."""
    size = max(MIN_PIECE, -(-len(text) // MAX_PIECES))
    for start in range(0, len(text), size):
        yield text[start : start + size]


def json_text(value: Json) -> str:
    return json.dumps(value, ensure_ascii=False)


def sse(data: Json, event: str | None = None) -> str:
    """One chunk of a stream."""
    text = f"data: {json.dumps(data, separators=(',', ':'))}\n\n"
    return text if event is None else f"event: {event}\n{text}"


def token_logprob(token: TokenLogprob) -> Json:
    return {
        "token": token.token,
        "bytes": list(token.token.encode("utf-8", "replace")),
        "logprob": max(token.logprob, MIN_LOGPROB),
        "top_logprobs": [],
    }
