"""Advantage estimators over the rewards of one batch: pure functions of rewards and groups, chosen by `advantage.type`.

Every rollout has one reward, however many segments it has; `groups` says which rollouts share a prompt. An estimator
returns one number per rollout, which all sampled tokens of the rollout share. For `reinforce` and `gae` that number is
the reward itself, which `returns` turns into advantages by token.

A group of one has nothing to be compared with: the estimators that compare inside the group give it 0, like any other
constant group. Recipes refuse groups of one for them; a group that lost its other rollouts is still no error here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from schemas.algorithms import AdvantageConfig, CustomAdvantage
from schemas.entries import load_object
from schemas.errors import AgentError

CONSTANT_RANGE = 1e-8
"""Rewards of a group that lie within this range count as equal: float noise must not become an advantage."""


def is_constant(rewards: Sequence[float]) -> bool:
    """Whether a group's rewards carry no signal."""
    return max(rewards) - min(rewards) <= CONSTANT_RANGE


def grpo(rewards: torch.Tensor, groups: torch.Tensor) -> torch.Tensor:
    """(r - mean) / (std + 1e-6) within each group, with the sample std (DeepSeekMath, 2402.03300, 4.1.2).

    rewards [rollouts] float64, groups [rollouts] int64 -> [rollouts] float64. A constant group gives zeros. Biased: for
    rewards of 0 and 1 its expectation is the policy gradient times a factor that grows as the pass rate nears 0 or 1.
    """

    def normalise(r: torch.Tensor) -> torch.Tensor:
        return (r - r.mean()) / (r.std(correction=1) + 1e-6)

    return _within_groups(rewards, groups, normalise)


def dr_grpo(rewards: torch.Tensor, groups: torch.Tensor) -> torch.Tensor:
    """r - mean within each group: GRPO without the division that favours easy and hard prompts (2503.20783, eq. 5).

    Shapes as in `grpo`. Its expectation is (1 - 1/n) times the policy gradient for groups of n.
    """
    return _within_groups(rewards, groups, lambda r: r - r.mean())


def rloo(rewards: torch.Tensor, groups: torch.Tensor) -> torch.Tensor:
    """r minus the mean of the other rollouts of its group (2402.14740, eq. 7). Shapes as in `grpo`; unbiased."""
    return _within_groups(rewards, groups, lambda r: r - (r.sum() - r) / (len(r) - 1))


def reinforce_baseline(rewards: torch.Tensor, groups: torch.Tensor) -> torch.Tensor:
    """r - mean within each group, to be whitened over all tokens of the batch (REINFORCE++-baseline, 2501.03262).

    Shapes as in `grpo`. What differs from `dr_grpo` is `returns.whiten`, which comes after.
    """
    return dr_grpo(rewards, groups)


def flash_reinforce(rewards: torch.Tensor, groups: torch.Tensor) -> torch.Tensor:
    """r minus the mean over all rollouts of the batch, each counted once whatever its number of segments.

    Shapes as in `grpo`; `groups` plays no part. Its expectation is (1 - 1/N) times the policy gradient for a batch of N
    rollouts. A batch of equal rewards gives zeros.
    """
    return _within_groups(rewards, torch.zeros_like(groups), lambda r: r - r.mean())


def maxrl(rewards: torch.Tensor, groups: torch.Tensor) -> torch.Tensor:
    """(r - mean) / mean within each group (MaxRL, 2602.02710): follows the gradient of the log of the pass rate.

    Shapes as in `grpo`. Assumes rewards of 0 (failure) and 1 (success): for a pass rate of p the expectation is the
    gradient of log p's expansion in (1 - p) cut after n - 1 terms, for groups of n. Other rewards have to be >= 0, and
    mean reward takes the pass rate's place; ValueError for a negative one, which would turn the sign of the mean. A
    group without success gives zeros.
    """
    if (rewards < 0).any():
        raise ValueError(f"maxrl divides by the mean reward of a group: a reward is {rewards.min()}, it has to be >= 0")
    return _within_groups(rewards, groups, lambda r: (r - r.mean()) / r.mean())


def outcome_reward(rewards: torch.Tensor, groups: torch.Tensor) -> torch.Tensor:
    """The reward itself, which `returns` spreads over the tokens. Shapes as in `grpo`; `groups` plays no part."""
    return rewards.clone()


def _within_groups(
    rewards: torch.Tensor, groups: torch.Tensor, baseline: Callable[[torch.Tensor], torch.Tensor]
) -> torch.Tensor:
    advantages = torch.zeros_like(rewards)
    for group in groups.unique():
        members = groups == group
        if not is_constant(rewards[members].tolist()):
            advantages[members] = baseline(rewards[members])
    return advantages


ESTIMATORS = {
    "grpo": grpo,
    "dr_grpo": dr_grpo,
    "rloo": rloo,
    "reinforce_baseline": reinforce_baseline,
    "flash_reinforce": flash_reinforce,
    "maxrl": maxrl,
    "reinforce": outcome_reward,
    "gae": outcome_reward,
    "on_policy_distill": outcome_reward,
}


def estimate(config: AdvantageConfig, rewards: Sequence[float], groups: Sequence[int]) -> list[float]:
    """What the recipe's estimator makes of each rollout's reward, for plain numbers, so that callers need no tensors.

    Raises RecipeError for a function of the user that cannot be loaded, AgentError for one that does not give a finite
    number for each rollout.
    """
    function = ESTIMATORS.get(config.type)
    if isinstance(config, CustomAdvantage):
        function = load_object(config.function, "advantage.function")
    assert function is not None
    estimates = function(torch.tensor(rewards, dtype=torch.float64), torch.tensor(groups))
    found = torch.as_tensor(estimates, dtype=torch.float64)
    if found.shape != (len(rewards),) or not found.isfinite().all():
        raise AgentError(
            f"advantage.type = {config.type}: found {tuple(found.shape)} numbers, {int((~found.isfinite()).sum())} of "
            f"them not finite; allowed: a finite one for each of the {len(rewards)} rollouts"
        )
    return found.tolist()
