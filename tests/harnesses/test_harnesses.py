"""Unmodified command-line harnesses against the chat server; a scripted engine calls their shell tool, then says text.

    pytest -m harnesses

Installs from the npm registry, so it is no part of the default run.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from schemas.chat import ParsedTurn, ToolCall
from schemas.recipe import AgentConfig, SamplingConfig
from schemas.types import Generation, ParseOptions
from stages.capture.marks import Marks
from stages.capture.recorder import Recorder
from stages.capture.server import CaptureServer
from tests.chats import generation, renderer, split
from tests.harnesses.clients import HARNESSES, Harness

pytestmark = pytest.mark.harnesses

COMMAND = "echo marker-$((6 * 7))"
MARKER = "marker-42"
"""What the command prints; the prompt and the call do not hold it."""
DONE = "The marker was printed."


@dataclass
class Engine:
    """Calls the shell tool where none was called yet, then says that it is done; without tools, it gives a title."""

    shell_tools: tuple[str, ...]
    prompts: list[list[int]] = field(default_factory=list)
    said: list[list[int]] = field(default_factory=list)
    called: bool = False

    async def sample(self, token_ids: list[int], sampling: SamplingConfig, options: ParseOptions) -> Generation:
        turn, text = ParsedTurn("A title"), "A title"
        if options.tools and self.called:
            turn, text = ParsedTurn(DONE), DONE
        elif options.tools:
            self.called = True
            call = self._call(options.tools)
            turn, text = ParsedTurn("", "", (call,)), f"<c>{call.name}{call.arguments}"
        sampled = renderer().tokenize(f"{text}<e>")
        self.prompts.append(list(token_ids))
        self.said.append(sampled)
        made = generation(sampled)
        return Generation(made.request_id, made.token_ids, made.logprobs, made.versions, "stop", parsed=turn)

    def _call(self, tools: list[dict[str, Any]]) -> ToolCall:
        functions = {tool["function"]["name"]: tool["function"] for tool in tools}
        name = next((name for name in self.shell_tools if name in functions), None)
        assert name is not None, f"no shell tool among {list(functions)}"
        parameters = functions[name]["parameters"]
        key = "cmd" if "cmd" in parameters["properties"] else "command"
        is_list = parameters["properties"][key].get("type") == "array"
        arguments: dict[str, Any] = {key: ["bash", "-c", COMMAND] if is_list else COMMAND}
        if "description" in parameters.get("required", ()):
            arguments["description"] = "Prints it"
        return ToolCall("call_1", name, json.dumps(arguments))


@pytest.mark.timeout(900)
@pytest.mark.parametrize("harness", HARNESSES, ids=lambda harness: harness.name)
async def test_a_harness_runs_its_tool_and_is_recorded_token_by_token(harness: Harness, tmp_path: Path) -> None:
    missing = [program for program in ("npm", "node") if shutil.which(program) is None]
    if missing:
        pytest.skip(f"{' and '.join(missing)} not found; the harnesses are installed with npm and run on node")
    program = harness.install()
    engine = Engine(harness.shell_tools)
    config = AgentConfig(entry="a:B", max_context_tokens=400_000)
    recorder = Recorder(engine.sample, renderer(), Marks(renderer()), config, SamplingConfig(max_tokens=4000))
    server = CaptureServer()
    await server.start()
    try:
        async with server.open(recorder) as url:
            status, printed = await harness.run(program, url, recorder.key, tmp_path)
    finally:
        await server.close()
    segments = recorder.session.segments()
    assert status == 0, printed
    assert DONE in printed

    # one conversation of two turns, in which the call was executed
    (main,) = [segment for segment in segments if segment.tools]
    assert (main.opened, len(main.turns)) == ("new", 2)
    *_, asked, answered, said = main.messages
    assert [call["id"] for call in asked["tool_calls"]] == [answered["tool_call_id"]]
    assert answered["role"] == "tool" and MARKER in answered["content"]
    assert said == {"role": "assistant", "content": DONE}
    assert MARKER not in json.dumps(main.messages[:-2])

    # what it holds is what the engine was given and said: prompt, call, delta, text
    prompt, first, delta, last = split(main)
    turns = [index for index, ids in enumerate(engine.prompts) if ids[: len(prompt)] == prompt]
    assert [engine.prompts[index] for index in turns] == [prompt, prompt + first + delta]
    assert [engine.said[index] for index in turns] == [first, last]
    assert prompt == renderer().tokenize(
        renderer().render(main.messages[:-3], main.tools, {}),
    )
    result = answered["content"]
    assert delta == renderer().tokenize(f"<t>{result}<e><a>")
    for segment in segments:
        expected = [0.0] * len(segment.token_ids)
        for span in segment.spans:
            expected[span["start"] : span["end"]] = [-(i + 1) / 8 for i in range(span["end"] - span["start"])]
        assert segment.logprobs == expected

    # side calls are conversations of their own
    side = [segment for segment in segments if segment is not main]
    assert all((segment.opened, len(segment.turns)) == ("new", 1) for segment in side)
    assert len(engine.prompts) == 2 + len(side)
    assert not recorder.out_of_turns and not recorder.session.out_of_context
