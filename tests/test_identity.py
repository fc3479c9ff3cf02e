"""Which messages are the same one to the capture server."""

from __future__ import annotations

from typing import Any

import pytest

from stages.capture.identity import identities


def said(content: Any = "", *arguments: Any, **more: Any) -> dict[str, Any]:
    calls = [{"id": f"c{i}", "function": {"name": "f", "arguments": value}} for i, value in enumerate(arguments)]
    return {"role": "assistant", "content": content, "tool_calls": calls, **more}


def asked(content: Any, **more: Any) -> dict[str, Any]:
    return {"role": "user", "content": content, **more}


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (asked("a"), asked([{"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}])),
        (asked("a"), asked([{"type": "input_text", "text": "a"}], id="m1", status="completed", name=None)),
        (asked(""), asked(None)),
        ({"role": "system", "content": "s"}, {"role": "developer", "content": "s"}),
        (said("a"), said(" a\n", reasoning_content="hm", signature="")),
        (said("a"), {"role": "assistant", "content": "a", "tool_calls": None}),
        (said(None, {"a": 1}), said("", '{"a": 1}')),
        (said("", '{"a": 1, "b": [1.0, 2]}'), said("", '{"b":[1,2.0],"a":1}')),
        (said("", {"a": 2**60}), said("", f'{{"a": {2**60 - 1}}}')),  # a double holds either
        (said("", '{"a": "é"}'), said("", '{"a": "\\u00e9"}')),
        (said("", ' {"a": 1'), said("", '{"a": 1 ')),
        (said("", {"a": 1}), {**said("", {"a": 1}), "id": "msg_1"}),
        (
            asked([{"type": "image_url", "image_url": {"url": "u"}, "cache_control": None}]),
            asked([{"image_url": {"url": "u"}, "type": "image_url"}]),
        ),
    ],
)
def test_messages_that_clients_spell_differently_are_the_same(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert identities([one]) == identities([other])
    assert hash(identities([one])[0]) == hash(identities([other])[0])


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (asked("a"), asked(" a")),
        (asked("a"), asked([{"type": "text", "text": "a"}, {"type": "text", "text": ""}])),
        (asked("a"), said("a")),
        (asked("a"), asked("a", name="bob")),
        (asked('{"type": "x"}'), asked([{"type": "x"}])),
        (said("", {"a": 1}), said("", {"a": "1"})),
        (said("", {"a": 1}), said("", {"a": True})),
        (said("", {"a": 1}), said("", {"a": 1}, {"a": 1})),
        (said("", {"a": None}), said("", {})),
        (said("", '"x"'), said("", "x")),
        (
            asked([{"type": "image_url", "image_url": {"url": "u"}}]),
            asked([{"type": "image_url", "image_url": {"url": "v"}}]),
        ),
    ],
)
def test_messages_that_say_something_else_differ(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert identities([one]) != identities([other])


def test_results_belong_to_calls_whatever_the_ids_are_called() -> None:
    def history(first: str, second: str, *answers: str) -> list[dict[str, Any]]:
        calls = [{"id": name, "function": {"name": "f", "arguments": {}}} for name in (first, second)]
        results = [{"role": "tool", "tool_call_id": name, "content": "same"} for name in answers]
        return [{"role": "assistant", "content": "", "tool_calls": calls}, *results]

    assert identities(history("a", "b", "a", "b")) == identities(history("x", "y", "x", "y"))
    assert identities(history("a", "b", "a", "b")) != identities(history("a", "b", "b", "a"))
