"""Advantage: from the rewards of the kept groups to one number per rollout, which its tokens share.

What differs from token to token (discounts, a KL in the reward, whitening) the ranks add, which hold the tokens.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from statistics import fmean, pstdev

from schemas.errors import AgentError
from schemas.recipe import RLRecipe
from schemas.types import Batch, Filtered, Status, StoredGroup, TrainableSegment
from stages.algorithms import shaping
from stages.algorithms.estimators import estimate, is_constant


def advantage(filtered: Filtered, step: int, recipe: RLRecipe) -> Batch:
    """The batch of `step`. The baseline is taken over the rollouts that succeeded, one reward each however many
    segments; all segments of a rollout get its advantage. Rewards are shaped first."""
    groups = filtered.groups
    shaped = {
        (index, rollout): shaped_reward(group, rollout, reward, recipe)
        for index, group in enumerate(groups)
        for rollout, reward in group.rewards().items()
    }
    rewards = list(shaped.values())
    estimates = estimate(recipe.advantage, rewards, [index for index, _ in shaped])
    by_rollout = dict(zip(shaped, estimates, strict=True))
    segments = tuple(
        TrainableSegment(
            sequence=group.sequence,
            group_id=group.group_id,
            rollout=segment.rollout,
            segment=segment.segment,
            row=segment.row,
            num_tokens=segment.num_tokens,
            advantage=by_rollout[index, segment.rollout],
        )
        for index, group in enumerate(groups)
        for segment in group.trainable
    )
    return Batch(step, segments, _metrics(groups, rewards, estimates))


def shaped_reward(group: StoredGroup, rollout: int, reward: float, recipe: RLRecipe) -> float:
    """The reward that is trained: components weighed, then length punished, then clipped.

    Raises AgentError when the agent did not give a component that has a weight."""
    config = recipe.reward
    segments = [segment for segment in group.trainable if segment.rollout == rollout]
    if config.weights:
        try:
            reward = shaping.weighted(json.loads(segments[0].reward_components), config.weights)
        except ValueError as problem:
            raise AgentError(f"group {group.group_id}, rollout {rollout}: {problem}") from problem
    if config.overlong is not None:
        peak, most = max(segment.num_tokens for segment in segments), recipe.agent.max_context_tokens
        reward += shaping.overlong_penalty(peak, most, config.overlong.buffer_tokens, config.overlong.factor)
    if config.truncated_factor is not None:
        truncated = any(segment.status is Status.TRUNCATED for segment in segments)
        reward = shaping.stop_properly(reward, truncated, config.truncated_factor)
    return reward if config.clip is None else shaping.clip(reward, *config.clip)


def _metrics(groups: Sequence[StoredGroup], rewards: Sequence[float], estimates: Sequence[float]) -> dict[str, float]:
    """Every rollout counts once, however many segments it has."""
    truncated = sum(len({s.rollout for s in group.trainable if s.status == "truncated"}) for group in groups)
    sampled = sum(s.num_sampled for group in groups for s in group.trainable)
    constant = sum(is_constant(list(group.rewards().values())) for group in groups)
    return {
        "advantage/reward_mean": fmean(rewards),
        "advantage/reward_std": pstdev(rewards),
        "rollout/groups": float(len(groups)),
        "rollout/rollouts": float(len(rewards)),
        "rollout/failed_rollouts": float(sum(group.num_failed for group in groups)),
        "rollout/truncated_share": truncated / len(rewards),
        "rollout/sampled_tokens": float(sampled),
        "rollout/sampled_tokens_mean": sampled / len(rewards),
        "advantage/zero_variance_group_share": constant / len(groups),
        "advantage/abs_mean": fmean(map(abs, estimates)),
    }
