"""A policy behind a chat server, sampled by a real engine, and what must hold of what was recorded of it."""

from __future__ import annotations

import os
import re
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from schemas.recipe import RLRecipe, SamplingConfig
from schemas.types import Generation, ParseOptions
from stages.agents.rendering import ChatRenderer
from stages.capture.marks import Marks
from stages.capture.recorder import Recorder
from stages.capture.segments import CapturedSegment
from stages.capture.server import CaptureServer
from stages.workers.agent import EngineClient
from stages.workers.cluster import open_engines
from stages.workers.engine_pool import EnginePool


@dataclass
class Policy:
    """A chat server in front of a real engine, and every sample that the engine gave: prompt and generation."""

    recipe: RLRecipe
    renderer: ChatRenderer
    marks: Marks
    engines: EnginePool
    engine: EngineClient
    server: CaptureServer
    samples: list[tuple[list[int], Generation]] = field(default_factory=list)

    @property
    def thinks(self) -> bool:
        return self.recipe.engine.reasoning_parser is not None

    def recorder(self) -> Recorder:
        self.samples.clear()
        return Recorder(self._sample, self.renderer, self.marks, self.recipe.agent, self.recipe.rollout.sampling)

    async def _sample(self, token_ids: list[int], sampling: SamplingConfig, options: ParseOptions) -> Generation:
        generation = await self.engine.generate(token_ids, sampling, options)
        self.samples.append((token_ids, generation))
        return generation

    def text(self, token_ids: list[int]) -> str:
        return str(self.renderer.tokenizer.decode(token_ids, clean_up_tokenization_spaces=False))


@asynccontextmanager
async def open_policy(recipe: RLRecipe) -> AsyncIterator[Policy]:
    """The policy of a recipe's model, engine and agent limits, without a trainer."""
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    server, renderer = CaptureServer(), ChatRenderer(recipe.model.path)
    await server.start()
    try:
        async with open_engines(recipe, 0) as engines:
            engine = EngineClient("conformance", engines.actors[0], merge=False)
            yield Policy(recipe, renderer, Marks(renderer), engines, engine, server)
    finally:
        await server.close()


def holds(policy: Policy, segments: list[CapturedSegment]) -> None:
    """Every sample of the engine is one turn of one segment, behind exactly the tokens that the engine was given."""
    stored = []
    for segment in segments:
        assert len(segment.logprobs) == len(segment.token_ids)
        assert sorted({span["turn"] for span in segment.spans}) == list(range(len(segment.turns)))
        in_spans = {place for span in segment.spans for place in range(span["start"], span["end"])}
        assert all(segment.logprobs[place] == 0 for place in set(range(len(segment.token_ids))) - in_spans)
        for start, end in _turns(segment):
            stored.append((segment.token_ids[:start], segment.token_ids[start:end], segment.logprobs[start:end]))
        assert in_spans == {place for start, end in _turns(segment) for place in range(start, end)}
        assert max(in_spans) == len(segment.token_ids) - 1, "nothing is kept behind the last sampled token"
    sampled = [
        (prompt, [int(token) for token in generation.token_ids], [float(value) for value in generation.logprobs])
        for prompt, generation in policy.samples
    ]
    assert sorted(stored) == sorted(sampled)


def logprobs_are_the_models(policy: Policy, segment: CapturedSegment) -> None:
    """Each sampled token has the log-prob that the model gives it behind all the stored tokens before it."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(policy.recipe.model.path, dtype=torch.float32)
    token_ids = torch.tensor(segment.token_ids)  # [seq]
    with torch.no_grad():
        hidden = model.model(input_ids=token_ids[None]).last_hidden_state[0]  # [seq, hidden]
        for start, end in _turns(segment):
            logits = model.lm_head(hidden[start - 1 : end - 1])  # [turn, vocabulary]
            logprobs = torch.log_softmax(logits / policy.recipe.rollout.sampling.temperature, -1)
            expected = logprobs.gather(-1, token_ids[start:end, None])[:, 0]
            torch.testing.assert_close(torch.tensor(segment.logprobs[start:end]), expected, atol=1e-3, rtol=0)


def _turns(segment: CapturedSegment) -> Iterator[tuple[int, int]]:
    """Where each sampled turn starts and ends."""
    for turn in range(len(segment.turns)):
        spans = [span for span in segment.spans if span["turn"] == turn]
        yield spans[0]["start"], spans[-1]["end"]


def is_rendered_as_stored(policy: Policy, segment: CapturedSegment) -> None:
    """The template's render of the conversation before its last turn, and the stored tokens of it, differ at most in
    the turns that the policy sampled."""
    edges = list(_turns(segment))
    starts = [0, *(end for _, end in edges[:-1])]
    context = [policy.text(segment.token_ids[first:last]) for first, (last, _) in zip(starts, edges, strict=True)]
    rendered = policy.renderer.render(segment.messages[:-1], segment.tools)
    pattern = "(.*?)".join(re.escape(text) for text in context)
    assert re.fullmatch(pattern, rendered, re.DOTALL), (rendered, context)
    whole = policy.text(segment.token_ids[: edges[-1][0]])
    said = [policy.text(segment.token_ids[start:end]) for start, end in edges]
    if not any(_is_changed_by_parsing(text) for text in said):
        assert rendered == whole


def _is_changed_by_parsing(said: str) -> bool:
    """Whether a turn comes back from the parser in another form than the one that the template gives to all turns."""
    form = r'(so )?(<tool_call>\{"name": "\w+", "arguments": \{"\w+": "[^"\\<>]*"\}\}</tool_call>)*'
    return re.fullmatch(rf"({form}|[^<]*)<\|end\|>", said) is None
