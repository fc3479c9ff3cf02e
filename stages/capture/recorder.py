"""One rollout's end of the chat server: a decoded request in, a reply out, and what was sampled recorded."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Awaitable, Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from schemas.chat import ChatError, ChatRequest, Choice, ParsedTurn, Reply, RequestSampling, TokenLogprob
from schemas.errors import WorkerError
from schemas.recipe import AgentConfig, SamplingConfig
from schemas.types import Generation, ParseOptions
from stages.agents.chat import MODEL_NAME, UNRECORDED_MODEL_NAME
from stages.agents.rendering import ChatRenderer
from stages.agents.sampling import DISTRIBUTION, untrainable
from stages.capture.marks import Marks
from stages.capture.retries import Retries
from stages.capture.segments import Session, Turn
from stages.capture.writing import spoken

log = logging.getLogger(__name__)

Sample = Callable[[list[int], SamplingConfig, ParseOptions], Awaitable[Generation]]
"""(token_ids, sampling, how to parse it) -> what the engine sampled."""

MAX_NAMED = 100
_told: set[str] = set()


class Recorder:
    """Answers the requests of one rollout. `session` holds what was recorded."""

    def __init__(
        self,
        sample: Sample,
        renderer: ChatRenderer,
        marks: Marks,
        config: AgentConfig,
        sampling: SamplingConfig,
        parses_calls: bool = True,
    ) -> None:
        """`parses_calls`: whether the engine has a parser of tool calls."""
        self.key = secrets.token_urlsafe(24)
        self.session = Session(marks, config.max_context_tokens)
        self.failure: WorkerError | None = None
        """Why no engine can answer any more; whoever runs the agent raises it."""
        self.overridden: dict[str, list[Any]] = {}
        """Sampling parameters that requests asked for and did not get."""
        self.ignored: dict[str, None] = {}
        """Names of what requests had that was accepted without effect, at most `MAX_NAMED`."""
        self.out_of_turns = False
        self.was_cut_off = False
        """Whether the last recorded turn ended at its limit of tokens."""
        self.num_active = 0
        self._sample = sample
        self._renderer = renderer
        self._marks = marks
        self._config = config
        self._sampling = sampling
        self._parses_calls = parses_calls
        self._retries: Retries[Reply] = Retries()
        self._turns = 0
        self._is_closed = False

    def once(self, fingerprint: Hashable, is_retry: bool, request: ChatRequest) -> Any:
        """Context manager: the reply to a request, shared with its retries, for as long as it takes to write it."""
        return self._retries.once(fingerprint, is_retry, lambda: self._reply(request))

    async def close(self) -> None:
        """Abort what is under way, and answer nothing any more."""
        self._is_closed = True
        await self._retries.close()

    def count_tokens(self, request: ChatRequest) -> int:
        """Tokens of the prompt that this request would be answered from."""
        return self.session.count(request.messages, request.tools)

    async def _reply(self, request: ChatRequest) -> Reply:
        if self._is_closed:
            raise session_closed()
        if request.model not in (MODEL_NAME, UNRECORDED_MODEL_NAME):
            raise ChatError(
                404, "not_found", f"model {request.model!r}; allowed: {MODEL_NAME}, {UNRECORDED_MODEL_NAME}"
            )
        if any(isinstance(message["content"], list) for message in request.messages):
            raise ChatError(400, "invalid_request", "messages: found an image; allowed: text, as the model", "messages")
        self._name(request.ignored)
        is_recorded = request.model == MODEL_NAME
        session = self.session if is_recorded else Session(self._marks, self._config.max_context_tokens)
        turn = session.begin(request.messages, request.tools)
        sampling = self._merged(request.sampling, turn.room, is_recorded)
        if request.tools and request.tool_choice == "auto" and not self._parses_calls:
            found = "found tools without engine.tool_parser; allowed: none, tool_choice none, or a recipe that names"
            raise ChatError(400, "invalid_request", f"tools: {found} vLLM's parser of the model's calls", "tools")
        options = ParseOptions(request.tools if request.tool_choice == "auto" else [])
        with self._turns_taken(request.n if is_recorded else 0):
            if turn.room == 0:
                return self._made(request, turn, [Choice(ParsedTurn(""), "length")], 0)
            start = time.perf_counter()
            samples = await self._samples(request.n, turn.token_ids, sampling, options)
            seconds = time.perf_counter() - start
        reply = self._made(
            request, turn, [self._choice(request, s) for s in samples], sum(len(s.token_ids) for s in samples)
        )
        if is_recorded:
            self.was_cut_off = samples[-1].finish_reason == "length"
        for index, sample in enumerate(samples if is_recorded else ()):
            session.commit(turn, sample, spoken(reply, index), sampling, seconds)
        return reply

    def _name(self, ignored: Sequence[str]) -> None:
        """What has no effect is recorded by name, and said once a process."""
        self.ignored = dict.fromkeys(list(dict.fromkeys([*self.ignored, *ignored]))[:MAX_NAMED])
        if new := [name for name in self.ignored if name not in _told]:
            _told.update(new)
            log.warning("chat requests: accepted without effect: %s", ", ".join(new))

    async def _samples(
        self, n: int, token_ids: list[int], sampling: SamplingConfig, options: ParseOptions
    ) -> list[Generation]:
        try:
            samples = await asyncio.gather(*(self._sample(token_ids, sampling, options) for _ in range(n)))
        except WorkerError as failure:
            self.failure = failure
            raise ChatError(503, "engine", f"the engine is gone: {failure}") from failure
        for sample in samples:
            if sample.error is not None or sample.finish_reason == "abort" or len(sample.token_ids) == 0:
                found = sample.error or f"{len(sample.token_ids)} tokens, finish reason {sample.finish_reason}"
                raise ChatError(500, "engine", f"the engine failed on this request: {found}")
        return samples

    @contextmanager
    def _turns_taken(self, n: int) -> Iterator[None]:
        """Takes turns of the rollout. A generation that fails gives them back: its retry needs them."""
        if self._turns + n > self._config.max_turns:
            self.out_of_turns = True
            limit = f"this rollout has used {self._turns} of its {self._config.max_turns} turns (agent.max_turns)"
            raise ChatError(400, "turn_limit", f"{limit}; the request asks for {n} more")
        self._turns += n
        try:
            yield
        except BaseException:
            self._turns -= n
            raise

    def _merged(self, wanted: RequestSampling, room: int, is_recorded: bool) -> SamplingConfig:
        """The rollout's sampling, with what a request may decide: how much, until where, and from which distribution
        if that is honoured. What is not, is noted, like a seed, which engines are never given. Raises ChatError for
        what cannot be trained."""
        mine = self._sampling
        asked = {name: getattr(wanted, name) for name in DISTRIBUTION}
        other = {name: value for name, value in asked.items() if value not in (None, getattr(mine, name))}
        honored = other if self._config.honor_request_sampling or not is_recorded else {}
        if is_recorded and (problem := untrainable(honored)) is not None:
            raise ChatError(400, "invalid_request", problem[1], problem[0])
        for name, value in {**other, "seed": wanted.seed}.items():
            if value is not None and name not in honored:
                self._note(name, value)
        most = wanted.max_tokens or mine.max_tokens
        if is_recorded and most > mine.max_tokens:
            self._note("max_tokens", most)
            most = mine.max_tokens
        most = min(most, max(room, 1))
        return mine.model_copy(update={**honored, "max_tokens": most, "stop": [*mine.stop, *wanted.stop]})

    def _note(self, name: str, value: Any) -> None:
        """What a request asked for and did not get."""
        if value not in (values := self.overridden.setdefault(name, [])):
            values.append(value)

    def _choice(self, request: ChatRequest, sample: Generation) -> Choice:
        said = sample.parsed
        if said is None:
            raise ChatError(500, "engine", "the engine did not parse its sample")
        return Choice(
            turn=said,
            finish_reason="length" if sample.finish_reason == "length" else "stop",
            stop_sequence=sample.stop if sample.stop in request.sampling.stop else None,
            logprobs=self._logprobs(sample) if request.logprobs else (),
        )

    def _logprobs(self, sample: Generation) -> tuple[TokenLogprob, ...]:
        decode = self._renderer.tokenizer.decode
        pairs = zip(sample.token_ids, sample.logprobs, strict=True)
        return tuple(TokenLogprob(str(decode([int(token)])), int(token), float(value)) for token, value in pairs)

    def _made(self, request: ChatRequest, turn: Turn, choices: list[Choice], num_sampled: int) -> Reply:
        return Reply(
            id=secrets.token_hex(12),
            created=int(time.time()),
            model=request.model,
            choices=tuple(choices),
            prompt_tokens=len(turn.token_ids),
            completion_tokens=num_sampled,
        )


def session_closed() -> ChatError:
    return ChatError(401, "authentication", "this session is closed: its rollout has ended")
