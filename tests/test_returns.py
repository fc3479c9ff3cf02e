"""Returns, generalised advantages and whitening, over the sampled tokens of a segment."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from stages.algorithms.returns import discounted_returns, gae, moments, token_rewards, whiten


def close(*values: float, abs: float = 1e-5) -> object:
    return pytest.approx(list(values), abs=abs)


def vector(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def gather(values: list[float], mask: list[int]) -> torch.Tensor:
    """The compact vector of the sampled tokens, as the stages make it."""
    return vector(*values)[torch.tensor(mask, dtype=torch.bool)]


def scatter(values: torch.Tensor, mask: list[int]) -> list[float]:
    return torch.zeros(len(mask), dtype=values.dtype).masked_scatter(torch.tensor(mask).bool(), values).tolist()


# ---- returns ----


def test_returns_are_discounted_from_the_end() -> None:
    # 3, 2 + 0.5 * 3 = 3.5, 1 + 0.5 * 3.5 = 2.75
    assert discounted_returns(vector(1, 2, 3), 0.5).tolist() == close(2.75, 3.5, 3)


def test_returns_carry_across_what_the_environment_wrote() -> None:
    # the reward 1 stands on the last of four sampled tokens: 0.5^3, 0.5^2, 0.5, 1
    mask = [1, 1, 0, 0, 1, 1]
    rewards = token_rewards(1.0, None, 0.0, num_actions=4)
    assert scatter(discounted_returns(rewards, 0.5), mask) == close(0.125, 0.25, 0, 0, 0.5, 1)


def test_the_outcome_is_earned_by_the_last_sampled_token() -> None:
    assert token_rewards(2.0, None, 0.0, num_actions=3).tolist() == [0, 0, 2]
    assert token_rewards(2.0, vector(1, 2, 3), 0.1).tolist() == close(-0.1, -0.2, 2 - 0.3)


def test_a_segment_without_sampled_tokens_has_no_rewards() -> None:
    assert token_rewards(2.0, None, 0.0, num_actions=0).tolist() == []
    assert discounted_returns(vector(), 0.9).tolist() == []
    assert [part.tolist() for part in gae(vector(), vector(), 0.9, 0.9)] == [[], []]


def test_the_number_of_tokens_has_to_be_known() -> None:
    with pytest.raises(ValueError, match="needs kl or num_actions"):
        token_rewards(1.0, None, 0.1)


def test_kl_is_left_as_it_was_for_whoever_reports_it() -> None:
    kl = vector(1, 2)
    token_rewards(5.0, kl, 0.1)
    assert kl.tolist() == [1, 2]


def test_kl_where_nothing_was_sampled_costs_nothing_and_does_not_discount() -> None:
    # kl 1 at all four positions, coefficient 1, gamma 0.9: -1 - 0.9 = -1.9 at the first of the two sampled tokens.
    # With positions that discount it would be -1 - 0.9^3 = -1.729, with KL at all of them -3.439.
    mask = [1, 0, 0, 1]
    rewards = token_rewards(0.0, gather([1, 1, 1, 1], mask), 1.0)
    assert scatter(discounted_returns(rewards, 0.9), mask) == close(-1.9, 0, 0, -1)


@pytest.mark.parametrize("mask", [[1, 1, 1], [0, 1, 1], [1, 0, 1]])
def test_every_segment_of_a_rollout_gets_its_reward_wherever_its_tokens_lie(mask: list[int]) -> None:
    rewards = token_rewards(0.5, None, 0.0, num_actions=sum(mask))
    assert scatter(discounted_returns(rewards, 1.0), mask) == [0.5 * sampled for sampled in mask]


# ---- generalised advantages ----


@pytest.mark.parametrize(
    ("gamma", "lam", "returns", "advantages"),
    [
        # sums of rewards to come: 6, 5, 3; minus the values
        (1.0, 1.0, [6, 5, 3], [5.5, 4, 1.5]),
        # 3, 2 + 0.5 * 3, 1 + 0.5 * 3.5
        (0.5, 1.0, [2.75, 3.5, 3], [2.25, 2.5, 1.5]),
        # deltas 1 + 1 - 0.5 = 1.5, 2 + 1.5 - 1 = 2.5, 3 - 1.5 = 1.5; 1.5, 2.5 + 0.5 * 1.5, 1.5 + 0.5 * 3.25
        (1.0, 0.5, [3.625, 4.25, 3], [3.125, 3.25, 1.5]),
    ],
)
def test_generalised_advantages(gamma: float, lam: float, returns: list[float], advantages: list[float]) -> None:
    found, learned = gae(vector(1, 2, 3), vector(0.5, 1, 1.5), gamma, lam)
    assert found.tolist() == close(*advantages)
    assert learned.tolist() == close(*returns)


def test_gamma_and_lambda_half_at_once() -> None:
    # deltas 1 + 0.5 * 1 - 0.5 = 1, 2 + 0.5 * 1.5 - 1 = 1.75, 1.5; 1.75 + 0.25 * 1.5 = 2.125, 1 + 0.25 * 2.125 = 1.53125
    found, learned = gae(vector(1, 2, 3), vector(0.5, 1, 1.5), 0.5, 0.5)
    assert found.tolist() == close(1.53125, 2.125, 1.5)
    assert learned.tolist() == close(2.03125, 3.125, 3)


@pytest.mark.parametrize("between", [0.0, 7.0, -100.0, math.nan])
def test_values_where_nothing_was_sampled_do_not_matter(between: float) -> None:
    mask = [0, 0, 1, 1, 1, 0, 0, 1, 1, 0, 0]
    rewards = [0, 0, 0.1, 0.1, 0.1, 0, 0, 0.1, 1, 0, 0]
    values = [0.5 if sampled else between for sampled in mask]
    found, learned = gae(gather(rewards, mask), gather(values, mask), 1.0, 1.0)
    # rewards to come: 0.1 * 4 + 1, 0.1 * 3 + 1, ...; the gap of two is no step
    assert scatter(learned, mask) == close(0, 0, 1.4, 1.3, 1.2, 0, 0, 1.1, 1, 0, 0)
    assert scatter(found, mask) == close(0, 0, 0.9, 0.8, 0.7, 0, 0, 0.6, 0.5, 0, 0)


def test_values_of_other_tokens_than_the_rewards_are_refused() -> None:
    with pytest.raises(ValueError, match="3 rewards and 2 values"):
        gae(vector(1, 2, 3), vector(1, 2), 1.0, 1.0)


NUMBERS = st.floats(-100, 100)


@settings(deadline=None)
@given(rewards=st.lists(NUMBERS, min_size=1, max_size=8), values=st.data(), gamma=st.floats(0, 1), lam=st.floats(0, 1))
def test_generalised_advantages_are_sums_of_discounted_errors(
    rewards: list[float], values: st.DataObject, gamma: float, lam: float
) -> None:
    n = len(rewards)
    v = values.draw(st.lists(NUMBERS, min_size=n, max_size=n))
    delta = np.array(rewards) + gamma * np.append(v[1:], 0) - np.array(v)
    expected = [sum((gamma * lam) ** (k - t) * delta[k] for k in range(t, n)) for t in range(n)]
    found, learned = gae(vector(*rewards), vector(*v), gamma, lam)
    assert found.tolist() == pytest.approx(expected, abs=1e-9)
    assert (learned - found).tolist() == pytest.approx(v, abs=1e-9)
    monte_carlo = gae(vector(*rewards), vector(*v), gamma, 1.0)[1]
    assert monte_carlo.tolist() == pytest.approx(discounted_returns(vector(*rewards), gamma).tolist(), abs=1e-9)


# ---- whitening ----


def test_whitening_gives_mean_0_and_standard_deviation_1() -> None:
    # mean 2, population variance 2/3
    a = vector(1, 2, 3)
    scale = math.sqrt(3 / 2)
    assert whiten(a, *moments(a, torch.ones(3).bool())).tolist() == close(-scale, 0, scale)


def test_whitening_counts_the_tokens_in_the_mask_only() -> None:
    # 1 and 3 of the first row, 5 of the second: mean 3, variance (4 + 0 + 4) / 3
    a = torch.tensor([[1.0, math.nan, 3.0], [5.0, math.inf, -999.0]])
    mask = torch.tensor([[True, False, True], [True, False, False]])
    whitened = whiten(a, *moments(a, mask))
    scale = math.sqrt(3 / 8)
    assert whitened[mask].tolist() == close(-2 * scale, 0, 2 * scale)
    assert whitened.dtype == a.dtype


def test_rows_can_be_whitened_by_themselves() -> None:
    a, mask = torch.randn(2, 3, generator=torch.Generator().manual_seed(0)), torch.ones(2, 3).bool()
    for row in range(2):
        whitened = whiten(a[row], *moments(a[row], mask[row]))
        assert whitened.mean().item() == pytest.approx(0, abs=1e-6)
        assert whitened.std(correction=0).item() == pytest.approx(1, abs=1e-6)


def test_equal_advantages_are_whitened_to_zero_and_no_tokens_to_nothing() -> None:
    # the variance is floored at 1e-8, so rounding of 1e-17 becomes 1e-13
    a = torch.full((5,), 0.1, dtype=torch.float64)
    assert whiten(a, *moments(a, torch.ones(5).bool())).tolist() == close(0, 0, 0, 0, 0, abs=1e-10)
    assert whiten(a, *moments(a, torch.zeros(5).bool())).tolist() == [0, 0, 0, 0, 0]


def test_small_differences_are_divided_by_the_floor_of_the_variance() -> None:
    # deviations 1e-6, variance 1e-12 < 1e-8: 1e-6 / 1e-4
    a = vector(-1e-6, 1e-6)
    assert whiten(a, *moments(a, torch.ones(2).bool())).tolist() == close(-0.01, 0.01)
    # above the floor it plays no part: deviations 2e-4, variance 4e-8
    a = vector(-2e-4, 2e-4)
    assert whiten(a, *moments(a, torch.ones(2).bool())).tolist() == close(-1, 1)


@settings(deadline=None)
@given(
    advantages=hnp.arrays("float64", 12, elements=st.floats(-10, 10)),
    mask=hnp.arrays("bool", 12, elements=st.booleans()),
    cuts=st.sets(st.integers(1, 11), max_size=4),
    other=st.floats() | st.just(math.nan),
)
def test_whitening_shards_by_their_summed_moments_is_whitening_the_whole(
    advantages: np.ndarray, mask: np.ndarray, cuts: set[int], other: float
) -> None:
    a, m = torch.from_numpy(advantages), torch.from_numpy(mask)
    parts = [slice(i, j) for i, j in zip([0, *sorted(cuts)], [*sorted(cuts), 12], strict=True)]
    dirty = torch.where(m, a, other)
    by_shard = [torch.stack(moments(dirty[part], m[part])) for part in parts]
    total = torch.stack(by_shard).sum(0)
    whole = whiten(a, *moments(a, m))
    pieces = torch.cat([whiten(dirty[part], *total) for part in parts])
    torch.testing.assert_close(pieces[m], whole[m], rtol=1e-6, atol=1e-6)
    assert whole.isfinite().all()
    chosen = advantages[mask]
    if len(chosen) and chosen.var() > 1e-6:
        np.testing.assert_allclose(whole[m].numpy(), (chosen - chosen.mean()) / chosen.std(), rtol=1e-5, atol=1e-5)
