"""Returns and advantages by token, over the sampled tokens of one segment.

The vectors are compact: they hold the tokens that the policy sampled and nothing between them. So what the environment
wrote neither discounts nor carries a value or a reward, wherever it stands. Each segment of a rollout is a sequence of
its own that ends with the rollout's reward: a rewrite of the history ends what its tokens can have led to.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

MIN_VARIANCE = 1e-8
"""Floor of the variance that advantages are whitened by."""


class Moments(NamedTuple):
    """Sums over the tokens of a batch, 0-d float64 each; the moments of several ranks are added field by field."""

    count: torch.Tensor
    sum: torch.Tensor
    square_sum: torch.Tensor


def token_rewards(outcome: float, kl: torch.Tensor | None, coef: float, num_actions: int | None = None) -> torch.Tensor:
    """-coef * kl on each sampled token and the rollout's reward on the last one, -> [actions] (2203.02155, eq. 2).

    kl [actions] in nats. Without it `num_actions` says how many tokens there are, and the result is float64. ValueError
    when neither is given.
    """
    if kl is None:
        if num_actions is None:
            raise ValueError("token_rewards needs kl or num_actions to know the number of tokens")
        rewards = torch.zeros(num_actions, dtype=torch.float64)
    else:
        rewards = -coef * kl
    if len(rewards):
        rewards[-1] += outcome
    return rewards


def discounted_returns(rewards: torch.Tensor, gamma: float) -> torch.Tensor:
    """G_t = r_t + gamma * G_{t+1}, rewards [actions] -> [actions] (Sutton & Barto 3.9; REINFORCE++, 2501.03262)."""
    returns, following = [], 0.0
    for reward in reversed(rewards.tolist()):
        following = reward + gamma * following
        returns.append(following)
    return torch.tensor(returns[::-1], dtype=rewards.dtype, device=rewards.device)


def gae(rewards: torch.Tensor, values: torch.Tensor, gamma: float, lam: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Generalised advantage estimation (1506.02438, eq. 16): advantages and the returns that the critic learns.

    rewards, values [actions] -> two of [actions]. delta_t = r_t + gamma * V_{t+1} - V_t, A_t = delta_t + gamma * lam *
    A_{t+1}, return_t = A_t + V_t; the value after the last token is 0. ValueError when the lengths differ.
    """
    if rewards.shape != values.shape:
        raise ValueError(f"{len(rewards)} rewards and {len(values)} values: every sampled token needs one of each")
    advantages, advantage, next_value = [], 0.0, 0.0
    for reward, value in zip(reversed(rewards.tolist()), reversed(values.tolist()), strict=True):
        advantage = reward + gamma * next_value - value + gamma * lam * advantage
        next_value = value
        advantages.append(advantage)
    result = torch.tensor(advantages[::-1], dtype=values.dtype, device=values.device)
    return result, result + values


def moments(advantages: torch.Tensor, mask: torch.Tensor) -> Moments:
    """What `whiten` needs to know of the tokens in `mask`, both of one shape; other positions never matter."""
    chosen = torch.where(mask, advantages, 0.0).double()
    return Moments(mask.sum().double(), chosen.sum(), chosen.square().sum())


def whiten(advantages: torch.Tensor, count: torch.Tensor, sum: torch.Tensor, square_sum: torch.Tensor) -> torch.Tensor:
    """(a - mean) / sqrt(max(variance, 1e-8)) with the mean and variance of the whole batch (REINFORCE++, 2501.03262).

    The sums are those of `moments`, added up over all ranks, so that how tokens lie on ranks changes nothing; the
    variance is that of the population. Any shape, which it keeps. Zeros for a batch without tokens.
    """
    if float(count) == 0:
        return torch.zeros_like(advantages)
    mean = sum / count
    variance = (square_sum / count - mean.square()).clamp(min=MIN_VARIANCE)
    return ((advantages.double() - mean) / variance.sqrt()).to(advantages.dtype)
