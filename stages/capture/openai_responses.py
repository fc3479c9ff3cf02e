"""The wire of OpenAI's `POST /v1/responses`, without state: every request carries its whole conversation.

- What would need a stored response (`previous_response_id`, `conversation`, `prompt`, `background`, item references) is
  refused; `store` has no effect.
- `instructions` is the first message, `developer` is system.
- Items of an assistant (reasoning, message, function calls) that follow one another are one message; reasoning or a
  message after a message or a call begins the next.
- Reasoning is sent as `content` of a reasoning item, without summary; both are read.
- Tools that are no functions, and items of them, are left out. The reply does not repeat tools and instructions.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from schemas.chat import ChatError, ChatRequest, Reply
from stages.capture import reading, writing
from stages.capture.openai_chat import error, keep_alive
from stages.capture.reading import Ignored, Json

__all__ = ["decode", "encode", "error", "error_event", "events", "keep_alive"]

_FIELDS = {"input", "instructions", "max_output_tokens", "stop", "background", "text", "n"}
_STATELESS = "none; nothing is stored, send the whole conversation as input"
_LOGPROBS = "message.output_text.logprobs"
_ITEM_FIELDS = {
    "message": {"type", "id", "status", "role", "content", "phase"},
    "function_call": {"type", "id", "status", "call_id", "name", "arguments"},
    "function_call_output": {"type", "id", "status", "call_id", "output"},
    "reasoning": {"type", "id", "status", "summary", "content", "encrypted_content"},
}


def decode(body: object) -> ChatRequest:
    """Read a request. Raises ChatError, and nothing else, for what is wrong or not offered."""
    body = reading.read_body(body)
    ignored: Ignored = {}
    stateful = dict.fromkeys(("previous_response_id", "conversation", "prompt"), _STATELESS)
    reading.refuse_unsupported(body, **stateful)
    reading.integer(body, "n", 1, 1)
    if reading.flag(body, "background"):
        reading.refuse("background", True, "false")
    text = reading.options(body, "text")
    reading.refuse_json_format(text.get("format"), "text.format")
    reading.unread(text, {"format"}, ignored, "text.")
    request = ChatRequest(
        model=reading.as_name(body.get("model"), "model"),
        messages=reading.finished(list(_messages(body, ignored)), "input"),
        tools=reading.tools(body, "function", "parameters", ignored),
        tool_choice=reading.tool_choice(body.get("tool_choice")),
        sampling=reading.sampling(body, ("max_output_tokens",), stop="stop"),
        logprobs=body.get("include") is not None and _LOGPROBS in reading.as_list(body["include"], "include"),
        stream=reading.flag(body, "stream"),
        include_usage=True,
    )
    return reading.named(request, body, _FIELDS, ignored)


def _messages(body: Json, ignored: Ignored) -> Iterator[Json]:
    if body.get("instructions") is not None:
        yield {"role": "system", "content": reading.as_text(body["instructions"], "instructions")}
    if isinstance(body.get("input"), str):
        yield {"role": "user", "content": body["input"]}
        return
    turn = _Turn()
    for where, item in reading.items(body.get("input"), "input"):
        kind = item.get("type") or ("message" if "role" in item else None)
        known = _ITEM_FIELDS.get(reading.as_name(kind, f"{where}.type"))
        if known is None:
            _leave_out(str(kind), where, ignored)
            continue
        reading.unread(item, known, ignored, "input.")
        is_assistant = kind in ("reasoning", "function_call") or (kind, item.get("role")) == ("message", "assistant")
        if turn.is_open and (not is_assistant or turn.ends_before(str(kind))):
            yield turn.closed()
            turn = _Turn()
        if is_assistant:
            turn.add(str(kind), item, where, ignored)
        else:
            yield _input(str(kind), item, where, ignored)
    if turn.is_open:
        yield turn.closed()


class _Turn:
    """The items of one turn of the assistant, as they come."""

    def __init__(self) -> None:
        self.reasoning: list[str] = []
        self.text: str | None = None
        self.calls: list[Json] = []

    @property
    def is_open(self) -> bool:
        return bool(self.reasoning or self.calls) or self.text is not None

    def ends_before(self, kind: str) -> bool:
        return kind != "function_call" and (bool(self.calls) or self.text is not None)

    def add(self, kind: str, item: Json, where: str, ignored: Ignored) -> None:
        if kind == "message":
            self.text = reading.text_content(item.get("content"), f"{where}.content", ignored, between="")
        elif kind == "function_call":
            self.calls.append(reading.tool_call(item.get("call_id"), item.get("name"), item.get("arguments"), where))
        else:
            name = "content" if item.get("content") else "summary"
            parts = reading.items(item.get(name), f"{where}.{name}")
            self.reasoning += [reading.as_text(part.get("text"), f"{place}.text") for place, part in parts]

    def closed(self) -> Json:
        return reading.assistant(self.text or "", "\n".join(self.reasoning), self.calls)


def _input(kind: str, item: Json, where: str, ignored: Ignored) -> Json:
    """A message of the user or the system, or what a tool answered."""
    if kind == "function_call_output":
        return reading.tool_message(item.get("call_id"), item.get("output"), where, ignored)
    role, place = item.get("role"), f"{where}.content"
    if role in ("system", "developer"):
        return {"role": "system", "content": reading.text_content(item.get("content"), place, ignored)}
    if role != "user":
        reading.refuse(f"{where}.role", role, "system, developer, user or assistant")
    return {"role": "user", "content": reading.content(item.get("content"), place, ignored)}


def _leave_out(kind: str, where: str, ignored: Ignored) -> None:
    if kind == "item_reference":
        reading.refuse(f"{where}.type", kind, "items themselves; nothing is stored, so clients set store to false")
    ignored[f"input.{kind[: reading.MAX_NAME]}"] = None


def encode(reply: Reply, request: ChatRequest) -> Json:
    """The answer to a request that is not streamed."""
    turn = writing.spoken(reply, 0)
    is_whole = writing.finish_reason(reply.choices[0], turn) != "length"
    output: list[Json] = []
    if turn.reasoning:
        content = [{"type": "reasoning_text", "text": turn.reasoning}]
        output.append({"type": "reasoning", "id": f"rs_{reply.id}", "summary": [], "content": content})
    if turn.content or not turn.tool_calls:
        part = {"type": "output_text", "text": turn.content, "annotations": [], "logprobs": _logprobs(reply, request)}
        output.append({"type": "message", "id": f"msg_{reply.id}", "role": "assistant", "content": [part]})
    for index, call in enumerate(turn.tool_calls):
        item = {"type": "function_call", "id": f"fc_{reply.id}_{index}", "call_id": call.id}
        output.append(item | {"name": call.name, "arguments": call.arguments})
    for item in output:
        item["status"] = "completed" if is_whole or item is not output[-1] else "incomplete"
    return _response(reply, request) | {
        "status": "completed" if is_whole else "incomplete",
        "incomplete_details": None if is_whole else {"reason": "max_output_tokens"},
        "output": output,
        "usage": _usage(reply),
    }


def events(reply: Reply, request: ChatRequest) -> Iterator[str]:
    """The answer to a streamed request as SSE chunks: created, each item with its parts and deltas, completed."""
    for number, event in enumerate(_events(reply, request)):
        yield writing.sse(event | {"sequence_number": number}, event["type"])


def _events(reply: Reply, request: ChatRequest) -> Iterator[Json]:
    response = encode(reply, request)
    for kind in ("created", "in_progress"):
        yield {"type": f"response.{kind}", "response": _response(reply, request)}
    for index, item in enumerate(response["output"]):
        empty: Json = {"arguments": ""} if item["type"] == "function_call" else {"content": []}
        started = item | empty | {"status": "in_progress"}
        yield {"type": "response.output_item.added", "output_index": index, "item": started}
        place = {"output_index": index, "item_id": item["id"]}
        for event in _call_events(item) if item["type"] == "function_call" else _part_events(item["content"][0]):
            yield place | event
        yield {"type": "response.output_item.done", "output_index": index, "item": item}
    yield {"type": f"response.{response['status']}", "response": response}


def _call_events(item: Json) -> Iterator[Json]:
    for piece in writing.pieces(item["arguments"]):
        yield {"type": "response.function_call_arguments.delta", "delta": piece}
    yield {"type": "response.function_call_arguments.done", "name": item["name"], "arguments": item["arguments"]}


def _part_events(part: Json) -> Iterator[Json]:
    """The one part of a message or of reasoning; log-probabilities come with the whole text."""
    kind, place = f"response.{part['type']}", {"content_index": 0}
    is_text = part["type"] == "output_text"
    none: Json = {"logprobs": []} if is_text else {}
    whole: Json = {"logprobs": part["logprobs"]} if is_text else {}
    yield {"type": "response.content_part.added", **place, "part": part | {"text": ""} | none}
    for piece in writing.pieces(part["text"]):
        yield {"type": f"{kind}.delta", **place, "delta": piece, **none}
    yield {"type": f"{kind}.done", **place, "text": part["text"], **whole}
    yield {"type": "response.content_part.done", **place, "part": part}


def error_event(failure: ChatError) -> str:
    """The end of a stream that failed: SDKs raise the first event, other clients wait for the second."""
    body = error(failure)[1]["error"]
    flat = {name: body[name] for name in ("code", "message", "param")}
    failed = {"id": "", "object": "response", "status": "failed", "output": [], "error": body}
    return writing.sse({"type": "error", "sequence_number": 0, **flat, "error": body}, "error") + writing.sse(
        {"type": "response.failed", "sequence_number": 1, "response": failed}, "response.failed"
    )


def _response(reply: Reply, request: ChatRequest) -> Json:
    """A response that has only begun."""
    return {
        "id": f"resp_{reply.id}",
        "object": "response",
        "created_at": reply.created,
        "status": "in_progress",
        "background": False,
        "error": None,
        "incomplete_details": None,
        "instructions": None,
        "max_output_tokens": request.sampling.max_tokens,
        "metadata": {},
        "model": reply.model,
        "output": [],
        "parallel_tool_calls": True,
        "previous_response_id": None,
        "reasoning": {"effort": None, "summary": None},
        "store": False,
        "temperature": request.sampling.temperature,
        "text": {"format": {"type": "text"}},
        "tool_choice": request.tool_choice,
        "tools": [],
        "top_p": request.sampling.top_p,
        "truncation": "disabled",
        "usage": None,
    }


def _usage(reply: Reply) -> Json:
    return {
        "input_tokens": reply.prompt_tokens,
        "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
        "output_tokens": reply.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": reply.prompt_tokens + reply.completion_tokens,
    }


def _logprobs(reply: Reply, request: ChatRequest) -> list[Any]:
    return [writing.token_logprob(token) for token in reply.choices[0].logprobs] if request.logprobs else []
