"""The wire of Anthropic's `POST /v1/messages` and `POST /v1/messages/count_tokens`.

- `system`, as text or blocks, is the first message; messages of role `system` keep their place.
- A user message with tool results becomes one tool message for each of them, then a user message with what remains.
  `is_error` has no place in chat templates, so the text of the result says what went wrong.
- Successive assistant messages are one, as the original wire reads them; a last one, which would have to be continued
  inside a turn, is refused.
- Thinking is text with a signature that is only a name: clients take unsigned thinking for another model's and send it
  back as text of the user. It is not checked. `max_tokens` may be left out.
- Server tools (those with another `type` than `custom`) are left out.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from schemas.chat import ChatError, ChatRequest, Reply
from stages.agents.plain_json import arguments
from stages.capture import reading, writing
from stages.capture.reading import Ignored, Json

_FIELDS = {"messages", "system", "max_tokens", "stop_sequences", "n"}
_ERRORS = {
    "invalid_request": "invalid_request_error",
    "context_length": "invalid_request_error",
    "authentication": "authentication_error",
    "not_found": "not_found_error",
    "too_large": "request_too_large",
    "turn_limit": "invalid_request_error",
    "overloaded": "overloaded_error",
}
_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


def decode(body: object) -> ChatRequest:
    """Read a request for a message. Raises ChatError, and nothing else, for what is wrong or not offered."""
    request = decode_count(body)
    if request.messages[-1]["role"] == "assistant":
        reading.refuse("messages", "a last message of role assistant", "a last message of role user; no prefill")
    return request


def decode_count(body: object) -> ChatRequest:
    """Read a request for a count of tokens, which may end anywhere."""
    body = reading.read_body(body)
    ignored: Ignored = {}
    reading.refuse_unsupported(body, output_format="none; ask for JSON in the prompt")
    reading.integer(body, "n", 1, 1)
    reading.refuse_json_format(reading.options(body, "output_config").get("format"), "output_config.format")
    choice = body.get("tool_choice")
    if isinstance(choice, dict) and choice.get("disable_parallel_tool_use"):
        ignored["tool_choice.disable_parallel_tool_use"] = None
    request = ChatRequest(
        model=reading.as_name(body.get("model"), "model"),
        messages=reading.finished(list(_messages(body, ignored)), "messages"),
        tools=reading.tools(body, "custom", "input_schema", ignored),
        tool_choice=reading.tool_choice(choice),
        sampling=reading.sampling(body, ("max_tokens",), stop="stop_sequences"),
        stream=reading.flag(body, "stream"),
        include_usage=True,
    )
    return reading.named(request, body, _FIELDS, ignored)


def _messages(body: Json, ignored: Ignored) -> Iterator[Json]:
    if body.get("system") is not None:
        yield {"role": "system", "content": reading.text_content(body["system"], "system", ignored)}
    blocks: list[Any] = []  # of successive assistant messages
    for where, message in reading.items(body.get("messages"), "messages"):
        role, place = message.get("role"), f"{where}.content"
        reading.unread(message, {"role", "content"}, ignored, "messages.")
        if role == "assistant":
            blocks += _blocks(message.get("content"), place)
            continue
        if blocks:
            yield _assistant(blocks, where, ignored)
            blocks = []
        if role == "user":
            yield from _user(_blocks(message.get("content"), place), place, ignored)
        elif role == "system":
            yield {"role": "system", "content": reading.text_content(message.get("content"), place, ignored)}
        else:
            reading.refuse(f"{where}.role", role, "user, assistant or system")
    if blocks:
        yield _assistant(blocks, "messages", ignored)


def _blocks(content: object, where: str) -> list[Json]:
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    return [block for _, block in reading.items(reading.as_list(content, where), where)]


def _user(blocks: list[Json], where: str, ignored: Ignored) -> Iterator[Json]:
    rest = [block for block in blocks if block.get("type") != "tool_result"]
    for block in blocks:
        if block.get("type") == "tool_result":
            known = {"type", "tool_use_id", "content"}
            reading.unread({**block, "is_error": block.get("is_error") or None}, known, ignored, "messages.")
            yield reading.tool_message(block.get("tool_use_id"), block.get("content"), where, ignored)
    if rest or not blocks:
        yield {"role": "user", "content": reading.content(rest, where, ignored)}


def _assistant(blocks: list[Json], where: str, ignored: Ignored) -> Json:
    """One message of blocks in any order; text is joined, so what stood between two calls comes before both."""
    thinking = [reading.as_text(block.get("thinking"), where) for block in blocks if block.get("type") == "thinking"]
    calls = [
        reading.tool_call(block.get("id"), block.get("name"), block.get("input"), where)
        for block in blocks
        if block.get("type") == "tool_use"
    ]
    if any(block.get("cache_control") is not None for block in blocks):
        ignored["cache_control"] = None
    rest = [block for block in blocks if block.get("type") not in ("thinking", "redacted_thinking", "tool_use")]
    text = reading.text_content(rest, where, ignored, between="")
    return reading.assistant(text, "".join(thinking), calls)


def encode(reply: Reply, request: ChatRequest) -> Json:
    """The answer to a request that is not streamed."""
    choice = reply.choices[0]
    turn = writing.spoken(reply, 0)
    content: list[Json] = []
    if turn.reasoning:
        content.append({"type": "thinking", "thinking": turn.reasoning, "signature": f"sig_{reply.id}"})
    if turn.content or not turn.tool_calls:
        content.append({"type": "text", "text": turn.content})
    for call in turn.tool_calls:
        block = {"type": "tool_use", "id": call.id, "name": call.name, "input": arguments(call.arguments)}
        content.append(block)
    reason = _STOP_REASONS[writing.finish_reason(choice, turn)]
    if reason == "end_turn" and choice.stop_sequence is not None:
        reason = "stop_sequence"
    return {
        "id": f"msg_{reply.id}",
        "type": "message",
        "role": "assistant",
        "model": reply.model,
        "content": content,
        "stop_reason": reason,
        "stop_sequence": choice.stop_sequence if reason == "stop_sequence" else None,
        "usage": _usage(reply.prompt_tokens, reply.completion_tokens),
    }


def events(reply: Reply, request: ChatRequest) -> Iterator[str]:
    """The answer to a streamed request as SSE chunks: the start, each block, the stop reason with usage, the stop."""
    message = encode(reply, request)
    start: Json = {"content": [], "stop_reason": None, "stop_sequence": None, "usage": _usage(reply.prompt_tokens, 0)}
    yield _event("message_start", message=message | start)
    for index, block in enumerate(message["content"]):
        empty, deltas = _streamed(block)
        yield _event("content_block_start", index=index, content_block=empty)
        for delta in deltas:
            yield _event("content_block_delta", index=index, delta=delta)
        yield _event("content_block_stop", index=index)
    ended = {"stop_reason": message["stop_reason"], "stop_sequence": message["stop_sequence"]}
    yield _event("message_delta", delta=ended, usage=message["usage"])
    yield _event("message_stop")


def _streamed(block: Json) -> tuple[Json, list[Json]]:
    """A block as it starts, and the deltas that fill it."""
    if block["type"] == "text":
        return block | {"text": ""}, [{"type": "text_delta", "text": piece} for piece in writing.pieces(block["text"])]
    if block["type"] == "thinking":
        deltas = [{"type": "thinking_delta", "thinking": piece} for piece in writing.pieces(block["thinking"])]
        signature = {"type": "signature_delta", "signature": block["signature"]}
        return block | {"thinking": "", "signature": ""}, [*deltas, signature]
    pieces = writing.pieces(writing.json_text(block["input"]))
    return block | {"input": {}}, [{"type": "input_json_delta", "partial_json": piece} for piece in pieces]


def count(num_tokens: int) -> Json:
    """The answer of `count_tokens`."""
    return {"input_tokens": num_tokens}


def keep_alive() -> str:
    """A chunk that clients skip, for while a turn is sampled."""
    return _event("ping")


def error(failure: ChatError) -> tuple[int, Json]:
    """HTTP status and body of a request that failed."""
    kind = _ERRORS.get(failure.code, "api_error")
    return failure.status, {"type": "error", "error": {"type": kind, "message": failure.message}}


def error_event(failure: ChatError) -> str:
    """The last chunk of a stream that failed; SDKs raise it."""
    return writing.sse(error(failure)[1], "error")


def _event(kind: str, **fields: Any) -> str:
    return writing.sse({"type": kind, **fields}, kind)


def _usage(input_tokens: int, output_tokens: int) -> Json:
    return {
        "input_tokens": input_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 0,
        "output_tokens": output_tokens,
    }
