"""Log-probabilities of given tokens under a causal language model's logits."""

from __future__ import annotations

import torch


def token_logprobs(logits: torch.Tensor, token_ids: torch.Tensor, temperature: float) -> torch.Tensor:
    """log softmax(logits / temperature) of each token given those before it, in float32.

    logits [batch, seq, vocab], token_ids [batch, seq] -> [batch, seq]; position 0 has no prediction and gets 0.
    """
    scaled = logits[:, :-1].float() / temperature
    chosen = scaled.gather(-1, token_ids[:, 1:, None]).squeeze(-1)
    return torch.nn.functional.pad(chosen - scaled.logsumexp(-1), (1, 0))
