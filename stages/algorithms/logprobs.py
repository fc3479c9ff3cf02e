"""Log-probabilities of given tokens under a causal language model's logits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch


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


def token_logprobs(logits: torch.Tensor, token_ids: torch.Tensor, temperatures: torch.Tensor) -> torch.Tensor:
    """log softmax(logits / temperature) of each token given those before it, in float32.

    logits [batch, seq, vocab], token_ids and the temperatures of these tokens [batch, seq] -> [batch, seq]; position 0
    has no prediction and gets 0.
    """
    scaled = logits[:, :-1].float() / temperatures[:, 1:, None]
    chosen = scaled.gather(-1, token_ids[:, 1:, None]).squeeze(-1)
    return torch.nn.functional.pad(chosen - scaled.logsumexp(-1), (1, 0))


def token_entropy(logits: torch.Tensor, temperatures: torch.Tensor) -> torch.Tensor:
    """Entropy in nats of softmax(logits / temperature), the distribution that each token was drawn from, in float32.

    logits [batch, seq, vocab], temperatures [batch, seq] -> [batch, seq], aligned as in `token_logprobs`: position 0
    gets 0. Logits of -inf add nothing.
    """
    logprobs = (logits[:, :-1].float() / temperatures[:, 1:, None]).log_softmax(-1)
    probabilities = logprobs.exp()
    terms = probabilities * logprobs.masked_fill(probabilities == 0, 0.0)
    return torch.nn.functional.pad(-terms.sum(-1), (1, 0))
