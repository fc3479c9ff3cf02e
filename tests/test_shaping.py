"""Reward shaping."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas.algorithms import DrGRPOAdvantage
from stages.algorithms.estimators import estimate
from stages.algorithms.shaping import clip, overlong_penalty, stop_properly, weighted


def test_components_are_weighted_and_the_others_only_recorded() -> None:
    assert weighted({"answer": 1.0, "format": 0.5, "num_calls": 9}, {"answer": 1.0, "format": 0.2}) == 1 + 0.2 * 0.5


@pytest.mark.parametrize(
    ("components", "error"),
    [
        ({"answer": None, "format": 1.0}, r"no reward without answer \(None\); the components are answer, format"),
        ({"format": 1.0}, r"answer \(missing\)"),
        ({"answer": math.nan, "format": 1.0}, r"answer \(nan\)"),
        ({"answer": math.inf}, r"answer \(inf\), format \(missing\)"),
        ({}, r"answer \(missing\), format \(missing\)"),
    ],
)
def test_a_component_that_is_missing_is_an_error_that_names_it(components: dict[str, float | None], error: str) -> None:
    with pytest.raises(ValueError, match=error):
        weighted(components, {"answer": 1.0, "format": 0.2})


def test_a_rollout_whose_graders_all_failed_never_enters_the_mean_of_its_group() -> None:
    # rewards [None, 1, 0]: the first is an error, and the baseline of the others is 1/2
    with pytest.raises(ValueError, match="no reward without answer"):
        weighted({"answer": None}, {"answer": 1.0})
    graded = [weighted({"answer": reward}, {"answer": 1.0}) for reward in (1.0, 0.0)]
    assert estimate(DrGRPOAdvantage(), graded, [0, 0]) == [0.5, -0.5]


@pytest.mark.parametrize(
    ("peak", "expected"),
    [
        (0, 0.0),
        (80, 0.0),  # 100 - 20
        (85, -0.5 * 5 / 20),
        (90, -0.5 * 10 / 20),
        (100, -0.5),
        (130, -0.5),
    ],
)
def test_the_overlong_penalty_falls_over_the_buffer(peak: int, expected: float) -> None:
    assert overlong_penalty(peak, max_tokens=100, buffer=20, factor=0.5) == pytest.approx(expected)


def test_a_buffer_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="buffer is 0 tokens"):
        overlong_penalty(5, max_tokens=100, buffer=0, factor=0.5)


@pytest.mark.parametrize(
    ("reward", "truncated", "coef", "expected"),
    [
        (0.8, False, 0.0, 0.8),
        (0.8, False, -1.0, 0.8),
        (0.8, True, 0.5, 0.4),
        (0.8, True, 1.0, 0.8),
        (0.8, True, 0.0, 0.0),
        (0.8, True, -1.0, -1.0),
        (-1.0, True, 0.5, -0.5),
    ],
)
def test_a_truncated_rollout_keeps_a_share_or_gets_a_reward_of_its_own(
    reward: float, truncated: bool, coef: float, expected: float
) -> None:
    assert stop_properly(reward, truncated, coef) == expected


def test_truncation_cannot_be_rewarded() -> None:
    with pytest.raises(ValueError, match="has to be <= 1"):
        stop_properly(1.0, False, 1.5)


def test_rewards_are_clipped_at_both_ends() -> None:
    assert [clip(reward, -1, 2) for reward in (-5, -1, 0.5, 2, 7)] == [-1, -1, 0.5, 2, 2]


@given(peak=st.integers(0, 200), buffer=st.integers(1, 100), factor=st.floats(0, 10))
def test_the_overlong_penalty_is_bounded(peak: int, buffer: int, factor: float) -> None:
    assert -factor <= overlong_penalty(peak, 100, buffer, factor) <= 0
