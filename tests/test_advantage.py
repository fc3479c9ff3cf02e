"""The advantage stage: one reward per rollout, a baseline over those that succeeded, one advantage for all segments."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from schemas.algorithms import CustomAdvantage, DrGRPOAdvantage, GRPOAdvantage
from schemas.errors import AgentError
from schemas.types import Batch, Filtered, Status, StoredGroup
from stages.advantage import advantage, shaped_reward
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


# ---- shaped rewards ----


def shaped(config: dict[str, Any], *segments: Any) -> float:
    (group_,) = [group(0, *segments)]
    return shaped_reward(
        group_, 0, group_.rewards()[0], recipe(reward=config, agent={"entry": "a:B", "max_context_tokens": 100})
    )


def test_components_are_weighed_before_length_is_punished_and_the_clip_comes_last() -> None:
    # 2 x 0.5 + 1 x 3 = 4; peak 90 of 100 with a ramp of 20: half of it, -0.5 x 2 = -1; 3 is clipped to 2.5
    one = segment(0, 9.0, components='{"format": 0.5, "answer": 3}', num_tokens=40)
    two = segment(0, 9.0, components='{"format": 0.5, "answer": 3}', num_tokens=90, index=1)
    weights, overlong = {"format": 2.0, "answer": 1.0}, {"buffer_tokens": 20, "factor": 2.0}
    assert shaped({"weights": weights}, one, two) == 4
    assert shaped({"weights": weights, "overlong": overlong}, one, two) == 3
    assert shaped({"weights": weights, "overlong": overlong, "clip": [0, 2.5]}, one, two) == 2.5


def test_a_rollout_with_a_truncated_segment_gets_a_part_of_its_reward() -> None:
    cut, whole = segment(0, 3.0, status=Status.TRUNCATED), segment(0, 3.0, index=1)
    assert shaped({"truncated_factor": 0.5}, whole, cut) == 1.5
    assert shaped({"truncated_factor": -1}, whole, cut) == -1
    assert shaped({"truncated_factor": 0.5}, whole) == 3


def test_a_component_that_is_missing_stops_the_run_and_is_named() -> None:
    with pytest.raises(AgentError, match=r"group 0000-000000-0, rollout 0: no reward without answer \(missing\)"):
        shaped({"weights": {"answer": 1.0}}, segment(0, 1.0, components='{"format": 1}'))


def test_what_is_logged_as_reward_is_what_is_trained() -> None:
    # rewards 1 and 0 of which the weights make 1 x 2 and 0 x 2
    members = [segment(r, 9.0, components=f'{{"answer": {1 - r}}}') for r in range(2)]
    made = advantage(Filtered([group(0, *members)]), 0, recipe(reward={"weights": {"answer": 2.0}}, advantage=DR_GRPO))
    assert made.metrics["advantage/reward_mean"] == 1
    assert advantages(made) == {(0, 0, 0): 1, (0, 1, 0): -1}


# ---- a user's own estimator ----


def own(folder: Path, body: str) -> CustomAdvantage:
    (folder / "mine.py").write_text(f"def mine(rewards, groups):\n    return {body}\n")
    return CustomAdvantage(function=f"{folder}/mine.py:mine")


def test_an_estimator_of_the_user_takes_the_place_of_ours(tmp_path: Path) -> None:
    made = batch(group(0, rewards=[3, 1]), config=own(tmp_path, "rewards * 10 + groups"))
    assert advantages(made) == {(0, 0, 0): 30, (0, 1, 0): 10}


@pytest.mark.parametrize("body", ["rewards[:1]", "rewards / 0", "rewards.sum()"])
def test_an_estimator_that_does_not_give_a_number_for_each_rollout_is_an_error(tmp_path: Path, body: str) -> None:
    with pytest.raises(AgentError, match=r"advantage.type = custom: found .* allowed: a finite one for each of the 2"):
        batch(group(0, rewards=[3, 1]), config=own(tmp_path, body))
