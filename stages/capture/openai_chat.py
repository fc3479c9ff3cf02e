"""The wire of OpenAI's `POST /v1/chat/completions`.

- Reasoning is `reasoning_content`, the field that most servers and clients know; `reasoning` is read as well.
- `top_logprobs` above 0 is refused: only the log-probability of the sampled token is kept.
- Arguments of calls are sent as the policy wrote them.
"""

from __future__ import annotations

from collections.abc import Iterator

from schemas.chat import ChatError, ChatRequest, Choice, Reply
from stages.capture import reading, writing
from stages.capture.reading import Ignored, Json

_FIELDS = {"messages", "n", "max_tokens", "max_completion_tokens", "stop", "logprobs"}
_OBJECTS = {"stream_options", "response_format"}
_MESSAGE_FIELDS = {"role", "content", "tool_calls", "tool_call_id", "reasoning_content", "reasoning"}
_ERRORS = {
    "invalid_request": ("invalid_request_error", None),
    "authentication": ("authentication_error", "invalid_api_key"),
    "not_found": ("invalid_request_error", "not_found"),
    "too_large": ("invalid_request_error", "request_too_large"),
    "context_length": ("invalid_request_error", "context_length_exceeded"),
    "turn_limit": ("invalid_request_error", "turn_limit"),
    "overloaded": ("server_error", "overloaded"),
    "engine": ("server_error", "engine_error"),
}


def decode(body: object) -> ChatRequest:
    """Read a request. Raises ChatError, and nothing else, for what is wrong or not offered."""
    body = reading.read_body(body)
    ignored: Ignored = {}
    reading.refuse_unsupported(
        body, functions="none; use tools", function_call="none; use tool_choice", prediction="none", audio="none"
    )
    reading.refuse_json_format(body.get("response_format"), "response_format")
    options = reading.options(body, "stream_options")
    request = ChatRequest(
        model=reading.as_name(body.get("model"), "model"),
        messages=reading.finished(
            [_message(message, where, ignored) for where, message in reading.items(body.get("messages"), "messages")],
            "messages",
        ),
        tools=reading.tools(body, "function", "parameters", ignored, nested="function"),
        tool_choice=reading.tool_choice(body.get("tool_choice")),
        sampling=reading.sampling(body, ("max_completion_tokens", "max_tokens"), stop="stop"),
        n=reading.integer(body, "n", 1, 128) or 1,
        logprobs=reading.flag(body, "logprobs"),
        stream=reading.flag(body, "stream"),
        include_usage=reading.flag(options, "include_usage", "stream_options."),
    )
    reading.unread(options, {"include_usage"}, ignored, "stream_options.")
    return reading.named(request, body, _FIELDS | _OBJECTS, ignored)


def _message(message: Json, where: str, ignored: Ignored) -> Json:
    role = message.get("role")
    reading.unread(message, _MESSAGE_FIELDS, ignored, "messages.")
    place = f"{where}.content"
    if role in ("system", "developer"):
        return {"role": "system", "content": reading.text_content(message.get("content"), place, ignored)}
    if role == "user":
        return {"role": "user", "content": reading.content(message.get("content"), place, ignored)}
    if role == "tool":
        return reading.tool_message(message.get("tool_call_id"), message.get("content"), where, ignored)
    if role != "assistant":
        reading.refuse(f"{where}.role", role, "system, developer, user, assistant or tool")
    if message.get("function_call") is not None:
        reading.refuse(f"{where}.function_call", message["function_call"], "none; use tool_calls")
    text = message.get("content")
    reasoning = message.get("reasoning_content") or message.get("reasoning") or ""
    return reading.assistant(
        "" if text is None else reading.text_content(text, place, ignored, between=""),
        reading.as_text(reasoning, f"{where}.reasoning_content"),
        [_call(call, place) for place, call in reading.items(message.get("tool_calls"), f"{where}.tool_calls")],
    )


def _call(call: Json, where: str) -> Json:
    if call.get("type") not in (None, "function"):
        reading.refuse(f"{where}.type", call["type"], "function")
    function = reading.as_object(call.get("function"), f"{where}.function")
    return reading.tool_call(call.get("id"), function.get("name"), function.get("arguments"), where)


def encode(reply: Reply, request: ChatRequest) -> Json:
    """The answer to a request that is not streamed."""
    return _envelope(reply, "chat.completion") | {
        "choices": [_choice(reply, index, request) for index in range(len(reply.choices))],
        "usage": _usage(reply),
    }


def _choice(reply: Reply, index: int, request: ChatRequest) -> Json:
    turn = writing.spoken(reply, index)
    message: Json = {"role": "assistant", "content": turn.content or (None if turn.tool_calls else "")}
    message["refusal"] = None
    if turn.reasoning:
        message["reasoning_content"] = turn.reasoning
    if turn.tool_calls:
        message["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in turn.tool_calls
        ]
    choice = reply.choices[index]
    return {
        "index": index,
        "message": message,
        "logprobs": _logprobs(choice, request),
        "finish_reason": writing.finish_reason(choice, turn),
    }


def events(reply: Reply, request: ChatRequest) -> Iterator[str]:
    """The answer to a streamed request as SSE chunks: role, deltas and finish of each choice, usage, end."""
    envelope = _envelope(reply, "chat.completion.chunk")
    if request.include_usage:
        envelope["usage"] = None
    for index in range(len(reply.choices)):
        choice = _choice(reply, index, request)
        for delta in _deltas(choice["message"]):
            chunk = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
            yield writing.sse(envelope | {"choices": [chunk]})
        last = {"index": index, "delta": {}, "logprobs": choice["logprobs"], "finish_reason": choice["finish_reason"]}
        yield writing.sse(envelope | {"choices": [last]})
    if request.include_usage:
        yield writing.sse(envelope | {"choices": [], "usage": _usage(reply)})
    yield "data: [DONE]\n\n"


def _deltas(message: Json) -> Iterator[Json]:
    yield {"role": "assistant", "content": None if message["content"] is None else "", "refusal": None}
    for name in ("reasoning_content", "content"):
        for piece in writing.pieces(message.get(name) or ""):
            yield {name: piece}
    for index, call in enumerate(message.get("tool_calls", ())):
        function = call["function"]
        yield {"tool_calls": [{"index": index, **call, "function": {"name": function["name"], "arguments": ""}}]}
        for piece in writing.pieces(function["arguments"]):
            yield {"tool_calls": [{"index": index, "function": {"arguments": piece}}]}


def keep_alive() -> str:
    """A chunk that clients skip, for while a turn is sampled."""
    return ": keep-alive\n\n"


def error(failure: ChatError) -> tuple[int, Json]:
    """HTTP status and body of a request that failed."""
    kind, code = _ERRORS.get(failure.code, ("server_error", failure.code))
    body = {"message": failure.message, "type": kind, "param": failure.param, "code": code}
    return failure.status, {"error": body}


def error_event(failure: ChatError) -> str:
    """The last chunk of a stream that failed; SDKs raise it."""
    return writing.sse(error(failure)[1])


def _envelope(reply: Reply, kind: str) -> Json:
    return {"id": f"chatcmpl-{reply.id}", "object": kind, "created": reply.created, "model": reply.model}


def _usage(reply: Reply) -> Json:
    return {
        "prompt_tokens": reply.prompt_tokens,
        "completion_tokens": reply.completion_tokens,
        "total_tokens": reply.prompt_tokens + reply.completion_tokens,
    }


def _logprobs(choice: Choice, request: ChatRequest) -> Json | None:
    if not request.logprobs:
        return None
    return {"content": [writing.token_logprob(token) for token in choice.logprobs], "refusal": None}
