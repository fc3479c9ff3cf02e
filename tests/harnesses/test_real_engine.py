"""Unmodified command-line harnesses, whose every turn a real engine samples: what it sampled is what is stored.

    pytest -m harnesses

The policy is a tiny model that was trained on what a scripted engine said in the same harnesses: it runs a command that
prints much, then one that prints a marker, whose number it draws, and then says that it is done.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import pytest_asyncio

from schemas.recipe import RLRecipe
from stages.capture.segments import CapturedSegment
from tests.harnesses.clients import HARNESSES, NUM_LOGGED, Harness, Place
from tests.harnesses.scripted import DONE, installed
from tests.harnesses.warm_start import LONG_COMMAND, MAX_TOKENS, compact_at, record, warm_model
from tests.real.policies import Policy, holds, is_rendered_as_stored, logprobs_are_the_models, open_policy

pytestmark = [
    pytest.mark.harnesses,
    pytest.mark.real,
    pytest.mark.timeout(900),  # the first run installs
    pytest.mark.asyncio(loop_scope="session"),
]
each_harness = pytest.mark.parametrize("harness", HARNESSES, ids=lambda harness: harness.name)

MAX_PROMPT_TOKENS = 2500
"""Of the longest first prompt, which has 77 kB."""
COMPACTED = {
    "claude-code": [("new", True), ("branch", True), ("new", True)],
    "codex": [("new", True), ("rewritten", False), ("new", True)],
    "opencode": [("new", True), ("new", False), ("new", True)],
}
"""The main conversation, the request for a summary, the conversation that goes on from it: why its segment began, and
whether it has tools. Claude Code asks for the summary in place of the last call, Codex without its tools, and opencode
in a conversation of its own."""


@dataclass
class Played:
    """A policy that knows the harnesses, and how long the first prompt of each is."""

    policy: Policy
    num_prompt_tokens: dict[str, int]


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def played(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Played]:
    folder = tmp_path_factory.mktemp("harnesses")
    for harness in HARNESSES:
        installed(harness)
    recorded = await asyncio.gather(*(record(harness, folder / harness.name) for harness in HARNESSES))
    warm_model(folder / "model", [conversation for of_one in recorded for conversation in of_one])
    recipe = RLRecipe.model_validate(
        {
            "kind": "rl",
            "run": {"name": "harnesses", "root": str(folder)},
            "model": {"path": str(folder / "model"), "dtype": "float32"},
            "prompts": {"path": "none"},
            "agent": {"entry": "none:None", "max_context_tokens": MAX_TOKENS},
            "rollout": {"sampling": {"max_tokens": 128, "temperature": 0.7}},
            "engine": {"tool_parser": "hermes", "kv_cache_bytes": 64 << 20},
            "max_steps": 1,
            "device": "cpu",
        }
    )
    async with open_policy(recipe) as policy:
        prompts = {}
        for harness, (main, *_) in zip(HARNESSES, recorded, strict=True):
            prompts[harness.name] = len(policy.renderer.prompt(main.messages[: main.turns[0]], main.tools))
        yield Played(policy, prompts)


async def run(policy: Policy, harness: Harness, folder: Path, compact_at: int | None = None) -> list[CapturedSegment]:
    """The segments of a run that ended normally, which hold."""
    recorder = policy.recorder()
    async with policy.server.open(recorder) as url:
        status, printed = await harness.run(installed(harness), Place(url, recorder.key, compact_at), folder)
    said = [policy.text(list(generation.token_ids)) for _, generation in policy.samples]
    assert status == 0, (printed, said)
    assert DONE in printed, (printed, said)
    segments = recorder.session.segments()
    holds(policy, segments)
    for segment in segments:
        is_rendered_as_stored(policy, segment)
        logprobs_are_the_models(policy, segment)
    return segments


def is_title(segment: CapturedSegment) -> bool:
    """Whether it is opencode's side request for a title."""
    return "You are a title generator" in segment.messages[0]["content"]


def executed(segment: CapturedSegment) -> list[tuple[str, str]]:
    """Each command that was called, and its result."""
    results = {message["tool_call_id"]: message["content"] for message in segment.messages if message["role"] == "tool"}
    calls = [call for message in segment.messages for call in message.get("tool_calls") or ()]
    return [
        (next(iter(call["function"]["arguments"].values())), results[call["id"]])
        for call in calls
        if call["id"] in results
    ]


def printed_its_marker(command: str, result: str) -> bool:
    """Whether the marker is the product of the numbers that the policy drew."""
    numbers = re.fullmatch(r"echo marker-\$\(\((\d) \* (\d)\)\)", command)
    return numbers is not None and f"marker-{int(numbers[1]) * int(numbers[2])}" in result.split()


@each_harness
async def test_a_harness_runs_the_calls_that_a_real_engine_sampled(
    played: Played, harness: Harness, tmp_path: Path
) -> None:
    segments = await run(played.policy, harness, tmp_path)
    (main,) = [segment for segment in segments if not is_title(segment)]
    assert all(segment.opened == "new" for segment in segments)
    assert len(main.turns) == 3 == sum(message["role"] == "assistant" for message in main.messages)
    (long, much), (marker, printed) = executed(main)
    assert long == LONG_COMMAND and much.count(f"{harness.name} ") == NUM_LOGGED
    assert printed_its_marker(marker, printed), (marker, printed)
    assert min(main.logprobs) < -1, "the numbers of the marker are drawn"
    assert main.spans[0]["start"] < MAX_PROMPT_TOKENS


@each_harness
async def test_a_harness_that_compacts_its_conversation_goes_on_in_a_new_segment(
    played: Played, harness: Harness, tmp_path: Path
) -> None:
    limit = compact_at(played.num_prompt_tokens[harness.name])
    segments = await run(played.policy, harness, tmp_path, limit)
    main, summary, rest = [segment for segment in segments if not is_title(segment)]
    assert [(segment.opened, bool(segment.tools)) for segment in (main, summary, rest)] == COMPACTED[harness.name]
    assert [len(segment.turns) for segment in (main, summary, rest)] == [2, 1, 1], "no turn is in two segments"
    assert len(main.token_ids) > limit > len(rest.token_ids), "what was printed is in the first one only"
    assert rest.messages[-1]["content"] == DONE
