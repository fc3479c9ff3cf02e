"""A chat turn between a wire and the engine: what a client asked, what the policy said.

client body --decode--> ChatRequest --capture, engine--> Reply --encode--> client body or events

Messages are in the form that chat templates take: `role` is system, user, assistant or tool; `content` is text, or a
list of parts for messages with images; an assistant message may have `reasoning_content` (text) and `tool_calls`
(`{"id", "type": "function", "function": {"name", "arguments"}}`, arguments a mapping where they are valid JSON objects,
else the text itself); a tool message has `tool_call_id`. Tools are `{"type": "function", "function": {"name",
"description", "parameters"}}`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

ToolChoice = Literal["auto", "none"]


@dataclass(frozen=True, slots=True)
class RequestSampling:
    """What a request says about sampling; None where it says nothing."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    seed: int | None = None


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """A request of any wire."""

    model: str
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] = field(default_factory=list)
    tool_choice: ToolChoice = "auto"
    sampling: RequestSampling = RequestSampling()
    n: int = 1
    logprobs: bool = False
    stream: bool = False
    include_usage: bool = False
    ignored: tuple[str, ...] = ()
    """Request fields and tools that were accepted and have no effect, by name."""


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call that the engine's parser found. `arguments` is the JSON text as the policy wrote it."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class ParsedTurn:
    """What the engine's reasoning and tool parsers made of one sampled turn."""

    content: str
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    token: str
    token_id: int
    logprob: float


@dataclass(frozen=True, slots=True)
class Choice:
    """One sampled turn. Whether it ended with calls is seen in what a client is shown of it, not said here."""

    turn: ParsedTurn
    finish_reason: Literal["stop", "length"]
    stop_sequence: str | None = None
    logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class Reply:
    """What a request is answered with: one choice for each of the `n` that it asked for.

    Token counts are those of the engine: `prompt_tokens` of the exact prompt ids, `completion_tokens` summed over the
    choices. `id` is a random hex text; wires put their own prefixes before it.
    """

    id: str
    created: int
    model: str
    choices: tuple[Choice, ...]
    prompt_tokens: int
    completion_tokens: int


class ChatError(Exception):
    """A request that is answered with an error in the shape of its wire. `status` is the HTTP status.

    `code` is a short word: invalid_request, authentication, not_found, too_large, overloaded,
    turn_limit, engine.
    """

    def __init__(self, status: int, code: str, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.message = message
        self.param = param
