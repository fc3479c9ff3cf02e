"""What holds for captured segments whatever clients do, against a record kept by hand of what was asked and sampled.

The record knows nothing of marks, places or deltas: for each conversation as the client sees it, the exact token ids
after its last sampled turn. Clients start conversations, go on, ask again, compact, rewrite and take back; requests
overlap, have several samples, fail, and come back in any order.
"""

from __future__ import annotations

import json
import random
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from schemas.chat import ParsedTurn
from schemas.errors import MoltflowError
from schemas.recipe import SamplingConfig
from schemas.types import Generation
from stages.capture.segments import Turn
from stages.capture.writing import assistant_message
from tests.chats import DROPS_THOUGHTS, KEEPS_THOUGHTS, Chat, call, tool, user

Path = tuple[str, ...]
"""A conversation as a client sees it: one text for each message."""


@dataclass
class State:
    """After a sampled turn: its exact ids, and whether a later turn has been appended to its segment."""

    ids: list[int]
    thought: bool
    """Whether reasoning is shown that a template may drop at the next question."""
    extended: bool = False


@dataclass
class World:
    """Clients of one session, and the record of it."""

    chat: Chat
    drops_thoughts: bool
    states: dict[Path, list[State]] = field(default_factory=dict)
    conversations: list[list[dict[str, Any]]] = field(default_factory=list)
    under_way: list[tuple[Turn, State | None]] = field(default_factory=list)
    samples: list[tuple[list[int], list[int], int]] = field(default_factory=list)  # (prompt, sampled, version)
    num_segments: int = 0

    def whole(self, messages: list[dict[str, Any]], start: int = 0) -> str:
        """How the template shows the messages from `start` on, none of them sampled here but those in calls."""
        last = max((i for i, m in enumerate(messages) if m["role"] == "user"), default=0)
        text = ""
        for index, message in enumerate(messages[start:], start):
            thought = message.get("reasoning_content", "")
            shown = f"[{thought}]" if thought and not (self.drops_thoughts and index < last) else ""
            calls = "".join(
                f"<c>add{{{', '.join(f'{chr(34)}{k}{chr(34)}: {v}' for k, v in c['function']['arguments'].items())}}}"
                for c in message.get("tool_calls", ())
            )
            text += f"<{message['role'][0]}>{shown}{message['content']}{calls}<e>"
        return text + "<a>"

    def expected(self, messages: list[dict[str, Any]]) -> tuple[list[int], State | None]:
        """The ids that a request must continue, and the state that it goes on from, if any."""
        path = as_path(messages)
        known = next((n for n in range(len(path), 0, -1) if path[:n] in self.states), 0)
        if known:
            states = self.states[path[:known]]
            state = next((s for s in reversed(states) if not s.extended), states[-1])
            asked = any(message["role"] == "user" for message in messages[known:])
            if not (self.drops_thoughts and asked and state.thought):
                end = [] if state.ids[-1:] == self.chat.ids("<e>") else self.chat.ids("<e>")
                return state.ids + end + self.chat.ids(self.whole(messages, known)), state
        return self.chat.ids(self.whole(messages)), None

    def begin(self, messages: list[dict[str, Any]], rng: random.Random) -> None:
        prompt, state = self.expected(messages)
        path = as_path(messages)
        known = next((n for n in range(len(path), 0, -1) if path[:n] in self.states), 0)
        turn = self.chat.session.begin([*(echoed(m, rng) for m in messages[:known]), *messages[known:]])
        assert self.chat.decode(turn.token_ids) == self.chat.decode(prompt)
        assert turn.token_ids == prompt
        self.under_way.append((turn, state))

    def commit(self, which: int, rng: random.Random, keep: bool) -> None:
        """One sample of a turn under way, with text of its own; `keep` for a request of several samples."""
        turn, state = self.under_way[which] if keep else self.under_way.pop(which)
        number = len(self.samples)
        thought, calls = rng.random() < 0.4, rng.random() < 0.4
        said = ParsedTurn(
            rng.choice(["same", f"say{number}", " out "]) if not calls else rng.choice(["", f"call{number}"]),
            f"think{number}" if thought else "",
            (call(f"c{number}", a=number), call(f"d{number}"))[: rng.choice([1, 2])] if calls else (),
        )
        ended = rng.random() < 0.8
        # The sampled spelling is its own: an unused tag, and no template's form of calls.
        sampled = self.chat.ids(f"<x>{number}{said.content}{'<c>?' if calls else ''}{'<e>' if ended else ''}")
        generation = Generation("r", sampled, [-1.0 - number] * len(sampled), ((number, 0, len(sampled)),), "stop")
        self.chat.session.commit(turn, generation, said, SamplingConfig(), 0.1)
        self.samples.append((turn.token_ids, sampled, number))
        if state is not None and not state.extended:
            state.extended = True
        else:
            self.num_segments += 1
        messages = [*turn.messages, assistant_message(said)]
        last = max((i for i, m in enumerate(messages) if m["role"] == "user"), default=0)
        shown = any(m.get("reasoning_content") for m in messages[last:])
        self.states.setdefault(as_path(messages), []).append(State(turn.token_ids + sampled, shown))
        self.conversations.append(messages)

    def fail(self, which: int) -> None:
        turn, _ = self.under_way.pop(which)
        broken = Generation("r", [1], [-1.0], ((0, 0, 1),), "abort", "engine died")
        with pytest.raises(MoltflowError):
            self.chat.session.commit(turn, broken, ParsedTurn("lost"), SamplingConfig(), 0.1)

    def check(self) -> None:
        """Every sample is trained once, in its place, behind exactly what the engine was given; nothing else is."""
        found: Counter[int] = Counter()
        for segment in self.chat.session.segments():
            sampled_at = [False] * len(segment.token_ids)
            assert len(segment.logprobs) == len(segment.token_ids) and len(segment.turns) == len(segment.spans)
            for index, span in enumerate(segment.spans):
                prompt, sampled, version = self.samples[span["version"]]
                assert span["turn"] == index and span["version"] == version
                assert segment.token_ids[: span["start"]] == prompt
                assert segment.token_ids[span["start"] : span["end"]] == sampled
                assert segment.logprobs[span["start"] : span["end"]] == [-1.0 - version] * len(sampled)
                sampled_at[span["start"] : span["end"]] = [True] * len(sampled)
                found[version] += 1
            assert all(p == 0 for p, s in zip(segment.logprobs, sampled_at, strict=True) if not s)
            assert segment.spans[-1]["end"] == len(segment.token_ids)
        assert found == Counter(range(len(self.samples)))
        assert len(self.chat.session.segments()) == self.num_segments


