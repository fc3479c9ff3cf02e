"""Advantage estimators. Every expected number is worked out beside it."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stages.algorithms.estimators import ESTIMATORS, estimate, is_constant

ONE_GROUP = [0, 0, 0, 0]


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


@pytest.mark.parametrize("type", ESTIMATORS)
@pytest.mark.parametrize("rewards", [[2, 2], [0.4, 0.4, 0.4], [1, 1, 1 + 1e-9], [5]])
def test_a_constant_group_has_exactly_zero_advantage(type: str, rewards: list[float]) -> None:
    assert estimate(type, rewards, [0] * len(rewards)) == [0.0] * len(rewards)


def test_rewards_count_as_equal_within_1e_8() -> None:
    assert is_constant([1, 1, 1 + 1e-9])
    assert not is_constant([1, 1.00001])


def test_groups_are_told_apart_by_their_number_and_not_by_their_order() -> None:
    # groups 7: [1, 3], mean 2; 2: [10, 30], mean 20; interleaved
    assert estimate("dr_grpo", [1, 10, 3, 30], [7, 2, 7, 2]) == close(-1, -10, 1, 10)


def test_a_rollout_counts_once_however_many_segments_it_has() -> None:
    # A: reward 0, three segments; B: reward 1, one. By rollout the mean is 0.5 and the advantages are +-0.70711;
    # by segment it would be 0.25.
    assert estimate("grpo", [0, 1], [0, 0]) == close(-0.70711, 0.70711)


REWARDS = st.floats(-1e30, 1e30)


@pytest.mark.parametrize("type", ESTIMATORS)
@settings(deadline=None)
@given(rows=st.lists(st.tuples(REWARDS, st.integers(0, 3)), min_size=1, max_size=12))
def test_advantages_are_finite_and_sum_to_zero_in_each_group(type: str, rows: list[tuple[float, int]]) -> None:
    rewards, groups = [reward for reward, _ in rows], [number for _, number in rows]
    advantages = estimate(type, rewards, groups)
    assert all(map(math.isfinite, advantages))
    for number in set(groups):
        members = [advantage for advantage, other in zip(advantages, groups, strict=True) if other == number]
        scale = max(map(abs, rewards)) + max(map(abs, members))
        assert abs(sum(members)) <= 1e-9 * scale * len(members) + 1e-9


@pytest.mark.parametrize("type", ESTIMATORS)
@settings(deadline=None)
@given(rewards=st.lists(st.integers(-5, 5), min_size=2, max_size=8), shift=st.integers(-50, 50))
def test_advantages_do_not_change_when_all_rewards_move_together(type: str, rewards: list[int], shift: int) -> None:
    groups = [0] * len(rewards)
    moved = estimate(type, [reward + shift for reward in rewards], groups)
    assert moved == pytest.approx(estimate(type, rewards, groups), abs=1e-9)
