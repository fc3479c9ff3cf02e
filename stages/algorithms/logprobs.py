"""Log-probabilities of given tokens under a causal language model, and the entropy of its predictions.

`chunked_scores` starts at the hidden states in front of the model's head and never holds the logits of more than a
chunk of tokens, so its memory does not grow with tokens x vocabulary. The backward computes each chunk once more.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

MAX_CHUNK_LOGITS = 1 << 26
"""Logits of one chunk, by default. Each of the few float32 tensors that a chunk needs at a time takes 256 MiB."""

Head = Callable[..., torch.Tensor]
"""`head(hidden, *parameters)`: hidden states [tokens, hidden] -> logits [tokens, vocab], each token by itself."""


class TokenScores(NamedTuple):
    """In float32. `logprobs` [tokens, k] are those of the k tokens asked for; `entropy` [tokens] in nats, if asked."""

    logprobs: torch.Tensor
    entropy: torch.Tensor | None


def token_temperatures(
    spans: Sequence[Mapping[str, int]], turns: Sequence[Mapping[str, float]], num_tokens: int
) -> torch.Tensor:
    """The temperature that each token of one segment was sampled at, [tokens]; 1 where it was not sampled.

    `spans` have `start`, `end` and `turn`, which is a place in `turns`. ValueError for a turn that is not there.
    """
    temperatures = torch.ones(num_tokens)
    for span in spans:
        if not 0 <= span["turn"] < len(turns):
            raise ValueError(f"span {dict(span)} belongs to none of the segment's {len(turns)} turns")
        temperatures[span["start"] : span["end"]] = turns[span["turn"]]["temperature"]
    return temperatures


def token_scores(
    logits: torch.Tensor, token_ids: torch.Tensor, temperatures: torch.Tensor, with_entropy: bool = False
) -> TokenScores:
    """Scores of `token_ids` [tokens, k] under softmax(logits / temperature), logits [tokens, vocab] of the positions
    that predict them, temperatures [tokens]."""
    scaled = logits.float() / temperatures[:, None]
    normalizer = scaled.logsumexp(-1)
    entropy = None
    if with_entropy:
        every = scaled - normalizer[:, None]
        probabilities = every.exp()
        entropy = -(probabilities * every.masked_fill(probabilities == 0, 0.0)).sum(-1)  # not 0 x inf
    return TokenScores(scaled.gather(-1, token_ids) - normalizer[:, None], entropy)


def chunked_scores(
    hidden: torch.Tensor,
    head: Head,
    parameters: Sequence[torch.Tensor],
    token_ids: torch.Tensor,
    temperatures: torch.Tensor,
    with_entropy: bool = False,
    chunk_tokens: int | None = None,
) -> TokenScores:
    """`token_scores` of `head(hidden, *parameters)`, in chunks of `chunk_tokens` (by default so many that a chunk has
    `MAX_CHUNK_LOGITS` logits, taking the first parameter's rows for the vocabulary).

    hidden [tokens, hidden], in any floating dtype; gradients go to it and to the parameters, those of the parameters
    summed over chunks in float32. ValueError when tensors do not fit together.
    """
    shapes = [list(tensor.shape) for tensor in (hidden, token_ids, temperatures)]
    if [len(shape) for shape in shapes] != [2, 2, 1] or len({shape[0] for shape in shapes}) > 1:
        raise ValueError(
            f"hidden, token_ids, temperatures: found shapes {shapes}; allowed: [tokens, hidden], [tokens, k], [tokens]"
        )
    if chunk_tokens is None:
        chunk_tokens = max(1, MAX_CHUNK_LOGITS // parameters[0].shape[0])

    def columns(hidden: torch.Tensor, ids: torch.Tensor, temperatures: torch.Tensor, *parameters: Any) -> torch.Tensor:
        scores = token_scores(head(hidden, *parameters), ids, temperatures, with_entropy)
        return scores.logprobs if scores.entropy is None else torch.cat([scores.logprobs, scores.entropy[:, None]], 1)

    found = _Chunked.apply(columns, chunk_tokens, hidden, token_ids, temperatures, *parameters)
    count = token_ids.shape[1]
    return TokenScores(found[:, :count], found[:, count] if with_entropy else None)


class _Chunked(torch.autograd.Function):
    """`columns` of each chunk of tokens. `torch.utils.checkpoint` would do but for the parameters' gradient: it would
    be added up over chunks in the parameters' own, lower precision."""

    @staticmethod
    def forward(
        ctx: Any,
        columns: Callable[..., torch.Tensor],
        chunk_tokens: int,
        hidden: torch.Tensor,
        token_ids: torch.Tensor,
        temperatures: torch.Tensor,
        *parameters: torch.Tensor,
    ) -> torch.Tensor:
        ctx.columns, ctx.chunk_tokens = columns, chunk_tokens
        ctx.save_for_backward(hidden, token_ids, temperatures, *parameters)
        parts = zip(*(tensor.split(chunk_tokens) for tensor in (hidden, token_ids, temperatures)), strict=True)
        return torch.cat([columns(*part, *parameters) for part in parts])

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        hidden, token_ids, temperatures, *parameters = ctx.saved_tensors
        needs_hidden, _, _, *needs = ctx.needs_input_grad[2:]
        leaves = [tensor.detach().requires_grad_(needed) for tensor, needed in zip(parameters, needs, strict=True)]
        of_hidden = torch.empty_like(hidden) if needs_hidden else None
        sums: list[torch.Tensor | None] = [None] * sum(needs)
        for start in range(0, hidden.shape[0], ctx.chunk_tokens):
            part = slice(start, start + ctx.chunk_tokens)
            chunk = hidden[part].detach().requires_grad_(needs_hidden)
            inputs = [tensor for tensor in (*leaves, chunk) if tensor.requires_grad]
            with torch.enable_grad():
                found = ctx.columns(chunk, token_ids[part], temperatures[part], *leaves)
            found_gradients = torch.autograd.grad(found, inputs, gradient[part])
            if of_hidden is not None:
                of_hidden[part] = found_gradients[-1]
            for index, term in enumerate(found_gradients[: len(sums)]):
                total = sums[index]
                sums[index] = term if total is None else total.float().add_(term)
        remaining = iter(sums)
        of_parameters = [_like(next(remaining), leaf) if leaf.requires_grad else None for leaf in leaves]
        return None, None, of_hidden, None, None, *of_parameters


def _like(gradient: torch.Tensor | None, parameter: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(parameter) if gradient is None else gradient.to(parameter.dtype)
