"""A sampled turn as a client sees it: vLLM's own reasoning and tool parsers, called beside the engine."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any
from uuid import uuid4

from schemas.chat import ParsedTurn, ToolCall
from schemas.errors import RecipeError
from schemas.types import ParseOptions

log = logging.getLogger(__name__)


class TurnParser:
    """Parsers of one engine. They read text that was decoded for them; the token ids stay what is trained."""

    def __init__(self, tokenizer: Any, tool_parser: str | None, reasoning_parser: str | None) -> None:
        from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

        self._tokenizer = tokenizer
        self._request_type = ChatCompletionRequest
        self._num_failures = 0
        self._tool_parser = self._reasoning_parser = None
        if tool_parser is not None:
            from vllm.tool_parsers import ToolParserManager

            self._tool_parser = _registered(ToolParserManager.get_tool_parser, ToolParserManager, "tool", tool_parser)
        if reasoning_parser is not None:
            from vllm.reasoning import ReasoningParserManager

            manager = ReasoningParserManager
            self._reasoning_parser = _registered(manager.get_reasoning_parser, manager, "reasoning", reasoning_parser)
        self._special = set(tokenizer.all_special_ids)

    def parse(
        self, prompt_ids: Sequence[int], token_ids: Sequence[int], ended_itself: bool, options: ParseOptions
    ) -> ParsedTurn:
        """What the policy said: reasoning, content and calls. A parser that fails leaves the text as content.

        `ended_itself`: the last token is the model's own end of turn.
        """
        ids = [int(token) for token in token_ids]
        if ended_itself and ids and ids[-1] in self._special:
            ids.pop()
        plain = self._decode(ids, skip_special_tokens=True, stop=options.stop)
        if self._reasoning_parser is None and (self._tool_parser is None or not options.tools):
            return ParsedTurn(plain)
        text = self._decode(ids, skip_special_tokens=False, stop=options.stop)
        try:
            return self._parse(prompt_ids, text, options)
        except Exception:  # a parser of any model met something that it did not expect from an untrained policy
            self._num_failures += 1
            if self._num_failures in (1, 10, 100, 1000):
                log.warning("a parser failed on %d sampled turns so far", self._num_failures, exc_info=True)
            return ParsedTurn(plain)

    def _decode(self, ids: list[int], *, skip_special_tokens: bool, stop: str | None) -> str:
        text = str(self._tokenizer.decode(ids, skip_special_tokens=skip_special_tokens))
        return text.partition(stop)[0] if stop else text

    def _parse(self, prompt_ids: Sequence[int], text: str, options: ParseOptions) -> ParsedTurn:
        request = self._request_type(
            model="policy", messages=[], tools=options.tools or None, tool_choice="auto" if options.tools else "none"
        )
        reasoning: str | None = None
        content: str | None = text
        if self._reasoning_parser is not None:
            parser = self._reasoning_parser(self._tokenizer)
            parser.adjust_initial_state_from_prompt(list(prompt_ids))
            reasoning, content = parser.extract_reasoning(text, request)
        calls: tuple[ToolCall, ...] = ()
        if self._tool_parser is not None and options.tools:
            found = self._tool_parser(self._tokenizer, request.tools).extract_tool_calls(content or "", request)
            if found.tools_called:
                content = found.content
                calls = tuple(
                    ToolCall(f"call_{uuid4().hex[:24]}", call.function.name, call.function.arguments)
                    for call in found.tool_calls
                )
        return ParsedTurn(content or "", reasoning or "", calls)


def _registered(get: Any, manager: Any, kind: str, name: str) -> Any:
    try:
        return get(name)
    except KeyError:
        names = ", ".join(sorted(manager.list_registered()))
        raise RecipeError(f"engine.{kind}_parser: found {name!r}; allowed: one of vLLM's: {names}") from None
