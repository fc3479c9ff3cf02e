"""What the wires share in reading a request: JSON that is safe to render, fields by type, blocks, images, calls.

Whatever the JSON, a request is read or refused with a `ChatError` that names the field, what was found and what is
allowed. Choices that hold on every wire:

- Text blocks of system, user and tool messages are joined by a newline, those of the assistant by nothing, so that an
  echoed reply is the reply. A message with images keeps a list of parts.
- System messages that come first are merged into one (a blank line between), as chat templates want it; later ones
  stay where they are. `developer` is system.
- Blocks of all wires are read wherever they come. Files, audio and documents are refused, since their content would be
  lost; block types without such content are left out and named in `ignored`.
- Tool arguments that are a JSON object become a mapping, none at all the empty one; the rest stays the text that it is.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Set
from dataclasses import replace
from itertools import groupby
from reprlib import Repr
from typing import Any, NoReturn

from schemas.chat import ChatError, ChatRequest, RequestSampling, ToolChoice
from stages.agents.messages import merged_system
from stages.agents.plain_json import Json, arguments, clean

Ignored = dict[str, None]
"""Names in the order in which they were met."""

MAX_NAME = 64
_IMAGE = re.compile(r"data:image/(png|jpe?g|gif|webp);base64,[A-Za-z0-9+/]", re.IGNORECASE)
_TEXT_BLOCKS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
_IMAGE_BLOCKS = ("image", "image_url", "input_image")
_UNREADABLE_BLOCKS = ("audio", "document", "file", "input_audio", "input_file", "search_result", "video", "video_url")
_WITHOUT = "the policy is sampled without it"
_TEMPLATE = "conversations are rendered as in training"
_NEUTRAL: dict[str, tuple[object, str]] = {
    **dict.fromkeys(("presence_penalty", "frequency_penalty", "min_p", "min_tokens"), (0, _WITHOUT)),
    **dict.fromkeys(("repetition_penalty", "length_penalty", "best_of"), (1, _WITHOUT)),
    **dict.fromkeys(("bad_words", "logits_processors", "stop_token_ids"), ([], _WITHOUT)),
    **dict.fromkeys(("ignore_eos", "use_beam_search"), (False, _WITHOUT)),
    **dict.fromkeys(("continue_final_message", "echo"), (False, _TEMPLATE)),
    "add_generation_prompt": (True, _TEMPLATE),
    "chat_template_kwargs": ({}, _TEMPLATE),
    "logit_bias": ({}, _WITHOUT),
    "top_logprobs": (0, "only the log-probability of the sampled token is kept"),
}
"""What would change the prompt or the sampled text, by the value that changes nothing. Servers take more than OpenAI's
and Anthropic's own fields, and agents that were written for vLLM send them."""
_REFUSED = dict.fromkeys(
    ("allowed_token_ids", "guided_choice", "guided_grammar", "guided_json", "guided_regex", "structured_outputs"),
    f"none, as {_WITHOUT}",
) | {"chat_template": f"none, as {_TEMPLATE}"}
_COMMON = {"model", "tools", "tool_choice", "temperature", "top_p", "top_k", "seed", "stream", *_NEUTRAL}
_repr = Repr()
_repr.maxstring = _repr.maxother = _repr.maxlong = 80


def refuse(where: str, found: object, allowed: str) -> NoReturn:
    raise ChatError(400, "invalid_request", f"{where}: found {_repr.repr(found)}; allowed: {allowed}", where)


def read_body(body: object) -> Json:
    """The body of a request as a JSON object that can be rendered and encoded again."""
    try:
        return as_object(clean(body), "body")
    except ValueError as error:
        raise ChatError(400, "invalid_request", f"body: {error}", "body") from None


def as_object(value: object, where: str) -> Json:
    return value if isinstance(value, dict) else refuse(where, value, "an object")


def as_list(value: object, where: str) -> list[Any]:
    return value if isinstance(value, list) else refuse(where, value, "a list")


def as_text(value: object, where: str) -> str:
    return value if isinstance(value, str) else refuse(where, value, "text")


def as_name(value: object, where: str) -> str:
    return value if isinstance(value, str) and value else refuse(where, value, "text that is not empty")


def items(value: object, where: str) -> Iterable[tuple[str, Json]]:
    """The objects of a list, each with its place; nothing for null."""
    for index, item in enumerate(as_list([] if value is None else value, where)):
        place = f"{where}[{index}]"
        yield place, as_object(item, place)


