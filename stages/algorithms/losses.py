"""Policy losses: pure functions of log-probs, advantages and weights. One call sees one microbatch; the denominator is
that of the whole optimizer step over all ranks, so any split into microbatches gives the same gradient."""

from __future__ import annotations

import torch


def policy_gradient(policy_logprobs: torch.Tensor, advantages: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """-weight * advantage * log pi by token (REINFORCE; Sutton & Barto 13.3), all [batch, seq].

    With one optimizer step per batch the importance weight against the sampler is the whole off-policy correction, so
    this is also what PPO reduces to: its ratio to the policy before the step is 1. A token without weight or advantage
    adds nothing, even where its log-prob is infinite.
    """
    scale = weights * advantages
    return torch.where(scale == 0, torch.zeros_like(policy_logprobs), -scale * policy_logprobs)


LOSSES = {"policy_gradient": policy_gradient}


def token_mean(losses: torch.Tensor, mask: torch.Tensor, denominator: float) -> torch.Tensor:
    """Sum over trained tokens (`mask`) over their number in the whole step; other positions never matter, NaN too."""
    return torch.where(mask, losses, torch.zeros_like(losses)).sum() / max(denominator, 1.0)
