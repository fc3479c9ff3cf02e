"""vLLM's own parsers on what an untrained policy may say: several calls, broken ones, and arguments that are code.

A turn with a call that its parser cannot read is text as a whole: no call is made, and the agent sees what was said.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from schemas.chat import ParsedTurn
from schemas.errors import RecipeError
from schemas.types import ParseOptions
from stages.workers.parsing import TurnParser
from tests.chats import renderer

PARAMETERS = {"type": "object", "properties": {"a": {"type": "integer"}, "x": {"type": "array"}}}
TOOLS: list[dict[str, Any]] = [{"type": "function", "function": {"name": "add", "parameters": PARAMETERS}}]


def parse(parser: str, text: str, tools: list[dict[str, Any]] | None = None) -> ParsedTurn:
    made = TurnParser(renderer().tokenizer, parser, None)
    return made.parse([], renderer().tokenize(text), False, ParseOptions(TOOLS if tools is None else tools))


def calls(turn: ParsedTurn) -> list[tuple[str, Any]]:
    return [(call.name, json.loads(call.arguments)) for call in turn.tool_calls]


def hermes(*bodies: str) -> str:
    return "\n".join(f"<tool_call>{body}</tool_call>" for body in bodies)


ONE, TWO = '{"name": "add", "arguments": {"a": 1}}', '{"name": "add", "arguments": {"a": 2}}'


def test_two_calls_of_a_turn_are_two_with_ids_of_their_own() -> None:
    turn = parse("hermes", "Look: " + hermes(ONE, TWO))
    assert calls(turn) == [("add", {"a": 1}), ("add", {"a": 2})] and turn.content.strip() == "Look:"
    assert len({call.id for call in turn.tool_calls}) == 2


@pytest.mark.parametrize(
    "text",
    [
        hermes(ONE) + '<tool_call>{"name": "add", "argum',
        hermes(ONE, '{"name": "add", "arguments": {"a": 1}'),
        hermes("[1,2]"),
        hermes('"x"'),
        hermes("null"),
        hermes(""),
    ],
)
def test_a_turn_with_a_call_that_cannot_be_read_is_text(text: str) -> None:
    assert parse("hermes", text) == ParsedTurn(text)


@pytest.mark.parametrize("arguments", ["[1, 2]", '"x"', "null", "7"])
def test_arguments_that_are_no_object_reach_the_wires_as_they_are(arguments: str) -> None:
    turn = parse("hermes", hermes(f'{{"name": "add", "arguments": {arguments}}}'))
    assert [call.arguments for call in turn.tool_calls] == [arguments]  # which show them as text


def test_without_tools_nothing_is_a_call() -> None:
    assert parse("hermes", hermes(ONE), tools=[]) == ParsedTurn(hermes(ONE))


def test_arguments_that_are_code_are_run_by_none_of_the_parsers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.tool_parsers import ToolParserManager

    monkeypatch.chdir(tmp_path)
    code = '__import__("os").system("touch X")'
    texts = (
        f"<tool_call>\n<function=add>\n<parameter=x>\n{code}\n</parameter>\n</function>\n</tool_call>",
        f"<tool_call>add\n<arg_key>x</arg_key>\n<arg_value>{code}</arg_value>\n</tool_call>",
        f'<function name="add"><param name="x">{code}</param></function>',
        f"[add(x={code})]",
        hermes(f'{{"name": "add", "arguments": {{"x": {code}}}}}'),
        f'{{"name": "add", "parameters": {{"x": {code}}}}}',
    )
    found = {name: [calls(parse(name, text)) for text in texts] for name in ToolParserManager.list_registered()}
    assert list(tmp_path.iterdir()) == []
    assert len(found) > 40 and found["qwen3_coder"][0] == [("add", {"x": code})], "an array that is none is text"


def test_a_parser_that_does_not_exist_is_refused_by_its_key() -> None:
    with pytest.raises(RecipeError, match=r"engine\.tool_parser: found 'hermess'; allowed: one of vLLM's: .*hermes"):
        parse("hermess", "x")
