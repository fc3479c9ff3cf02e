"""Importance correction between the engine that sampled and the trainer, and the measure of their mismatch."""

from __future__ import annotations

import torch

MAX_LOG_RATIO = 30.0
"""Log-ratios are clamped to this magnitude before the exponential, so that no float overflows."""


def log_ratio(policy_logprobs: torch.Tensor, rollout_logprobs: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """log pi(token) - log mu(token), detached; 0 off the mask, -inf or NaN log-probs clamped. All [batch, seq]."""
    difference = policy_logprobs.detach() - rollout_logprobs
    difference = torch.nan_to_num(difference, nan=MAX_LOG_RATIO, posinf=MAX_LOG_RATIO, neginf=-MAX_LOG_RATIO)
    return difference.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).masked_fill(~mask, 0.0)


def correction_weights(ratio_log: torch.Tensor, level: str, low: float, high: float) -> torch.Tensor:
    """Weight of each token's loss: its importance ratio where that lies in [low, high], else 0 (IcePop, 2510.18855).

    `level` off gives ones. Masked tokens stay in the loss's denominator, so the mask can only shrink a step.
    """
    if level == "off":
        return torch.ones_like(ratio_log)
    ratio = ratio_log.exp()
    return torch.where((ratio >= low) & (ratio <= high), ratio, torch.zeros_like(ratio))


def mismatch_sums(ratio_log: torch.Tensor, mask: torch.Tensor) -> dict[str, torch.Tensor]:
    """Sums over trained tokens of |d| and of exp(d) - 1 - d (k3, an estimate of KL(mu || pi)), d = log pi - log mu."""
    d = ratio_log.double()
    return {"abs": (d.abs() * mask).sum(), "k3": ((d.exp() - 1 - d) * mask).sum()}