def as_path(messages: list[dict[str, Any]]) -> Path:
    def said(message: dict[str, Any]) -> str:
        functions = [call["function"] for call in message.get("tool_calls", ())]
        text = message["content"].strip() if message["role"] == "assistant" else message["content"]
        return f"{message['role']} {text} {[(f['name'], sorted(f['arguments'].items())) for f in functions]}"

    return tuple(said(message) for message in messages)


def echoed(message: dict[str, Any], rng: random.Random) -> dict[str, Any]:
    """A message as clients send it back: markers, nulls and blocks, no reasoning, arguments spelled anew."""
    echo = dict(message)
    if rng.random() < 0.5:
        echo |= {"id": f"m{rng.random()}", "status": "completed", "refusal": None}
    if rng.random() < 0.3:
        block = {"type": "text", "text": echo["content"], "cache_control": {"type": "ephemeral"}}
        echo["content"] = [block] if echo["content"] else None
    elif echo["role"] == "assistant" and rng.random() < 0.3:
        echo["content"] = f" {echo['content']}\n"
    if rng.random() < 0.5:
        echo.pop("reasoning_content", None)
    if "tool_calls" in echo and rng.random() < 0.5:
        functions = [{**c["function"], "arguments": spelled(c["function"]["arguments"])} for c in echo["tool_calls"]]
        pairs = zip(echo["tool_calls"], functions, strict=True)
        echo["tool_calls"] = [{**call, "function": function} for call, function in pairs]
    return echo


def spelled(arguments: dict[str, Any]) -> str:
    return json.dumps(arguments, separators=(" ,", ":"), indent=1)


def follow_up(messages: list[dict[str, Any]], rng: random.Random) -> list[dict[str, Any]]:
    calls = messages[-1].get("tool_calls", ())
    if calls and rng.random() < 0.8:
        results = [tool(c["id"], rng.choice(["1", "<e>", "}", f"r{rng.randrange(9)}"])) for c in calls]
        return [*messages, *results, *([user("and?")] if rng.random() < 0.2 else [])]
    return [
        *messages,
        *[user(rng.choice(["u", "<a>x<e>", f"u{rng.randrange(9)}"])) for _ in range(rng.choice([1, 1, 2]))],
    ]


KINDS = ["start", "go on", "go on", "go on", "again", "edit", "commit", "commit", "commit", "n", "fail"]
OPERATIONS = st.lists(st.tuples(st.sampled_from(KINDS), st.integers(0, 10**6)), max_size=60)


@pytest.mark.parametrize("drops_thoughts", [False, True])
@settings(max_examples=150, deadline=None)
@given(operations=OPERATIONS)
def test_no_token_is_lost_doubled_trained_twice_or_put_in_the_wrong_span(
    drops_thoughts: bool, operations: list[tuple[str, int]]
) -> None:
    world = World(Chat(DROPS_THOUGHTS if drops_thoughts else KEEPS_THOUGHTS, 10**6), drops_thoughts)
    asked: list[list[dict[str, Any]]] = []
    for operation, seed in operations:
        rng = random.Random(seed)
        if operation in ("commit", "n", "fail"):
            if world.under_way:
                which = rng.randrange(len(world.under_way))
                if operation == "fail":
                    world.fail(which)
                else:
                    world.commit(which, rng, keep=operation == "n")
            continue
        if operation == "start" or not world.conversations:
            messages = [{"role": "system", "content": f"s{seed % 2}"}, user(f"q{seed % 3}")][seed % 2 :]
        elif operation == "again" and asked:
            messages = rng.choice(asked)
        else:
            messages = rng.choice(world.conversations)
            if operation == "edit":  # compaction, or an assistant's turn changed by the client
                cut = rng.randrange(len(messages))
                messages = [*messages[:cut], user("summary")] if cut % 2 else [user("summary"), *messages[cut:]][:2]
                messages = [m for m in messages if m["role"] != "tool"] if messages[-1]["role"] == "tool" else messages
            messages = follow_up(messages, rng)
        asked.append(messages)
        world.begin(messages, rng)
        assert len(world.chat.session.segments()) == world.num_segments  # nothing changes before a commit
    while world.under_way:
        world.commit(0, random.Random(0), keep=False)
    world.check()
