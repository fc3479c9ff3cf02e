"""Advantage estimators. Every expected number is worked out beside it."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stages.algorithms.estimators import ESTIMATORS, is_constant

ONE_GROUP = [0, 0, 0, 0]
OUTCOMES = ["reinforce", "gae", "on_policy_distill"]  # the reward itself, spread over tokens later
BASELINES = [type for type in ESTIMATORS if type not in OUTCOMES]
SHIFT_INVARIANT = [type for type in BASELINES if type != "maxrl"]


def estimate(type: str, rewards: Sequence[float], groups: Sequence[int]) -> list[float]:
    return ESTIMATORS[type](torch.tensor(rewards, dtype=torch.float64), torch.tensor(groups)).tolist()


def close(*values: float) -> object:
    return pytest.approx(list(values), abs=1e-5)


def test_grpo_divides_by_the_sample_standard_deviation() -> None:
    # mean 2, deviations -1 and 1, sample std sqrt(2 / 1) = 1.41421; 1 / 1.41421 = 0.70711
    assert estimate("grpo", [1, 3], [0, 0]) == close(-0.70711, 0.70711)


def test_grpo_of_one_success_in_four() -> None:
    # mean 1/4, sum of squares 9/16 + 3/16 = 3/4, sample std sqrt(3/4 / 3) = 1/2; (3/4) / (1/2), (-1/4) / (1/2)
    assert estimate("grpo", [1, 0, 0, 0], ONE_GROUP) == close(1.5, -0.5, -0.5, -0.5)


def test_grpo_adds_1e_6_to_the_standard_deviation() -> None:
    # deviations 5e-6, sample std 7.0711e-6; 5e-6 / (7.0711e-6 + 1e-6) = 0.6195
    assert estimate("grpo", [1, 1.00001], [0, 0]) == pytest.approx([-0.6195, 0.6195], abs=1e-4)


def test_dr_grpo_only_subtracts_the_mean() -> None:
    assert estimate("dr_grpo", [1, 0, 0, 0], ONE_GROUP) == close(0.75, -0.25, -0.25, -0.25)


def test_rloo_subtracts_the_mean_of_the_others() -> None:
    assert estimate("rloo", [6, 3], [0, 0]) == close(6 - 3, 3 - 6)
    assert estimate("rloo", [1, 0, 0, 0], ONE_GROUP) == close(1 - 0, -1 / 3, -1 / 3, -1 / 3)


def test_reinforce_baseline_only_subtracts_the_mean_before_it_is_whitened() -> None:
    assert estimate("reinforce_baseline", [1, 0, 0, 0, 6, 2], [0, 0, 0, 0, 1, 1]) == close(
        0.75, -0.25, -0.25, -0.25, 6 - 4, 2 - 4
    )


def test_flash_reinforce_subtracts_the_mean_of_the_batch_over_its_rollouts() -> None:
    # (1 + 0 + 0 + 3) / 4 = 1 over both groups; the rollout with reward 3 counts once, whatever its segments
    assert estimate("flash_reinforce", [1, 0, 0, 3], [0, 0, 1, 1]) == close(1 - 1, 0 - 1, 0 - 1, 3 - 1)


def test_flash_reinforce_sees_a_group_that_is_constant_in_itself() -> None:
    assert estimate("flash_reinforce", [1, 1, 0, 0], [0, 0, 1, 1]) == close(0.5, 0.5, -0.5, -0.5)


def test_maxrl_divides_by_the_pass_rate() -> None:
    # mean 1/4: (1 - 1/4) / (1/4) = 3, (0 - 1/4) / (1/4) = -1. mean 3/4: (1/4) / (3/4) = 1/3 and -1
    assert estimate("maxrl", [1, 0, 0, 0], ONE_GROUP) == close(3, -1, -1, -1)
    assert estimate("maxrl", [1, 1, 1, 0], ONE_GROUP) == close(1 / 3, 1 / 3, 1 / 3, -1)


def test_maxrl_learns_nothing_from_a_group_without_success() -> None:
    assert estimate("maxrl", [0, 0, 1, 0], [0, 0, 1, 1]) == close(0, 0, 1, -1)


def test_maxrl_refuses_negative_rewards() -> None:
    with pytest.raises(ValueError, match=r"a reward is -0\.5, it has to be >= 0"):
        estimate("maxrl", [1, -0.5], [0, 0])


@pytest.mark.parametrize("type", OUTCOMES)
def test_the_outcome_of_a_rollout_is_its_reward(type: str) -> None:
    assert estimate(type, [0.3, 0.3, -2], [0, 0, 1]) == [0.3, 0.3, -2]


@pytest.mark.parametrize("type", ESTIMATORS)
def test_a_batch_without_rollouts_has_no_advantages(type: str) -> None:
    assert estimate(type, [], []) == []


@pytest.mark.parametrize("type", BASELINES)
@pytest.mark.parametrize("rewards", [[2, 2], [0.4, 0.4, 0.4], [1, 1, 1 + 1e-9], [5]])
def test_a_constant_group_has_exactly_zero_advantage(type: str, rewards: list[float]) -> None:
    assert estimate(type, rewards, [0] * len(rewards)) == [0.0] * len(rewards)


def test_rewards_count_as_equal_within_1e_8() -> None:
    assert is_constant([1, 1, 1 + 1e-9])
    assert not is_constant([1, 1.00001])


def test_one_reward_is_constant_and_not_nan() -> None:
    assert is_constant([0.5])


def test_continuous_rewards_that_are_equal_are_constant_wherever_they_lie() -> None:
    # a filter on the mean, 0 < 0.4 < 1, would keep this group
    assert is_constant([0.4, 0.4, 0.4])


def test_the_answers_decide_whether_a_group_is_constant_and_not_what_their_length_cost() -> None:
    answers, shaped = [0, 0, 0], [0, -0.2, -1]
    assert is_constant(answers) and not is_constant(shaped)


def test_groups_are_told_apart_by_their_number_and_not_by_their_order() -> None:
    # groups 7: [1, 3], mean 2; 2: [10, 30], mean 20; interleaved
    assert estimate("dr_grpo", [1, 10, 3, 30], [7, 2, 7, 2]) == close(-1, -10, 1, 10)


def test_a_rollout_counts_once_however_many_segments_it_has() -> None:
    # A: reward 0, three segments; B: reward 1, one. By rollout the mean is 0.5 and the advantages are +-0.70711;
    # by segment it would be 0.25.
    assert estimate("grpo", [0, 1], [0, 0]) == close(-0.70711, 0.70711)
    assert estimate("flash_reinforce", [0, 1], [0, 0]) == close(-0.5, 0.5)


def test_the_same_prompt_twice_in_a_batch_makes_two_groups() -> None:
    # Together the mean would be 1/2; apart they are 1 and 0 and constant.
    assert estimate("rloo", [1, 1, 0, 0], [0, 0, 1, 1]) == [0, 0, 0, 0]


def test_the_baseline_is_over_the_rollouts_that_have_a_reward() -> None:
    # A group of 8 that lost two leaves six: mean 2/6, not 2/8.
    expected = [1 - 1 / 3, 1 - 1 / 3, *[-1 / 3] * 4]
    assert estimate("dr_grpo", [1, 1, 0, 0, 0, 0], [0] * 6) == close(*expected)


REWARDS = st.floats(-1e30, 1e30)


@pytest.mark.parametrize("type", BASELINES)
@settings(deadline=None)
@given(rows=st.lists(st.tuples(REWARDS, st.integers(0, 3)), min_size=1, max_size=12))
def test_advantages_are_finite_and_sum_to_zero_in_what_they_compare(type: str, rows: list[tuple[float, int]]) -> None:
    rewards, groups = [reward for reward, _ in rows], [number for _, number in rows]
    if type == "maxrl":
        rewards = [abs(reward) for reward in rewards]
    advantages = estimate(type, rewards, groups)
    assert all(map(math.isfinite, advantages))
    if type == "flash_reinforce":
        groups = [0] * len(groups)
    for number in set(groups):
        members = [advantage for advantage, other in zip(advantages, groups, strict=True) if other == number]
        scale = max(map(abs, rewards)) + max(map(abs, members))
        assert abs(sum(members)) <= 1e-9 * scale * len(members) + 1e-9


@pytest.mark.parametrize("type", SHIFT_INVARIANT)
@settings(deadline=None)
@given(rewards=st.lists(st.integers(-5, 5), min_size=2, max_size=8), shift=st.integers(-50, 50))
def test_advantages_do_not_change_when_all_rewards_move_together(type: str, rewards: list[int], shift: int) -> None:
    groups = [0] * len(rewards)
    moved = estimate(type, [reward + shift for reward in rewards], groups)
    assert moved == pytest.approx(estimate(type, rewards, groups), abs=1e-9)


@pytest.mark.parametrize("type", BASELINES)
@settings(deadline=None)
@given(reward=st.floats(0, 1e30), sizes=st.lists(st.integers(1, 5), min_size=1, max_size=4))
def test_constant_rewards_give_exactly_zero(type: str, reward: float, sizes: list[int]) -> None:
    groups = [number for number, size in enumerate(sizes) for _ in range(size)]
    assert estimate(type, [reward] * len(groups), groups) == [0.0] * len(groups)


def in_numpy(type: str, r: np.ndarray) -> np.ndarray:
    """An independent computation over one group."""
    if np.ptp(r) <= 1e-8:
        return np.zeros_like(r)
    others = np.array([np.delete(r, i).mean() for i in range(len(r))])
    return {
        "grpo": (r - r.mean()) / (np.std(r, ddof=1) + 1e-6),
        "dr_grpo": r - r.mean(),
        "reinforce_baseline": r - r.mean(),
        "rloo": r - others,
        "maxrl": r / max(r.mean(), 1e-30) - 1,
    }[type]


@pytest.mark.parametrize("type", [type for type in BASELINES if type != "flash_reinforce"])
@settings(deadline=None)
@given(rows=st.lists(st.tuples(st.floats(0, 10), st.integers(0, 3)), min_size=2, max_size=12).filter(bool))
def test_estimators_agree_with_numpy(type: str, rows: list[tuple[float, int]]) -> None:
    members = {number: [i for i, row in enumerate(rows) if row[1] == number] for _, number in rows}
    rows = [row for row in rows if len(members[row[1]]) > 1]
    rewards, groups = np.array([reward for reward, _ in rows]), np.array([number for _, number in rows], dtype=int)
    expected = np.zeros(len(rows))
    for number in set(groups.tolist()):
        expected[groups == number] = in_numpy(type, rewards[groups == number])
    assert estimate(type, rewards.tolist(), groups.tolist()) == pytest.approx(expected.tolist(), rel=1e-6, abs=1e-9)