def options(body: Json, name: str) -> Json:
    """A nested object of settings; the empty one for null."""
    return {} if body.get(name) is None else as_object(body[name], name)


def flag(body: Json, name: str, prefix: str = "") -> bool:
    value = body.get(name)
    return value if isinstance(value, bool) else value is not None and refuse(prefix + name, value, "true or false")


def integer(body: Json, name: str, low: int, high: int) -> int | None:
    return _number(body, name, int, lambda value: low <= value <= high, f"a whole number from {low} to {high}")


def _number(body: Json, name: str, kind: Any, fits: Callable[[Any], bool], allowed: str) -> Any:
    value = body.get(name)
    if value is None or (isinstance(value, kind) and not isinstance(value, bool) and fits(value)):
        return value
    refuse(name, value, allowed)


def sampling(body: Json, max_tokens: Iterable[str], stop: str) -> RequestSampling:
    """What a body says about sampling. Of several limits the first counts; `top_k` 0 and -1 mean all tokens."""
    limits = [integer(body, name, 1, 2**31 - 1) for name in max_tokens]
    top_k = integer(body, "top_k", -1, 2**31 - 1)
    stops = body.get(stop)
    stops = [] if stops is None else [stops] if isinstance(stops, str) else as_list(stops, stop)
    if len(stops) > 128:
        refuse(stop, f"{len(stops)} texts", "at most 128")
    return RequestSampling(
        temperature=_number(body, "temperature", int | float, lambda value: 0 <= value <= 2, "a number from 0 to 2"),
        top_p=_number(body, "top_p", int | float, lambda value: 0 < value <= 1, "a number above 0, at most 1"),
        top_k=-1 if top_k == 0 else top_k,
        max_tokens=next((limit for limit in limits if limit is not None), None),
        stop=tuple(as_name(text, f"{stop}[{index}]") for index, text in enumerate(stops)),
        seed=integer(body, "seed", -(2**63), 2**63 - 1),
    )


def refuse_unsupported(body: Json, **fields: str) -> None:
    """Refuse what would change the sampled text in ways that are not offered; `fields`: name to what to do instead."""
    for name, (neutral, why) in _NEUTRAL.items():
        given = body.get(name)
        if given is not None and (isinstance(given, bool) != isinstance(neutral, bool) or given != neutral):
            refuse(name, given, f"{json.dumps(neutral)}, as {why}")
    for name, advice in (_REFUSED | fields).items():
        if body.get(name) is not None:
            refuse(name, body[name], advice)


def refuse_json_format(value: object, where: str) -> None:
    kind = as_object(value, where).get("type") if value is not None else "text"
    if kind != "text":
        refuse(where, kind, "type text; ask for JSON in the prompt")


def tool_choice(value: object) -> ToolChoice:
    """`auto` or `none`, also as `{"type": ...}`. What would force a call is refused: the policy decides."""
    kind = value.get("type") if isinstance(value, dict) else value
    if kind is None and not isinstance(value, dict):
        return "auto"
    if kind == "auto" or kind == "none":
        return "none" if kind == "none" else "auto"
    refuse("tool_choice", value, "auto or none")


def unread(value: Json, known: Set[str], ignored: Ignored, prefix: str = "") -> None:
    """Name the fields of an object that have a value and no reader."""
    if value.keys() <= known:
        return
    for name, given in value.items():
        if given is not None and name not in known:
            ignored[name if name == "cache_control" else prefix + name[:MAX_NAME]] = None


def named(request: ChatRequest, body: Json, own: Set[str], ignored: Ignored) -> ChatRequest:
    """The request with the names of all that was left out of it, fields of the body first."""
    names: Ignored = {}
    unread(body, _COMMON | own, names)
    return replace(request, ignored=tuple(names | ignored))


def tools(body: Json, kind: str, parameters: str, ignored: Ignored, nested: str | None = None) -> list[Json]:
    """The functions that may be called, in the form of chat templates; what is not given is left out.

    `kind` is the type of a function, which may be missing. Tools of other types have no definition to render.
    """
    functions = []
    for where, value in items(body.get("tools"), "tools"):
        found = value.get("type")
        if found is None or found == kind:
            value = value if nested is None else as_object(value.get(nested), f"{where}.{nested}")
            functions.append({"type": "function", "function": _function(value, where, parameters, ignored)})
        else:
            ignored[f"tools.{as_name(found, f'{where}.type')[:MAX_NAME]}"] = None
    return functions


