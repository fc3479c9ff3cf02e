"""Unmodified command-line harnesses against the chat server; a scripted engine calls their shell tool, then says text.

    pytest -m harnesses

Installs from the npm registry, so it is no part of the default run.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.chats import split
from tests.harnesses.clients import HARNESSES, Harness
from tests.harnesses.scripted import DONE, MARKER, Engine, play

pytestmark = [pytest.mark.harnesses, pytest.mark.timeout(900)]  # the first run installs
each_harness = pytest.mark.parametrize("harness", HARNESSES, ids=lambda harness: harness.name)


@pytest.mark.parametrize("thought", ["", "Look first."], ids=["plain", "thinks"])
@each_harness
async def test_a_harness_runs_its_tool_and_is_recorded_token_by_token(
    harness: Harness, thought: str, tmp_path: Path
) -> None:
    engine = Engine(harness.shell_tools, thought)
    recorder, status, printed = await play(harness, engine, tmp_path)
    assert status == 0, printed
    assert DONE in printed

    # one conversation of two turns, in which the call was executed
    segments = recorder.session.segments()
    (main,) = [segment for segment in segments if segment.tools]
    assert (main.opened, len(main.turns)) == ("new", 2)
    asked, answered, said = main.messages[-3:]
    assert [call["id"] for call in asked["tool_calls"]] == [answered["tool_call_id"]]
    assert answered["role"] == "tool" and MARKER in answered["content"]
    assert said["content"] == DONE and said.get("reasoning_content", "") == thought
    assert MARKER not in json.dumps(main.messages[:-2])

    # its tokens are what the engine was given and said: prompt, call, delta, text
    tokenize = engine.renderer.tokenize
    prompt, first, delta, last = split(main)
    given = [index for index, ids in enumerate(engine.prompts) if ids[: len(prompt)] == prompt]
    assert [engine.prompts[index] for index in given] == [prompt, prompt + first + delta]
    assert [engine.said[index] for index in given] == [first, last]
    assert prompt == tokenize(engine.renderer.render(main.messages[:-3], main.tools, {}))
    assert delta == tokenize(f"<t>{answered['content']}<e><a>")
    for segment in segments:
        expected = [0.0] * len(segment.token_ids)
        for span in segment.spans:
            count = span["end"] - span["start"]
            expected[span["start"] : span["end"]] = [-(i + 1) / 8 for i in range(count)]
        assert segment.logprobs == expected

    # side calls are conversations of their own
    side = [segment for segment in segments if segment is not main]
    assert all((segment.opened, len(segment.turns)) == ("new", 1) for segment in side)
    assert len(engine.prompts) == 2 + len(side)
    assert not recorder.out_of_turns and not recorder.session.out_of_context


@each_harness
async def test_a_harness_that_has_used_its_turns_ends_at_once(harness: Harness, tmp_path: Path) -> None:
    recorder, status, printed = await play(harness, Engine(harness.shell_tools), tmp_path, max_turns=1)
    assert status not in (0, None) and "used 1 of its 1 turns" in printed
    assert recorder.out_of_turns and recorder.num_requests <= 3  # two turns and a title
