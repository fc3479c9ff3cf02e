"""One rollout's conversations as token-exact segments, pure of HTTP and of the engine.

    request --begin--> Turn (exact token ids) --engine--> Generation --commit--> segments

A place is the state after one sampled turn: how far into a segment's tokens, text and messages it reaches. A request is
matched to the place with the longest history that it repeats. If the render of the request starts with that place's
text, with marks where the policy spoke, the turn extends it: its tokens are those of the place and the delta behind the
marks. Otherwise the turn opens a segment of its own, rendered whole.

Only sampled tokens lie in spans, each in one segment: a turn that extends a place which another turn has already
extended gets a segment that starts with a copy of the place's tokens, as context. Nothing changes before `commit`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from schemas.chat import ChatError, ParsedTurn
from schemas.recipe import SamplingConfig
from schemas.types import Generation
from stages.agents.segment import Segment
from stages.capture.identity import identities
from stages.capture.marks import Marks, Rewritten
from stages.capture.writing import assistant_message

Opened = Literal["new", "branch", "rewritten"]
"""Why a segment begins: there is no history to extend; it was extended already; it is rendered differently now, since
the template drops or moves something (earlier reasoning, say) or the tools changed."""


@dataclass(kw_only=True)
class CapturedSegment(Segment):
    """A segment and the conversation that it holds, in the form that templates take."""

    opened: Opened
    messages: list[dict[str, Any]] = field(default_factory=list)
    tools: list[dict[str, Any]] = field(default_factory=list)
    shown: list[dict[str, Any]] = field(default_factory=list)
    """`messages` as they were rendered: with marks where this segment holds sampled tokens."""
    text: str = ""
    """The render of `shown` up to where the policy spoke last."""


@dataclass(frozen=True, slots=True)
class Place:
    """The state after a sampled turn, as lengths into a segment. `marks` are those of the turn."""

    segment: CapturedSegment
    num_tokens: int
    num_characters: int
    num_messages: int
    marks: tuple[str, ...]

    @property
    def is_open(self) -> bool:
        """Whether no turn has extended it yet."""
        return len(self.segment.token_ids) == self.num_tokens


@dataclass(frozen=True, slots=True)
class Turn:
    """A request ready for the engine: sample after `token_ids`, at most `room` tokens. Commit each sample of it.

    `place` is what it extends, if anything; the token ids behind the place's are the delta. `opened` is why it gets a
    segment of its own, should it get one.
    """

    token_ids: list[int]
    room: int
    opened: Opened
    place: Place | None
    text: str
    messages: list[dict[str, Any]]
    shown: list[dict[str, Any]]
    tools: list[dict[str, Any]]
    keys: list[Hashable]


class Session:
    """All conversations of one rollout: of an agent, its sub-agents, its side calls."""

    def __init__(self, marks: Marks, max_context_tokens: int) -> None:
        self._marks = marks
        self._max_context_tokens = max_context_tokens
        self._segments: list[CapturedSegment] = []
        self._positions: dict[tuple[int, Hashable], int] = {}  # a tree of message keys; 0 is its root
        self._places: defaultdict[int, list[Place]] = defaultdict(list)
        self.out_of_context = False
        """Whether a turn found no room or used all of it: the rollout is truncated."""

    def begin(self, messages: list[dict[str, Any]], tools: Sequence[dict[str, Any]] = ()) -> Turn:
        """The exact token ids that this request asks to continue. Changes nothing but `out_of_context`, if it must.

        Without `room` nothing may be sampled or committed: the reply is empty, of finish reason `length`, and the next
        request brings the messages that did not fit again. Raises ChatError for messages that no render can be made of.
        """
        turn = self._turn(messages, list(tools))
        self.out_of_context |= turn.room == 0
        return turn

    def count(self, messages: list[dict[str, Any]], tools: Sequence[dict[str, Any]] = ()) -> int:
        """How many tokens the engine would be given. Changes nothing."""
        return len(self._turn(messages, list(tools)).token_ids)

    def commit(
        self, turn: Turn, generation: Generation, said: ParsedTurn, sampling: SamplingConfig, seconds: float
    ) -> None:
        """Record one sample of a turn. Raises MoltflowError, and records nothing, if the engine failed."""
        place = turn.place
        if place is not None and place.is_open:
            segment, context = place.segment, turn.token_ids[place.num_tokens :]
        else:
            segment, context = CapturedSegment(opened=turn.opened), turn.token_ids
        segment.append_turn(generation, sampling, seconds, context)
        if not segment.messages:
            self._segments.append(segment)
        message = assistant_message(said)
        shown, marks = self._marks.mark(message, len(turn.messages))
        segment.messages, segment.shown = [*turn.messages, message], [*turn.shown, shown]
        segment.tools, segment.text = turn.tools, turn.text
        position = self._position([*turn.keys, *identities([message])])
        num_tokens = len(segment.token_ids)
        self._places[position].append(Place(segment, num_tokens, len(turn.text), len(segment.messages), marks))
        self.out_of_context |= num_tokens >= self._max_context_tokens

    def segments(self) -> list[CapturedSegment]:
        """What was recorded, in the order in which segments were opened."""
        return list(self._segments)

    def _turn(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]]) -> Turn:
        keys = identities(messages)
        place = self._find(keys)
        if place is not None:
            messages = _echoed(place, messages)
            try:
                return self._extend(place, messages, tools, keys)
            except (Rewritten, ChatError):  # seen in the segment's `opened`, if it renders whole
                pass
        text = self._marks.render(messages, tools)
        token_ids = self._marks.tokenize(text)
        opened: Opened = "rewritten" if place else "new"
        return Turn(token_ids, self._room(token_ids), opened, None, text, messages, messages, tools, keys)

    def _find(self, keys: Sequence[Hashable]) -> Place | None:
        position, found = 0, None
        for key in keys:
            following = self._positions.get((position, key))
            if following is None:
                break
            position = following
            if position in self._places:
                found = self._places[position]
        return max(reversed(found), key=lambda place: place.is_open) if found else None

    def _position(self, keys: Sequence[Hashable]) -> int:
        position = 0
        for key in keys:
            position = self._positions.setdefault((position, key), len(self._positions) + 1)
        return position

    def _extend(
        self, place: Place, messages: list[dict[str, Any]], tools: list[dict[str, Any]], keys: list[Hashable]
    ) -> Turn:
        """The turn that extends a place. Raises Rewritten."""
        segment, new = place.segment, messages[place.num_messages :]
        shown = [*segment.shown[: place.num_messages], *new]
        text = self._marks.render(shown, tools)
        if not text.startswith(segment.text[: place.num_characters]):
            raise Rewritten("the template renders the history before the turn differently")
        marked, last = shown[place.num_messages - 1], segment.token_ids[place.num_tokens - 1]
        follower = new[0] if new else None
        delta = self._marks.delta(text, place.num_characters, marked, place.marks, follower, last)
        token_ids = [*segment.token_ids[: place.num_tokens], *delta]
        return Turn(token_ids, self._room(token_ids), "branch", place, text, messages, shown, tools, keys)

    def _room(self, token_ids: Sequence[int]) -> int:
        return max(0, self._max_context_tokens - len(token_ids))


def _echoed(place: Place, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The request with our own messages for those that it repeats, and our ids for the calls that it answers."""
    known = place.segment.messages[: place.num_messages]
    ours = {
        theirs.get("id"): our.get("id")
        for message, echo in zip(known, messages, strict=False)
        for our, theirs in zip(message.get("tool_calls") or (), echo.get("tool_calls") or (), strict=True)
    }
    new = []
    for message in messages[len(known) :]:
        for call in message.get("tool_calls") or ():
            ours.pop(call.get("id"), None)
        answered = message.get("tool_call_id")
        new.append(message if answered not in ours else {**message, "tool_call_id": ours[answered]})
    return [*known, *new]
