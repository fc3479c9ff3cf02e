"""What a chat template puts around and between the turns that the policy sampled.

A sampled turn is never rendered: templates trim it, and tool calls do not come back as they were written. In its place
the template gets a message with a mark for each thing that was said, and the text behind the last mark is what comes
between this turn and the next. A mark that does not come out tells that the template leaves out something that the
policy said, such as the reasoning of earlier turns.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from itertools import count
from typing import Any
from uuid import uuid4

from schemas.chat import ChatError
from stages.agents.rendering import REASONING_KEYS, ChatRenderer

Message = Mapping[str, Any]
END_OF_REASONING = "</think>"


class Rewritten(Exception):
    """The template does not show the history as it was sampled, so it cannot be continued. The message says how."""


class Marks:
    """Marks for one model's template and its arguments. All conversations share it: a mark is a function of a place."""

    def __init__(self, renderer: ChatRenderer, template_args: Mapping[str, Any] | None = None) -> None:
        self._renderer = renderer
        self._template_args = dict(template_args or {})
        self._secret = f"mark{uuid4().hex}"  # nobody can guess and say it; letters and digits pass every filter
        self._closings: dict[str, str | None] = {}
        added = renderer.tokenizer.added_tokens_decoder
        self._whole = lru_cache(maxsize=256)(lambda text: tuple(renderer.tokenize(text)))
        self._special = {token_id: token.content for token_id, token in added.items() if token.special}

    def render(self, messages: Sequence[Message], tools: Sequence[Message] = ()) -> str:
        """The conversation's text up to where the policy speaks.

        What a template refuses is rendered in the other ways that templates expect, if need be. Raises ChatError when
        it refuses them all.
        """
        refusals = []
        for form in (list, _simplified, _with_text_arguments):
            try:
                return self._renderer.render(form(messages), tools, self._template_args)
            except Exception as refusal:  # templates raise what they like
                refusals.append(refusal)
        problem = f"the model's chat template cannot render these messages: {refusals[0]}"
        raise ChatError(400, "invalid_request", problem, "messages") from refusals[0]

    def tokenize(self, text: str) -> list[int]:
        """Token ids of a whole render; all rollouts of a group ask for the same one."""
        return list(self._whole(text))

    def mark(self, message: Message, place: int) -> tuple[dict[str, Any], tuple[str, ...]]:
        """The message that stands for a sampled one, and its marks. `place` is its position in the conversation."""
        names = (f"{self._secret}{place:08x}{part:04x}" for part in count())
        marked, marks = dict(message), []

        def new() -> str:
            marks.append(next(names))
            return marks[-1]

        content, calls = str(message.get("content") or ""), message.get("tool_calls") or ()
        reasoning, end, _ = content.rpartition(END_OF_REASONING)
        if message.get("reasoning_content"):
            marked["reasoning_content"] = new()
        if end:  # reasoning that no parser took out: templates look for it in the text
            start = "<think>" if reasoning.lstrip().startswith("<think>") else ""
            marked["content"] = f"{start}{new()}{end}{new()}"
        elif content or not (calls or marks):
            marked["content"] = new()
        if calls:
            marked["tool_calls"] = [
                _with_arguments(call, lambda said: new() if isinstance(said, str) else {"a": new()}) for call in calls
            ]
        return marked, tuple(marks)

    def delta(
        self, text: str, start: int, marked: Message, marks: Sequence[str], follower: Message | None, last: int
    ) -> list[int]:
        """Token ids between a sampled turn and the next one.

        The turn's `marks` are looked for in `text[start:]`. `follower` is the message behind the turn, `last` the last
        token of it: where it is the end of the turn, the delta starts behind it, otherwise with the template's end of
        turn. Raises Rewritten.
        """
        ends = [text.find(mark, start) + len(mark) for mark in marks]
        if any(end < len(mark) for end, mark in zip(ends, marks, strict=True)):
            raise Rewritten("the template leaves out something that the policy said")
        after = text[max(ends) :]
        if self._secret in after:
            raise Rewritten("the template repeats what the policy said")
        closing = self._closing(marked, marks, follower)
        after = after[self._end_of_turn(after, closing, bool(marked.get("tool_calls")), last) :]
        token_ids = self._renderer.tokenize(after)
        ended = last in self._special or last == self._renderer.tokenizer.eos_token_id
        return token_ids[1:] if ended and token_ids[:1] == [last] else token_ids

    def _end_of_turn(self, after: str, closing: str, has_calls: bool, last: int) -> int:
        """Where in `after` the turn ends: what comes before (the tail of a tool call) is the policy's own.

        Looked for in `closing`, since later text may hold anything.
        """
        sampled = self._special.get(last)
        end = self._special.get(self._renderer.tokenizer.eos_token_id)
        for text in (sampled, end if has_calls else None):
            found = closing.find(text) if text else -1
            if found >= 0 and after.startswith(closing[: found + len(text or "")]):
                return found
        if has_calls:
            raise Rewritten("the template does not show where tool calls end")
        return 0

    def _closing(self, marked: Message, marks: Sequence[str], follower: Message | None) -> str:
        """What the template puts between such a turn and the content of its follower, found in a short conversation.

        Raises Rewritten where the follower does not come out behind the turn.
        """
        role = follower["role"] if follower else None
        calls = marked.get("tool_calls") or ()
        said = (bool(marked.get("reasoning_content")), bool(marked.get("content")))
        kind = str((role, said, [isinstance(call["function"]["arguments"], str) for call in calls]))
        if kind not in self._closings:
            name = f"{self._secret}follower"
            follow = {"role": role, "content": name, "tool_call_id": calls[-1].get("id") if calls else None}
            messages = [{"role": "user", "content": "x"}, marked, *([follow] if role else [])]
            try:
                text = self.render(messages)
            except ChatError:
                text = ""
            closing, found, _ = text.partition(max(marks, key=text.find))[2].partition(name)
            self._closings[kind] = closing if found or not role else None
        known = self._closings[kind]
        if known is None:
            raise Rewritten("the template does not put what follows a turn behind it")
        return known


def _simplified(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Later system messages as user messages, no reasoning beside both text and calls, arguments always a mapping."""
    simplified = []
    for index, message in enumerate(messages):
        simple = dict(message)
        if index > 0 and message["role"] == "system":
            simple["role"] = "user"
        if message.get("tool_calls"):
            simple["tool_calls"] = [_with_arguments(call, _as_mapping) for call in message["tool_calls"]]
            for key in REASONING_KEYS if message.get("content") else ():
                simple.pop(key, None)
        simplified.append(simple)
    return simplified


def _with_text_arguments(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Arguments as JSON text, and no content rather than an empty one, as the OpenAI wire has them."""
    return [
        {
            **message,
            "content": message.get("content") or None,
            "tool_calls": [_with_arguments(call, _as_text) for call in message["tool_calls"]],
        }
        if message.get("tool_calls")
        else message
        for message in _simplified(messages)
    ]


def _with_arguments(call: Message, change: Callable[[Any], Any]) -> dict[str, Any]:
    return {**call, "function": {**call["function"], "arguments": change(call["function"].get("arguments"))}}


def _as_mapping(arguments: Any) -> Any:
    return arguments if isinstance(arguments, Mapping) else {"arguments": arguments}


def _as_text(arguments: Any) -> str:
    return json.dumps(arguments, ensure_ascii=False)
