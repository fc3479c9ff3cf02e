"""A segment: a token-exact stretch of a rollout, made of what was rendered and what the engine sampled, in turn."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from schemas.errors import MoltflowError
from schemas.recipe import SamplingConfig
from schemas.types import Generation


@dataclass(kw_only=True)
class Segment:
    """Tokens as they come. `logprobs` are as many as `token_ids`, 0 where not sampled; `spans` as in the store.

    Tokens outside the spans are context and never trained. `turns` has one entry for each turn sampled in this segment.
    """

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    spans: list[dict[str, int]] = field(default_factory=list)
    turns: list[dict[str, Any]] = field(default_factory=list)

    def append_context(self, token_ids: Sequence[int]) -> None:
        self.token_ids += token_ids
        self.logprobs += [0.0] * len(token_ids)

    def append_turn(
        self, generation: Generation, sampling: SamplingConfig, seconds: float, context: Sequence[int] = ()
    ) -> None:
        """Append `context` and what was sampled after it. Raises MoltflowError, and appends nothing, if the engine
        failed or contradicts itself."""
        count = len(generation.token_ids)
        if generation.error is not None:
            raise MoltflowError(generation.error)
        if generation.finish_reason == "abort" or count == 0:
            raise MoltflowError(f"the engine returned {count} tokens: {generation.finish_reason}")
        ends = [0, *(last for _, _, last in generation.versions)]
        if [first for _, first, _ in generation.versions] != ends[:-1] or ends != sorted(ends) or ends[-1] != count:
            raise MoltflowError(f"engine versions {generation.versions} do not cover its {count} tokens")
        if len(generation.logprobs) != count:
            raise MoltflowError(f"engine gave {count} tokens and {len(generation.logprobs)} log-probs")
        self.append_context(context)
        start = len(self.token_ids)
        self.spans += [
            {"start": start + first, "end": start + last, "turn": len(self.turns), "version": version}
            for version, first, last in generation.versions
            if last > first
        ]
        self.token_ids += [int(token) for token in generation.token_ids]
        self.logprobs += [float(logprob) for logprob in generation.logprobs]
        self.turns.append(
            {
                "temperature": sampling.temperature,
                "top_p": sampling.top_p,
                "top_k": sampling.top_k,
                "max_tokens": sampling.max_tokens,
                "finish_reason": generation.finish_reason,
                "seconds": seconds,
            }
        )
