"""Policy losses and the value loss by token. Ratios are written out; log-probs of the old policy are -1."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from stages.algorithms.losses import LOSSES, PolicyLoss, cispo, gspo, policy_gradient, ppo, value_loss
from tests.tensors import TRUE, close, rows

OLD = torch.full((1, 3), -1.0, dtype=torch.float64)


def at(*ratios: float) -> torch.Tensor:
    """Log-probs that have these ratios to the old ones."""
    return (OLD + torch.tensor([ratios], dtype=torch.float64).log()).requires_grad_()


def gradient(found: PolicyLoss, logprobs: torch.Tensor) -> list[float]:
    return torch.autograd.grad(found.losses.sum(), logprobs)[0][0].tolist()


# ---- PPO ----


def test_the_clip_takes_the_worse_of_both_objectives() -> None:
    # A = 1: min(0.5, 0.8) = 0.5; A = -1: min(-1, -1) = -1; A = 2: min(3, 1.2 * 2) = 2.4
    logprobs = at(0.5, 1, 1.5)
    found = ppo(logprobs, OLD, rows([1, -1, 2]), TRUE, clip_low=0.2, clip_high=0.2)
    assert found.losses[0].tolist() == close(-0.5, 1, -2.4)
    assert found.losses.mean().item() == pytest.approx(-0.63333, abs=1e-5)
    assert found.clipped.tolist() == [[False, False, True]]
    # d(-r A)/d log pi = -r A where it is not clipped, else 0
    assert gradient(found, logprobs) == close(-0.5, 1, 0)


def test_the_upper_clip_can_be_higher_than_the_lower() -> None:
    # 1 + 0.28 = 1.28 times A = 2 is 2.56; A = -1 at a ratio of 0.5: min(-0.5, -0.8) = -0.8
    found = ppo(at(1.5, 0.5, 1.25), OLD, rows([2, -1, 1]), TRUE, clip_low=0.2, clip_high=0.28)
    assert found.losses[0].tolist() == close(-2.56, 0.8, -1.25)
    assert found.clipped.tolist() == [[True, True, False]]


def test_the_dual_clip_bounds_the_loss_of_a_negative_advantage() -> None:
    # A = -4 at a ratio of 10: min(-40, -4.8) = -40, at least 3 * -4 = -12
    logprobs = at(0.5, 1, 10)
    found = ppo(logprobs, OLD, rows([1, -1, -4]), TRUE, dual_clip=3.0)
    assert found.losses[0].tolist() == close(-0.5, 1, 12)
    assert found.clipped.tolist() == [[False, False, True]]
    assert gradient(found, logprobs) == close(-0.5, 1, 0)
    without = ppo(at(0.5, 1, 10), OLD, rows([1, -1, -4]), TRUE)
    assert without.losses[0].tolist() == close(-0.5, 1, 40) and not without.clipped.any()


# ---- CISPO ----


@pytest.mark.parametrize(
    ("low", "tokens", "clipped"),
    [
        # 0.8 * 1 * 1.69315, 1 * -1 * 1, 1.2 * -4 * 0.69741: sum -2.9930
        (0.8, [1.35452, -1, -3.34757], [True, False, True]),
        # 0.5 * 1 * 1.69315 without a lower bound: sum -3.5010
        (None, [0.84657, -1, -3.34757], [False, False, True]),
    ],
)
def test_cispo_weighs_by_the_bounded_ratio(low: float | None, tokens: list[float], clipped: list[bool]) -> None:
    logprobs = rows([-1.69315, -1, -0.69741]).requires_grad_()
    old = logprobs.detach() - rows([0.5, 1, 10]).log()
    found = cispo(logprobs, old, rows([1, -1, -4]), TRUE, high=1.2, low=low)
    assert found.losses[0].tolist() == close(*tokens)
    assert found.losses.sum().item() == pytest.approx(-2.9930 if low else -3.5010, abs=1e-4)
    assert found.clipped.tolist() == [clipped]
    # a clipped token keeps its gradient: -bounded * A
    assert gradient(found, logprobs) == close(-(0.8 if low else 0.5), 1, 1.2 * 4)


def test_only_trained_tokens_count_as_clipped() -> None:
    # every ratio is 1 and above the bound, the masked one too
    found = cispo(OLD, OLD, rows([1, 1, 1]), torch.tensor([[True, True, False]]), high=0.9)
    assert found.clipped.tolist() == [[True, True, False]]


# ---- GSPO ----


def test_gspo_clips_the_geometric_mean_of_a_row() -> None:
    # s = (0.5 * 1 * 1.5)^(1/3) = 0.90856, within 1 +- 0.2: -s A
    logprobs = at(0.5, 1, 1.5)
    found = gspo(logprobs, OLD, rows([1, -1, 2]), TRUE, clip_low=0.2, clip_high=0.2)
    assert found.losses[0].tolist() == close(-0.9086, 0.9086, -1.8171)
    assert found.losses.mean().item() == pytest.approx(-0.60571, abs=1e-5)
    assert gradient(found, logprobs) == close(-0.9086, 0.9086, -1.8171)
    assert not found.clipped.any()


def test_gspo_clips_all_tokens_of_a_row_alike() -> None:
    # s = 0.90856 < 1 - 0.05: with A < 0 the clamped 0.95 A is the worse one, with A > 0 s A stays
    logprobs = at(0.5, 1, 1.5)
    found = gspo(logprobs, OLD, rows([-1, -1, 1]), TRUE, clip_low=0.05, clip_high=0.05)
    assert found.losses[0].tolist() == close(0.95, 0.95, -0.9086)
    assert found.clipped.tolist() == [[True, True, False]]
    assert gradient(found, logprobs) == close(0, 0, -0.9086)


def test_gspo_means_over_the_trained_tokens_of_each_row() -> None:
    # row 1: the first and the third, sqrt(0.5 * 1.5) = 0.86603; row 2: the second alone, 2; row 3: none
    old, new = OLD.expand(3, 3), (OLD + rows([0.5, 7, 1.5], [7, 2, 7], [7, 7, 7]).log())
    mask = torch.tensor([[True, False, True], [False, True, False], [False, False, False]])
    found = gspo(new, old, torch.ones(3, 3), mask, clip_low=5.0, clip_high=5.0)
    assert found.losses.tolist() == [close(-0.8660, 0, -0.8660), close(0, -2, 0), close(0, 0, 0)]


# ---- policy gradient ----


def test_the_policy_gradient_knows_no_ratio() -> None:
    logprobs = at(0.5, 1, 1.5)
    found = policy_gradient(logprobs, OLD, rows([1, -1, 2]), TRUE)
    assert found.losses[0].tolist() == close(1.69315, -1, 2 * 0.59453)
    assert gradient(found, logprobs) == close(-1, 1, -2) and not found.clipped.any()


FOUR: dict[str, Callable[..., PolicyLoss]] = {
    "policy_gradient": LOSSES["policy_gradient"],
    "ppo": partial(LOSSES["ppo"], dual_clip=3.0),
    "cispo": partial(LOSSES["cispo"], high=5.0),
    "gspo": partial(LOSSES["gspo"], clip_low=3e-4, clip_high=4e-4),
}


@pytest.mark.parametrize("type", FOUR)
def test_every_loss_has_the_policy_gradient_at_a_ratio_of_1(type: str) -> None:
    logprobs = rows([-1, -2, -0.5]).requires_grad_()
    found = FOUR[type](logprobs, logprobs.detach(), rows([1, -1, 2]), TRUE)
    assert gradient(found, logprobs) == close(-1, 1, -2, abs=1e-12)
    assert not found.clipped.any()


@pytest.mark.parametrize("type", FOUR)
def test_a_token_without_advantage_adds_nothing_even_if_its_logprob_is_infinite(type: str) -> None:
    logprobs = rows([-math.inf, -1, -1]).requires_grad_()
    found = FOUR[type](logprobs, OLD, rows([0, 0, 0]), TRUE)
    assert not found.losses.any() and gradient(found, logprobs) == [0, 0, 0] and not found.clipped.any()


@pytest.mark.parametrize("type", FOUR)
def test_a_policy_that_diverged_shows(type: str) -> None:
    found = FOUR[type](rows([math.nan, -1, -1]), OLD, rows([1, 1, 1]), TRUE)
    assert found.losses[0, 0].isnan()


SHAPE = (2, 4)
LOGPROBS = st.floats(-100, 0, width=32) | st.just(-math.inf)
ANY = st.floats(width=32)


def arrays(elements: st.SearchStrategy[Any], dtype: str = "float32") -> st.SearchStrategy[torch.Tensor]:
    return hnp.arrays(dtype, SHAPE, elements=elements).map(torch.from_numpy)


@pytest.mark.parametrize("type", FOUR)
@settings(deadline=None)
@given(
    logprobs=arrays(LOGPROBS),
    old=arrays(LOGPROBS),
    advantages=arrays(st.floats(-10, 10, width=32)),
    mask=arrays(st.booleans(), "bool"),
    other=arrays(ANY),
)
def test_losses_are_finite_and_masked_positions_have_no_influence(
    type: str,
    logprobs: torch.Tensor,
    old: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    other: torch.Tensor,
) -> None:
    def result(*inputs: torch.Tensor) -> list[torch.Tensor]:
        policy = inputs[0].clone().requires_grad_()
        found = FOUR[type](policy, *inputs[1:], mask)
        return [found.losses.detach(), found.clipped, *torch.autograd.grad(found.losses.sum(), policy)]

    expected = result(logprobs, old, advantages)
    assert all(tensor.isfinite().all() and not tensor[~mask].any() for tensor in expected)
    dirty = [torch.where(mask, tensor, other) for tensor in (logprobs, old, advantages)]
    for found, wanted in zip(result(*dirty), expected, strict=True):
        torch.testing.assert_close(found, wanted, rtol=0, atol=0)


@settings(deadline=None)
@given(
    delta=hnp.arrays("float64", SHAPE, elements=st.floats(-2, 2)),
    advantages=hnp.arrays("float64", SHAPE, elements=st.floats(-5, 5)),
    low=st.floats(0, 0.9),
    high=st.floats(0, 2),
    dual=st.none() | st.floats(1.5, 10),
)
def test_ppo_agrees_with_numpy(
    delta: np.ndarray, advantages: np.ndarray, low: float, high: float, dual: float | None
) -> None:
    ratio = np.exp(delta)
    objective = np.minimum(ratio * advantages, np.clip(ratio, 1 - low, 1 + high) * advantages)
    if dual is not None:
        objective = np.where(advantages < 0, np.maximum(objective, dual * advantages), objective)
    new, old = torch.from_numpy(delta - 3), torch.full(SHAPE, -3.0, dtype=torch.float64)
    mask = torch.ones(SHAPE).bool()
    found = ppo(new, old, torch.from_numpy(advantages), mask, clip_low=low, clip_high=high, dual_clip=dual)
    np.testing.assert_allclose(found.losses.numpy(), -objective, rtol=1e-9, atol=1e-9)


# ---- values ----


def test_the_value_loss_is_the_larger_of_the_plain_and_the_clipped_error() -> None:
    # clip 0.2, V_old 0. V = 1, R = 2: plain (1)^2 / 2 = 0.5, clipped V = 0.2: 1.8^2 / 2 = 1.62.
    # V = 1, R = -1: plain 4 / 2 = 2, clipped 1.2^2 / 2 = 0.72. V = 0.1, R = 1: inside, 0.81 / 2.
    values = rows([1, 1, 0.1]).requires_grad_()
    losses, clipped = value_loss(values, rows([0, 0, 0]), rows([2, -1, 1]), TRUE, clip=0.2)
    assert losses[0].tolist() == close(1.62, 2, 0.405)
    assert clipped.tolist() == [[True, False, False]]
    (found,) = torch.autograd.grad(losses.sum(), values)
    assert found[0].tolist() == close(0, 2, -0.9)


def test_the_value_loss_without_a_clip_is_half_the_squared_error() -> None:
    losses, clipped = value_loss(rows([1, 1, 0.1]), rows([9, 9, 9]), rows([2, -1, 1]), TRUE, clip=None)
    assert losses[0].tolist() == close(0.5, 2, 0.405) and not clipped.any()


@settings(deadline=None)
@given(values=arrays(st.floats(-10, 10, width=32)), mask=arrays(st.booleans(), "bool"), other=arrays(ANY))
def test_values_at_masked_positions_have_no_influence(
    values: torch.Tensor, mask: torch.Tensor, other: torch.Tensor
) -> None:
    def result(fill: torch.Tensor) -> list[torch.Tensor]:
        critic = torch.where(mask, values, fill).requires_grad_()
        old, returns = torch.where(mask, values + 1, fill), torch.where(mask, values * 2, fill)
        losses, clipped = value_loss(critic, old, returns, mask, clip=0.2)
        return [losses.detach(), clipped, *torch.autograd.grad(losses.sum(), critic)]

    for found, wanted in zip(result(other), result(torch.zeros(SHAPE)), strict=True):
        torch.testing.assert_close(found, wanted, rtol=0, atol=0)
        assert found.isfinite().all() and not found[~mask].any()
