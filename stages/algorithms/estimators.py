"""Advantage estimators over the rewards of one batch: pure functions of rewards and groups, chosen by `advantage.type`.

Every rollout has one reward, however many segments it has; `groups` says which rollouts share a prompt. An estimator
returns one advantage per rollout, which all sampled tokens of the rollout share.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

CONSTANT_RANGE = 1e-8
"""Rewards of a group that lie within this range count as equal: float noise must not become an advantage."""


def is_constant(rewards: Sequence[float]) -> bool:
    """Whether a group's rewards carry no signal."""
    return max(rewards) - min(rewards) <= CONSTANT_RANGE


def grpo(rewards: torch.Tensor, groups: torch.Tensor) -> torch.Tensor:
    """(r - mean) / (std + 1e-6) within each group, with the sample std (DeepSeekMath, 2402.03300, 4.1.2).

    rewards [rollouts] float64, groups [rollouts] int64 -> [rollouts] float64. A constant group gives zeros.
    """

    def normalise(r: torch.Tensor) -> torch.Tensor:
        return (r - r.mean()) / (r.std(correction=1) + 1e-6)

    return _within_groups(rewards, groups, normalise)


def dr_grpo(rewards: torch.Tensor, groups: torch.Tensor) -> torch.Tensor:
    """r - mean within each group: GRPO without the division that favours easy and hard prompts (2503.20783, eq. 5)."""
    return _within_groups(rewards, groups, lambda r: r - r.mean())


def rloo(rewards: torch.Tensor, groups: torch.Tensor) -> torch.Tensor:
    """r minus the mean of the other rollouts of its group (2402.14740, eq. 7)."""
    return _within_groups(rewards, groups, lambda r: r - (r.sum() - r) / (len(r) - 1))


def _within_groups(
    rewards: torch.Tensor, groups: torch.Tensor, baseline: Callable[[torch.Tensor], torch.Tensor]
) -> torch.Tensor:
    advantages = torch.zeros_like(rewards)
    for group in groups.unique():
        members = groups == group
        if not is_constant(rewards[members].tolist()):
            advantages[members] = baseline(rewards[members])
    return advantages


ESTIMATORS = {"grpo": grpo, "dr_grpo": dr_grpo, "rloo": rloo}


def estimate(type: str, rewards: Sequence[float], groups: Sequence[int]) -> list[float]:
    """Advantages by rollout for plain numbers, so that callers need no tensors."""
    return ESTIMATORS[type](torch.tensor(rewards, dtype=torch.float64), torch.tensor(groups)).tolist()
