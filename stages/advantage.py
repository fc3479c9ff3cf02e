"""Advantage: from the rewards of the kept groups to one advantage per trained segment."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean, pstdev

from schemas.recipe import AdvantageConfig
from schemas.types import Batch, Filtered, StoredGroup, TrainableSegment
from stages.algorithms.estimators import estimate, is_constant


def advantage(filtered: Filtered, step: int, config: AdvantageConfig) -> Batch:
    """The batch of `step`. The baseline is taken over the rollouts that succeeded, one reward each however many
    segments; all segments of a rollout get its advantage."""
    groups = filtered.groups
    rollouts = [
        (index, rollout, reward) for index, group in enumerate(groups) for rollout, reward in group.rewards().items()
    ]
    rewards = [reward for _, _, reward in rollouts]
    estimates = estimate(config.type, rewards, [index for index, _, _ in rollouts])
    by_rollout = {(index, rollout): value for (index, rollout, _), value in zip(rollouts, estimates, strict=True)}
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