def _function(value: Json, where: str, parameters: str, ignored: Ignored) -> Json:
    unread(value, {"type", "name", "description", parameters}, ignored, "tools.")
    function: Json = {"name": as_name(value.get("name"), f"{where}.name")}
    if value.get("description") is not None:
        function["description"] = as_text(value["description"], f"{where}.description")
    if value.get(parameters) is not None:
        function["parameters"] = as_object(value[parameters], f"{where}.{parameters}")
    return function


def content(value: object, where: str, ignored: Ignored, between: str = "\n") -> str | list[Json]:
    """Text, or a list of blocks as text, or as parts where there are images.

    Parts are `{"type": "text", "text"}` and `{"type": "image", "url": "data:image/..."}`.
    """
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        refuse(where, value, "text or a list of blocks")
    read = [_part(block, place, ignored) for place, block in items(value, where)]
    parts: list[Json] = []
    for kind, run in groupby((part for part in read if part is not None), key=lambda part: part["type"]):
        if kind == "text":
            parts.append({"type": "text", "text": between.join(part["text"] for part in run)})
        else:
            parts.extend(run)
    if any(part["type"] == "image" for part in parts):
        return parts
    return str(parts[0]["text"]) if parts else ""


def text_content(value: object, where: str, ignored: Ignored, between: str = "\n") -> str:
    """Content of a message that has no images: system and assistant."""
    read = content(value, where, ignored, between)
    return read if isinstance(read, str) else refuse(where, "an image", "text")


def _part(block: Json, where: str, ignored: Ignored) -> Json | None:
    kind = as_name(block.get("type"), f"{where}.type")
    if kind in _TEXT_BLOCKS:
        if block.get("cache_control") is not None:
            ignored["cache_control"] = None
        field = _TEXT_BLOCKS[kind]
        return {"type": "text", "text": as_text(block.get(field), f"{where}.{field}")}
    if kind in _IMAGE_BLOCKS:
        return {"type": "image", "url": _image_url(block, where)}
    if kind in _UNREADABLE_BLOCKS:
        refuse(f"{where}.type", kind, "text and images")
    ignored[f"{where.partition('[')[0]}.{kind[:MAX_NAME]}"] = None
    return None


def _image_url(block: Json, where: str) -> str:
    """The data URI of an image in the form of any wire."""
    source = block.get("source") if block["type"] == "image" else block.get("image_url")
    url = source
    if isinstance(source, dict):
        url = source.get("url")
        if source.get("type") == "base64":
            url = f"data:{source.get('media_type')};base64,{source.get('data')}"
    if not isinstance(url, str) or not _IMAGE.match(url):
        refuse(where, url, "an image as data URI or base64 (png, jpeg, gif or webp); addresses are never fetched")
    return url


def tool_call(call_id: object, name: object, given: object, where: str) -> Json:
    """A call of the assistant; a client that drops the id gets one from `finished`."""
    return {
        "id": "" if call_id is None else as_text(call_id, f"{where}.id"),
        "type": "function",
        "function": {"name": as_name(name, f"{where}.name"), "arguments": arguments(given)},
    }


def tool_message(call_id: object, given: object, where: str, ignored: Ignored) -> Json:
    """What a tool answered; a client that drops the id gets one from `finished`."""
    return {
        "role": "tool",
        "tool_call_id": "" if call_id is None else as_text(call_id, f"{where}.id"),
        "content": "" if given is None else content(given, f"{where}.content", ignored),
    }


def assistant(text: str, reasoning: str, calls: list[Json]) -> Json:
    """An assistant message in the form of chat templates, without what is empty."""
    message: Json = {"role": "assistant", "content": text}
    if reasoning:
        message["reasoning_content"] = reasoning
    if calls:
        message["tool_calls"] = calls
    return message


def finished(messages: list[Json], where: str) -> list[Json]:
    """Messages with leading system messages merged and every tool message paired with its call.

    Ids that a client dropped are made up from the place of the call, and answers without one are paired in order.
    """
    if not messages:
        refuse(where, messages, "at least one message")
    messages = merged_system(messages)
    waiting: dict[str, None] = {}
    for place, message in enumerate(messages):
        if message["role"] == "assistant":
            for index, call in enumerate(message.get("tool_calls", ())):
                call["id"] = call["id"] or f"call_{place}_{index}"
            waiting = dict.fromkeys(call["id"] for call in message.get("tool_calls", ()))
        elif message["role"] == "tool":
            call_id = message["tool_call_id"] or next(iter(waiting), None)
            if not call_id:
                refuse(where, "a tool message without an id", "the id of a call")
            message["tool_call_id"] = call_id
            waiting.pop(call_id, None)
    return messages
