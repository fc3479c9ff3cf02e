"""Toy tokenizers and templates, and an engine's samples, for tests of captured conversations.

A character is a token, and so is each of the tags <s> (system), <u> (user), <a> (assistant), <t> (tool), <c> (call),
<e> (end of a turn) and <x> (a special token without a use).
"""

from __future__ import annotations

import json
import tempfile
from functools import lru_cache
from itertools import pairwise
from typing import Any

from schemas.chat import ParsedTurn, ToolCall
from schemas.recipe import SamplingConfig
from schemas.types import Generation
from stages.agents.rendering import ChatRenderer
from stages.capture.marks import Marks
from stages.capture.segments import CapturedSegment, Session, Turn
from stages.capture.writing import assistant_message

TAGS = ["<s>", "<u>", "<a>", "<t>", "<c>", "<e>", "<x>"]
CALLS = "{% for c in m.tool_calls or [] %}<c>{{ c.function.name }}{{ c.function.arguments | tojson }}{% endfor %}"
OPENING = "{% if tools %}<s>{{ tools | tojson }}<e>{% endif %}{% for m in messages %}<{{ m.role[0] }}>"
CLOSING = "<e>{% endfor %}{% if add_generation_prompt %}<a>{% endif %}"
PLAIN = OPENING + "{{ m.content or '' }}" + CALLS + CLOSING
"""Shows what was said as it was said, and no reasoning."""
THINKING = (
    OPENING + "{% if m.reasoning_content and WHEN %}[{{ m.reasoning_content }}]{% endif %}"
    "{{ m.content or '' }}" + CALLS + CLOSING
)
KEEPS_THOUGHTS = THINKING.replace("WHEN", "true")
DROPS_THOUGHTS = (
    "{% set ns = namespace(last=0) %}"
    "{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
) + THINKING.replace("WHEN", "loop.index0 > ns.last")
"""Drops the reasoning of what lies before the last user message."""
TRIMS = OPENING + "{{ (m.content or '') | replace('</think> ', '</think>') }}" + CALLS + CLOSING


@lru_cache
def renderer(template: str = PLAIN, merges: tuple[tuple[str, str], ...] = ()) -> ChatRenderer:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokens = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *("".join(merge) for merge in merges)]
    model = models.BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=list(merges))
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(TAGS)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<e>")
    fast.chat_template = template
    with tempfile.TemporaryDirectory() as folder:
        fast.save_pretrained(folder)
        return ChatRenderer(folder)


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def tool(call_id: str, text: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": call_id, "content": text}


def call(call_id: str, **arguments: Any) -> ToolCall:
    return ToolCall(call_id, "add", json.dumps(arguments))


class Chat:
    """A session under a template, and an engine that says what it is told."""

    def __init__(self, template: str = PLAIN, max_context_tokens: int = 1000, **args: Any) -> None:
        self.renderer = renderer(template, args.pop("merges", ()))
        self.session = Session(Marks(self.renderer, args), max_context_tokens)

    def ids(self, text: str) -> list[int]:
        return self.renderer.tokenize(text)

    def commit(self, turn: Turn, sampled: str | list[int], said: ParsedTurn | None = None) -> dict[str, Any]:
        """Record a sample; what the client gets as its message. Its log-probs are -1/8, -2/8, ..."""
        token_ids = self.ids(sampled) if isinstance(sampled, str) else sampled
        text = self.renderer.text(token_ids)
        said = said or ParsedTurn(text)
        self.session.commit(turn, generation(token_ids), said, SamplingConfig(), 0.5)
        return assistant_message(said)

    def ask(
        self,
        messages: list[dict[str, Any]],
        sampled: str | list[int],
        said: ParsedTurn | None = None,
        tools: list[dict[str, Any]] | None = None,
    ) -> list[dict[str, Any]]:
        """A request and its only sample; the conversation that a client has then."""
        return [*messages, self.commit(self.session.begin(messages, tools or ()), sampled, said)]

    def parts(self) -> list[list[str]]:
        """Each segment as texts in turn: context, sampled, context, sampled, ..."""
        return [[self.decode(part) for part in split(segment)] for segment in self.session.segments()]

    def decode(self, token_ids: list[int]) -> str:
        return str(self.renderer.tokenizer.decode(token_ids, clean_up_tokenization_spaces=False))


def generation(token_ids: list[int], finish_reason: str = "stop") -> Generation:
    count = len(token_ids)
    return Generation("r", token_ids, [-(i + 1) / 8 for i in range(count)], ((0, 0, count),), finish_reason)


def split(segment: CapturedSegment) -> list[list[int]]:
    """Token ids between the edges of spans, context first."""
    edges = [0, *(edge for span in segment.spans for edge in (span["start"], span["end"]))]
    assert edges == sorted(edges) and edges[-1] == len(segment.token_ids) == len(segment.logprobs)
    return [segment.token_ids[start:end] for start, end in pairwise(edges)]
