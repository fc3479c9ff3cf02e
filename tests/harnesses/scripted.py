"""A scripted engine behind the chat server, and a harness that has a session of it to itself."""

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
from tests.chats import KEEPS_THOUGHTS, generation, renderer
from tests.harnesses.clients import Harness, Place

COMMAND = "echo marker-$((6 * 7))"
MARKER = "marker-42"
"""What the command prints; the prompt and the call do not hold it."""
DONE = "The marker was printed."
TITLE = "A title"


@dataclass
class Engine:
    """Runs each of its commands with the shell tool, then says that it is done; without tools, it gives a title.

    With `thought` it thinks before, and takes longer than a stream waits for its first event.
    """

    shell_tools: tuple[str, ...]
    thought: str = ""
    commands: tuple[str, ...] = (COMMAND,)
    prompts: list[list[int]] = field(default_factory=list)
    said: list[list[int]] = field(default_factory=list)

    @property
    def renderer(self) -> ChatRenderer:
        return renderer(KEEPS_THOUGHTS)

    async def sample(self, token_ids: list[int], sampling: SamplingConfig, options: ParseOptions) -> Generation:
        text = DONE if options.tools else TITLE
        turn = ParsedTurn(text, self.thought)
        if options.tools and self.commands:
            command, *rest = self.commands
            self.commands = tuple(rest)
            call = self._call(command, options.tools)
            turn, text = ParsedTurn("", self.thought, (call,)), f"<c>{call.name}{call.arguments}"
        thought = f"[{self.thought}]" if self.thought else ""
        sampled = self.renderer.tokenize(f"{thought}{text}<e>")
        self.prompts.append(list(token_ids))
        self.said.append(sampled)
        await asyncio.sleep(1.5 * PATIENCE_SECONDS if thought else 0)
        return replace(generation(sampled), parsed=turn)

    def _call(self, command: str, tools: list[dict[str, Any]]) -> ToolCall:
        functions = {tool["function"]["name"]: tool["function"] for tool in tools}
        name = next((name for name in self.shell_tools if name in functions), None)
        assert name is not None, f"no shell tool among {list(functions)}"
        parameters = functions[name]["parameters"]
        key = "cmd" if "cmd" in parameters["properties"] else "command"
        arguments = {key: command}
        if "description" in parameters.get("required", ()):
            arguments["description"] = "Prints it"
        return ToolCall(f"call_{len(self.said)}", name, json.dumps(arguments))


class CountingRecorder(Recorder):
    num_requests = 0

    def once(self, fingerprint: Hashable, is_retry: bool, request: ChatRequest) -> Any:
        self.num_requests += 1
        return super().once(fingerprint, is_retry, request)


def installed(harness: Harness) -> Path:
    """Its program; skips the test where it cannot be installed or run."""
    missing = [program for program in ("npm", "node") if shutil.which(program) is None]
    if missing:
        pytest.skip(f"{' and '.join(missing)} not found; the harnesses are installed with npm and run on node")
    return harness.install()


async def play(
    harness: Harness, engine: Engine, folder: Path, compact_at: int | None = None, **config: Any
) -> tuple[CountingRecorder, int | None, str]:
    """The recorder of a session that a harness had to itself, its exit status and what it printed."""
    program = installed(harness)
    agent = AgentConfig(entry="a:B", max_context_tokens=400_000, **config)
    recorder = CountingRecorder(
        engine.sample, engine.renderer, Marks(engine.renderer), agent, SamplingConfig(max_tokens=4000)
    )
    server = CaptureServer()
    await server.start()
    try:
        async with server.open(recorder) as url:
            status, printed = await harness.run(program, Place(url, recorder.key, compact_at), folder)
    finally:
        await server.close()
    return recorder, status, printed
