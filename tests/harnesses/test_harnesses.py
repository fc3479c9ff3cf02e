"""Unmodified command-line harnesses against the chat server; a scripted engine calls their shell tool, then says text.

    pytest -m harnesses

Installs from the npm registry, so it is no part of the default run.
"""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Hashable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from schemas.chat import ChatRequest, ParsedTurn, ToolCall
from schemas.recipe import AgentConfig, SamplingConfig
from schemas.types import Generation, ParseOptions
from stages.agents.rendering import ChatRenderer
from stages.capture.marks import Marks
from stages.capture.recorder import Recorder
from stages.capture.server import PATIENCE_SECONDS, CaptureServer
from tests.chats import KEEPS_THOUGHTS, generation, renderer, split
from tests.harnesses.clients import HARNESSES, Harness

pytestmark = [pytest.mark.harnesses, pytest.mark.timeout(900)]  # the first run installs
each_harness = pytest.mark.parametrize("harness", HARNESSES, ids=lambda harness: harness.name)

COMMAND = "echo marker-$((6 * 7))"
MARKER = "marker-42"
"""What the command prints; the prompt and the call do not hold it."""
DONE = "The marker was printed."


@dataclass
class Engine:
    """Calls the shell tool where none was called yet, then says that it is done; without tools, it gives a title.

    With `thought` it thinks before, and takes longer than a stream waits for its first event.
    """

    shell_tools: tuple[str, ...]
    thought: str = ""
    prompts: list[list[int]] = field(default_factory=list)
    said: list[list[int]] = field(default_factory=list)
    called: bool = False

    @property
    def renderer(self) -> ChatRenderer:
        return renderer(KEEPS_THOUGHTS)

    async def sample(self, token_ids: list[int], sampling: SamplingConfig, options: ParseOptions) -> Generation:
        turn, text = ParsedTurn("A title", self.thought), "A title"
        if options.tools and self.called:
            turn, text = ParsedTurn(DONE, self.thought), DONE
        elif options.tools:
            self.called = True
            call = self._call(options.tools)
            turn, text = ParsedTurn("", self.thought, (call,)), f"<c>{call.name}{call.arguments}"
        thought = f"[{self.thought}]" if self.thought else ""
        sampled = self.renderer.tokenize(f"{thought}{text}<e>")
        self.prompts.append(list(token_ids))
        self.said.append(sampled)
        await asyncio.sleep(1.5 * PATIENCE_SECONDS if thought else 0)
        return replace(generation(sampled), parsed=turn)

    def _call(self, tools: list[dict[str, Any]]) -> ToolCall:
        functions = {tool["function"]["name"]: tool["function"] for tool in tools}
        name = next((name for name in self.shell_tools if name in functions), None)
        assert name is not None, f"no shell tool among {list(functions)}"
        parameters = functions[name]["parameters"]
        key = "cmd" if "cmd" in parameters["properties"] else "command"
        arguments = {key: COMMAND}
        if "description" in parameters.get("required", ()):
            arguments["description"] = "Prints it"
        return ToolCall("call_1", name, json.dumps(arguments))


class CountingRecorder(Recorder):
    num_requests = 0

    def once(self, fingerprint: Hashable, is_retry: bool, request: ChatRequest) -> Any:
        self.num_requests += 1
        return super().once(fingerprint, is_retry, request)


async def play(
    harness: Harness, engine: Engine, folder: Path, **config: Any
) -> tuple[CountingRecorder, int | None, str]:
    """The recorder of a session that a harness had to itself, its exit status and what it printed."""
    missing = [program for program in ("npm", "node") if shutil.which(program) is None]
    if missing:
        pytest.skip(f"{' and '.join(missing)} not found; the harnesses are installed with npm and run on node")
    program = harness.install()
    agent = AgentConfig(entry="a:B", max_context_tokens=400_000, **config)
    recorder = CountingRecorder(
        engine.sample, engine.renderer, Marks(engine.renderer), agent, SamplingConfig(max_tokens=4000)
    )
    server = CaptureServer()
    await server.start()
    try:
        async with server.open(recorder) as url:
            status, printed = await harness.run(program, url, recorder.key, folder)
    finally:
        await server.close()
    return recorder, status, printed


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
