"""KL estimates: their values, and their expected gradients against those of the divergences, enumerated."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from stages.algorithms.aggregation import aggregate, row_weights
from stages.algorithms.kl import KINDS, adaptive_coefficient, kl
from stages.algorithms.losses import policy_gradient
from tests.tensors import close

LOGPROBS = torch.tensor([[-1.0, -1, -1]], dtype=torch.float64)
REFERENCE = torch.tensor([[0.0, -15, -30]], dtype=torch.float64)


@pytest.mark.parametrize(
    ("kind", "values"),
    [
        ("k1", [-1, 14, 29]),  # d = logp - ref
        ("k2", [0.5, 98, 420.5]),  # d^2 / 2
        ("k3", [math.e - 2, 13, 28]),  # exp(-d) - 1 + d: e - 1 - 1, about 0 - 1 + 14, 0 - 1 + 29
        ("k3+", [math.e - 2, 13, 28]),
    ],
)
def test_values_are_not_clamped(kind: str, values: list[float]) -> None:
    assert kl(LOGPROBS, REFERENCE, kind)[0].tolist() == close(*values)


@pytest.mark.parametrize(
    ("kind", "gradients"),
    [
        ("k1", [1, 1, 1]),
        ("k2", [-1, 14, 29]),  # d
        ("k3", [1 - math.e, 1, 1]),  # 1 - exp(-d)
        ("k3+", [-1, 14, 29]),  # that of k2
    ],
)
def test_gradients_by_token(kind: str, gradients: list[float]) -> None:
    logprobs = LOGPROBS.clone().requires_grad_()
    (found,) = torch.autograd.grad(kl(logprobs, REFERENCE, kind).sum(), logprobs)
    assert found[0].tolist() == close(*gradients)


@pytest.mark.parametrize("kind", KINDS)
def test_a_clamp_bounds_the_value_and_stops_the_whole_gradient(kind: str) -> None:
    free, clamped = LOGPROBS.clone().requires_grad_(), LOGPROBS.clone().requires_grad_()
    (expected,) = torch.autograd.grad(kl(free, REFERENCE, kind).sum(), free)
    value = kl(clamped, REFERENCE, kind, clamp=10.0)
    (found,) = torch.autograd.grad(value.sum(), clamped)
    assert value[0].tolist() == close(kl(LOGPROBS, REFERENCE, kind)[0, 0].item(), 10, 10)
    assert found[0].tolist() == close(expected[0, 0].item(), 0, 0)


def test_a_clamp_has_two_sides() -> None:
    assert kl(-LOGPROBS * 0 - 40, REFERENCE * 0, "k1", clamp=5.0)[0].tolist() == [-5, -5, -5]


def test_other_names_are_refused() -> None:
    with pytest.raises(ValueError, match="no KL estimate is called 'k4'; there are k1, k2, k3, k3"):
        kl(LOGPROBS, REFERENCE, "k4")


# ---- expectations over a softmax of two actions ----

THETA = torch.tensor([0.7, -0.4], dtype=torch.float64)
OTHER = torch.tensor([0.2, 0.8], dtype=torch.float64)  # the reference's probabilities


def expectation(kind: str) -> tuple[float, list[float]]:
    """Value and gradient of an estimate, each action counted as often as the policy takes it."""
    theta = THETA.clone().requires_grad_()
    logprobs = theta.log_softmax(0)
    total = (logprobs.detach().exp() * kl(logprobs, OTHER.log(), kind)).sum()
    return total.item(), torch.autograd.grad(total, theta)[0].tolist()


def divergence(first: str) -> tuple[float, list[float]]:
    """KL(policy || reference), or the other way round, and its analytic gradient."""
    theta = THETA.clone().requires_grad_()
    p = theta.softmax(0)
    value = (p * (p / OTHER).log()).sum() if first == "policy" else (OTHER * (OTHER / p).log()).sum()
    return value.item(), torch.autograd.grad(value, theta)[0].tolist()


@pytest.mark.parametrize("kind", ["k1", "k3", "k3+"])
def test_expected_values_are_the_divergence_from_the_reference(kind: str) -> None:
    assert expectation(kind)[0] == pytest.approx(divergence("policy")[0], abs=1e-12)


def test_the_value_of_k2_is_biased() -> None:
    assert abs(expectation("k2")[0] - divergence("policy")[0]) > 0.01


@pytest.mark.parametrize("kind", ["k2", "k3+"])
def test_expected_gradients_of_k2_are_those_of_the_divergence_from_the_reference(kind: str) -> None:
    assert expectation(kind)[1] == close(*divergence("policy")[1], abs=1e-12)


def test_the_expected_gradient_of_k1_is_zero() -> None:
    assert expectation("k1")[1] == close(0, 0, abs=1e-12)


def test_the_expected_gradient_of_k3_is_that_of_the_divergence_of_the_reference() -> None:
    assert expectation("k3")[1] == close(*divergence("reference")[1], abs=1e-12)
    assert abs(expectation("k3")[1][0] - divergence("policy")[1][0]) > 0.01


# ---- in a loss ----


def test_kl_in_the_loss_has_a_gradient_where_no_token_has_an_advantage() -> None:
    logprobs, mask = LOGPROBS.clone().requires_grad_(), torch.ones(1, 3, dtype=torch.bool)
    losses = policy_gradient(logprobs, LOGPROBS, torch.zeros(1, 3), mask).losses + 0.1 * kl(logprobs, REFERENCE, "k2")
    loss = aggregate(losses, mask, row_weights("token-mean", mask.sum(-1), torch.tensor([0]), 1))
    (found,) = torch.autograd.grad(loss, logprobs)
    assert found[0].tolist() == close(-0.1 / 3, 1.4 / 3, 2.9 / 3)


@pytest.mark.parametrize("kind", KINDS)
def test_the_mean_of_what_is_reported_is_that_of_what_is_trained(kind: str) -> None:
    values = kl(LOGPROBS, REFERENCE, kind)
    before = values.clone()
    mask = torch.tensor([[True, True, False]])
    mean = aggregate(values, mask, row_weights("token-mean", mask.sum(-1), torch.tensor([0]), 1))
    assert mean.item() == pytest.approx(values[0, :2].mean().item()) and torch.equal(values, before)


NUMBERS = st.floats(-100, 0, width=32) | st.just(-math.inf)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("clamp", [None, 10.0])
@settings(deadline=None)
@given(
    logprobs=hnp.arrays("float32", (2, 4), elements=NUMBERS),
    reference=hnp.arrays("float32", (2, 4), elements=NUMBERS | st.just(math.nan)),
    mask=hnp.arrays("bool", (2, 4), elements=st.booleans()),
)
def test_estimates_and_gradients_are_finite_for_any_logprobs(
    kind: str, clamp: float | None, logprobs: object, reference: object, mask: object
) -> None:
    policy, other = torch.as_tensor(logprobs).requires_grad_(), torch.as_tensor(reference)
    trained = torch.as_tensor(mask)
    values = kl(policy, other, kind, clamp)
    (found,) = torch.autograd.grad(torch.where(trained, values, 0.0).sum(), policy)
    assert values.isfinite().all() and found.isfinite().all() and not found[~trained].any()
    assert kind == "k1" or (values >= -1e-4).all()
    assert clamp is None or (values.abs() <= clamp).all()


# ---- adaptive coefficient ----


@pytest.mark.parametrize(
    ("measured", "expected"),
    [
        (0.2, 0.204),  # 0.2 / 0.1 - 1 = 1, clipped to 0.2: 0.2 * (1 + 0.2 * 10 / 100)
        (0.11, 0.202),  # 0.1: 0.2 * (1 + 0.1 * 0.1)
        (0.1, 0.2),
        (0.0, 0.196),  # -1, clipped to -0.2
    ],
)
def test_the_coefficient_follows_the_measured_kl(measured: float, expected: float) -> None:
    found = adaptive_coefficient(0.2, measured, target=0.1, horizon=100, num_rollouts=10)
    assert found == pytest.approx(expected, abs=1e-12)
