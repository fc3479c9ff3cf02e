"""The advantage stage: one reward per rollout, a baseline over those that succeeded, one advantage for all segments."""

from __future__ import annotations

from typing import Any

import pytest

from schemas.algorithms import DrGRPOAdvantage, GRPOAdvantage
from schemas.types import Batch, Filtered, Status, StoredGroup
from stages.advantage import advantage
from tests.builders import group, recipe, segment

GRPO, DR_GRPO = GRPOAdvantage(), DrGRPOAdvantage()


def batch(*groups: StoredGroup, config: Any = DR_GRPO) -> Batch:
    return advantage(Filtered(groups), 3, recipe(advantage=config))


def advantages(made: Batch) -> dict[tuple[int, int, int], float]:
    return {(s.sequence, s.rollout, s.segment): round(s.advantage, 5) for s in made.segments}


def test_all_segments_of_a_rollout_share_the_advantage_of_its_one_reward() -> None:
    # A: reward 0 in three segments, B: reward 1 in one. Mean 0.5, sample std 0.70711: -0.70711 and 0.70711.
    # Weighed by segment the mean would be 0.25 and the advantages -0.5 and 1.5.
    segments = [segment(0, 0.0, index=index, row=index) for index in range(3)] + [segment(1, 1.0, row=3)]
    made = batch(group(0, *segments), config=GRPO)
    assert advantages(made) == {(0, 0, 0): -0.70711, (0, 0, 1): -0.70711, (0, 0, 2): -0.70711, (0, 1, 0): 0.70711}
    assert [s.row for s in made.segments] == [0, 1, 2, 3]
    assert made.metrics["advantage/reward_mean"] == 0.5


def test_the_baseline_is_taken_over_the_members_that_succeeded() -> None:
    # of 8, one infrastructure error and one that sampled nothing; the mean of [1, 1, 0, 0, 0, 1] is 0.5
    rewards = [1.0, 1.0, 0.0, 0.0, 0.0, 1.0]
    members = [segment(rollout, reward) for rollout, reward in enumerate(rewards)]
    error = segment(6, None, status=Status.INFRASTRUCTURE_ERROR, num_sampled=3)
    empty = segment(7, 0.0, num_sampled=0)
    made = batch(group(0, *members, error, empty))
    assert advantages(made) == {(0, rollout, 0): reward - 0.5 for rollout, reward in enumerate(rewards)}
    assert made.metrics["rollout/rollouts"] == 6 and made.metrics["rollout/failed_rollouts"] == 1


def test_the_same_prompt_twice_in_a_batch_is_two_groups() -> None:
    # means 0.5 and 2; over both groups together it would be 1.25
    made = batch(group(4, rewards=[0, 1]), group(9, rewards=[1, 3]))
    assert advantages(made) == {(4, 0, 0): -0.5, (4, 1, 0): 0.5, (9, 0, 0): -1, (9, 1, 0): 1}


def test_a_group_without_variance_stays_in_the_batch_with_advantage_zero() -> None:
    made = batch(group(0, rewards=[1, 1]), group(1, rewards=[0, 1]), config=GRPO)
    assert advantages(made) == {(0, 0, 0): 0, (0, 1, 0): 0, (1, 0, 0): -0.70711, (1, 1, 0): 0.70711}
    assert made.metrics["advantage/zero_variance_group_share"] == 0.5


def test_a_batch_keeps_the_order_of_its_groups_and_its_step() -> None:
    made = batch(group(5, rewards=[0, 1]), group(2, rewards=[0, 1]))
    assert [s.sequence for s in made.segments] == [5, 5, 2, 2]
    assert made.step == 3


def test_metrics_count_rollouts_and_not_segments() -> None:
    cut = [segment(0, 1.0, status=Status.TRUNCATED, index=index, num_sampled=5) for index in range(3)]
    failed = [segment(2, None, status=Status.TIMEOUT, index=index) for index in range(2)]
    metrics = batch(group(0, *cut, segment(1, 0.0, num_sampled=1), *failed)).metrics
    assert metrics == {
        "advantage/reward_mean": 0.5,
        "advantage/reward_std": 0.5,
        "rollout/groups": 1,
        "rollout/rollouts": 2,
        "rollout/failed_rollouts": 1,
        "rollout/truncated_share": 0.5,
        "rollout/sampled_tokens": 3 * 5 + 1,
        "rollout/sampled_tokens_mean": 16 / 2,
        "advantage/zero_variance_group_share": 0,
        "advantage/abs_mean": 0.5,
    }


@pytest.mark.parametrize("rewards", [[0.0, 1.0], [1.0, 1.0]])
def test_every_trainable_row_of_every_group_is_in_the_batch_once(rewards: list[float]) -> None:
    groups = [
        group(sequence, *(segment(i, reward, row=10 * sequence + i) for i, reward in enumerate(rewards)))
        for sequence in range(3)
    ]
    assert [s.row for s in batch(*groups).segments] == [0, 1, 10, 11, 20, 21]
