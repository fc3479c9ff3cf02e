"""Estimates of the KL divergence of the policy from a reference, token by token, and its adaptive coefficient."""

from __future__ import annotations

import torch

from stages.algorithms.correction import MAX_LOG_RATIO

KINDS = ("k1", "k2", "k3", "k3+")


def kl(logprobs: torch.Tensor, reference: torch.Tensor, kind: str, clamp: float | None = None) -> torch.Tensor:
    """Estimate of KL(policy || reference) at tokens that the policy sampled, in nats; both [rows, seq] -> [rows, seq].

    With d = logprobs - reference (Schulman, joschu.net/blog/kl-approx.html):

    - k1: d. Unbiased, of either sign. For rewards, where it alone gives the gradient of KL(policy || reference); never
      for a loss, where its gradient, that of log pi, has zero expectation.
    - k2: d^2 / 2. A biased value. For losses: its gradient d * grad log pi is the unbiased one of that divergence.
    - k3: exp(-d) - 1 + d. Unbiased and never negative. In a loss (as GRPO has it) its gradient is that of
      KL(reference || policy), in a reward it takes this one off.
    - k3+: the value of k3 and the gradient of k2, for losses that are also reported.

    These are expectations over tokens that this policy sampled; older tokens need their importance ratio as a weight
    (2506.09477). Where d is infinite it counts as +-30, where it is NaN as 0, without gradient; k3 does not follow d
    past +-30, where its exponential would overflow. Nothing else is clamped unless `clamp` > 0 is given: the value then
    stays within +-clamp, and a token whose value was cut has no gradient at all, k3+'s included. ValueError for another
    kind.
    """
    d = torch.nan_to_num(logprobs - reference.detach(), nan=0.0, posinf=MAX_LOG_RATIO, neginf=-MAX_LOG_RATIO)
    if kind == "k1":
        value = d
    elif kind == "k2":
        value = d.square() / 2
    elif kind == "k3":
        value = _k3(d)
    elif kind == "k3+":
        k2 = d.square() / 2
        value = _k3(d).detach() + (k2 - k2.detach())
    else:
        raise ValueError(f"no KL estimate is called {kind!r}; there are {', '.join(KINDS)}")
    if clamp is None:
        return value
    return torch.where(value.abs() <= clamp, value, value.detach().clamp(-clamp, clamp))


def _k3(d: torch.Tensor) -> torch.Tensor:
    d = d.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return torch.expm1(-d) + d


def adaptive_coefficient(coef: float, measured: float, target: float, horizon: float, num_rollouts: int) -> float:
    """The KL coefficient after a batch: coef * (1 + clip(measured / target - 1, -0.2, 0.2) * num_rollouts / horizon).

    `measured` and `target` are mean KL by token in nats, `horizon` is in rollouts (Ziegler et al., 1909.08593, 2.2).
    """
    error = min(max(measured / target - 1, -0.2), 0.2)
    return coef * (1 + error * num_rollouts / horizon)
