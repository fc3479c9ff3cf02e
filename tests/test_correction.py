"""Correction between the engine that sampled and the trainer: gates, weights and score centering."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from stages.algorithms.correction import (
    GATES,
    LEVELS,
    MODES,
    Correction,
    correction,
    log_ratio,
    score_centering,
    statistic,
)
from stages.algorithms.losses import policy_gradient, ppo
from tests.tensors import TRUE, close, rows

SUPPORTED = [
    *(("token", mode, "ratio") for mode in MODES),
    *((level, "mask", "ratio") for level in ("seq", "geo")),
    *((level, "mask", gate) for level in ("token", "seq") for gate in ("binary_kl", "tv")),
]


def corrected(
    policy: torch.Tensor,
    rollout: torch.Tensor,
    mask: torch.Tensor,
    *,
    level: str,
    mode: str,
    gate: str,
    **bounds: float,
) -> Correction:
    ratio = log_ratio(policy, rollout, mask)
    return correction(ratio, policy, rollout, mask, level=level, mode=mode, gate=gate, **bounds)  # type: ignore[arg-type]


def measured(policy: torch.Tensor, rollout: torch.Tensor, mask: torch.Tensor, level: str, gate: str) -> torch.Tensor:
    return statistic(log_ratio(policy, rollout, mask), policy, rollout, mask, level, gate)


PREVIOUS = rows([-1, -1, -1])


# ---- level token ----


def test_truncated_importance_sampling_caps_the_weights() -> None:
    # w = exp(-1 - gen) = 0.60653, 1.64872, 0.81873; at most 0.8; PPO's tokens are -0.5, 1, -2.4 (ratios 0.5, 1, 1.5):
    # (0.60653 * -0.5 + 0.8 * 1 + 0.8 * -2.4) / 3 = -0.47442
    rollout = rows([-0.5, -1.5, -0.8])
    free = corrected(PREVIOUS, rollout, TRUE, level="token", mode="trunc", gate="ratio", high=100.0)
    assert free.weights[0].tolist() == close(0.60653, 1.64872, 0.81873)
    found = corrected(PREVIOUS, rollout, TRUE, level="token", mode="trunc", gate="ratio", high=0.8)
    assert found.weights[0].tolist() == close(0.60653, 0.8, 0.8)
    assert found.kept.all() and (found.units_kept, found.units_total) == (3, 3)
    losses = ppo(PREVIOUS + rows([0.5, 1, 1.5]).log(), PREVIOUS, rows([1, -1, 2]), TRUE).losses
    assert (found.weights * losses).mean().item() == pytest.approx(-0.47442, abs=1e-5)


def test_icepop_zeroes_what_lies_outside_its_band() -> None:
    # w = 0.6065, 12.18 outside [0.5, 5], 0.8187; PPO's tokens at a ratio of 1 are -1, 1, -2:
    # (-0.6065 + 0 - 2 * 0.8187) / 3 = -0.74800
    found = corrected(
        PREVIOUS, rows([-0.5, -3.5, -0.8]), TRUE, level="token", mode="mask", gate="ratio", low=0.5, high=5.0
    )
    assert found.weights[0].tolist() == close(0.6065, 0, 0.8187)
    assert found.kept.tolist() == [[True, False, True]] and (found.units_kept, found.units_total) == (2, 3)
    losses = ppo(PREVIOUS, PREVIOUS, rows([1, -1, 2]), TRUE).losses
    assert (found.weights * losses).mean().item() == pytest.approx(-0.74800, abs=1e-5)


def test_clip_bounds_the_weight_on_both_sides() -> None:
    found = corrected(
        rows([0, 0, 0]), rows([2, 0, -2]), TRUE, level="token", mode="clip", gate="ratio", low=0.5, high=5.0
    )
    assert found.weights[0].tolist() == close(0.5, 1, 5) and found.kept.all()


def test_a_single_bound_is_the_upper_one() -> None:
    found = corrected(rows([0, 0, 0]), rows([9, 0, -2]), TRUE, level="token", mode="mask", gate="ratio", high=5.0)
    assert found.weights[0].tolist() == close(math.exp(-9), 1, 0)


def test_the_ends_of_the_band_belong_to_it() -> None:
    policy, zeros = rows([math.log(0.5), 0, math.log(4)]), rows([0, 0, 0])
    ratios = log_ratio(policy, zeros, TRUE).exp()[0].tolist()
    found = corrected(policy, zeros, TRUE, level="token", mode="mask", gate="ratio", low=ratios[0], high=ratios[2])
    assert found.weights[0].tolist() == close(0.5, 1, 4) and found.kept.all()


# ---- levels seq and geo ----


def test_the_geometric_mean_keeps_a_row_whose_mismatch_is_tiny() -> None:
    # -1 + 1.0005 at every token: exp(0.0005) = 1.0005, within [0.999, 1.002]
    rollout = rows([-1.0005] * 3)
    assert measured(PREVIOUS, rollout, TRUE, "geo", "ratio")[0].tolist() == close(1.0005, 1.0005, 1.0005, abs=1e-6)
    bounds = {"level": "geo", "mode": "mask", "gate": "ratio"}
    assert corrected(PREVIOUS, rollout, TRUE, **bounds, low=0.999, high=1.002).kept.all()
    assert not corrected(PREVIOUS, rollout, TRUE, **bounds, low=0.999, high=1.0004).kept.any()


def test_a_logprob_of_minus_infinity_stays_finite() -> None:
    # log-ratios 0.0005, 30 for the token that the engine calls impossible, 0.0005: mean 10.0003
    found = measured(PREVIOUS, rows([-1.0005, -math.inf, -1.0005]), TRUE, "geo", "ratio")
    assert found[0].tolist() == pytest.approx([math.exp(10.00033)] * 3, rel=1e-4)


def test_the_product_of_a_row_is_over_its_trained_tokens() -> None:
    # row 1: exp(0.5 - 0.25) at the first and third token; row 2: exp(0.1); row 3 has none
    policy = rows([0.5, 9, -0.25], [9, 0.1, 9], [9, 9, 9])
    mask = torch.tensor([[True, False, True], [False, True, False], [False, False, False]])
    zeros = torch.zeros(3, 3, dtype=torch.float64)
    product = measured(policy, zeros, mask, "seq", "ratio")
    assert product[:, 0].tolist() == close(math.exp(0.25), math.exp(0.1), 1)
    mean = measured(policy, zeros, mask, "geo", "ratio")
    assert mean[:, 0].tolist() == close(math.exp(0.125), math.exp(0.1), 1)
    found = corrected(policy, zeros, mask, level="seq", mode="mask", gate="ratio", low=0.5, high=1.2)
    # exp(0.25) = 1.284 is out; kept tokens keep their own ratio
    assert found.weights.tolist() == [[0, 0, 0], close(0, math.exp(0.1), 0), [0, 0, 0]]
    assert (found.units_kept, found.units_total) == (1, 2)


@pytest.mark.parametrize("level", ["seq", "geo"])
def test_one_huge_mismatch_takes_out_its_whole_sequence_and_is_reported(level: str) -> None:
    # one token of the first of two rows is 20 nats off: exp(20) or exp(20 / 3) = 786
    policy, rollout = PREVIOUS.expand(2, 3), rows([-1, -21, -1], [-1, -1, -1])
    mask = torch.ones(2, 3, dtype=torch.bool)
    found = corrected(policy, rollout, mask, level=level, mode="mask", gate="ratio", low=0.5, high=5.0)
    assert found.weights.tolist() == [[0, 0, 0], [1, 1, 1]]
    assert found.kept.any(-1).tolist() == [False, True] and (found.units_kept, found.units_total) == (1, 2)


# ---- divergences ----


def test_divergences_between_the_two_probabilities_of_a_token() -> None:
    # mu = 0.5, pi = 0.25: 0.5 ln 2 + 0.5 ln(0.5 / 0.75) = 0.14384; |mu - pi| = 0.25; equal ones 0
    policy, rollout = rows([0.25, 0.9, 0.5]).log(), rows([0.5, 0.9, 0.5]).log()
    assert measured(policy, rollout, TRUE, "token", "binary_kl")[0].tolist() == close(0.14384, 0, 0)
    assert measured(policy, rollout, TRUE, "token", "tv")[0].tolist() == close(0.25, 0, 0)
    # by row the mean over trained tokens, here the first two
    mask = torch.tensor([[True, True, False]])
    assert measured(policy, rollout, mask, "seq", "binary_kl")[0, 0].item() == pytest.approx(0.07192, abs=1e-5)
    assert measured(policy, rollout, mask, "seq", "tv")[0, 0].item() == pytest.approx(0.125)


def test_a_divergence_masks_with_the_ratio_as_weight() -> None:
    policy, rollout = rows([0.25, 0.9, 0.5]).log(), rows([0.5, 0.9, 0.45]).log()
    found = corrected(policy, rollout, TRUE, level="token", mode="mask", gate="tv", high=0.1)
    assert found.weights[0].tolist() == close(0, 1, 0.5 / 0.45)


def test_certain_and_impossible_tokens_have_a_finite_divergence() -> None:
    # clamped to [1e-6, 1 - 1e-6]: about ln(1e6) = 13.8155
    policy, rollout = rows([-math.inf, 0, math.nan]), rows([0, -math.inf, -1])
    found = measured(policy, rollout, TRUE, "token", "binary_kl")[0].tolist()
    assert found == close(13.8155, 13.8155, 30)
    assert measured(policy, rollout, TRUE, "token", "tv")[0].tolist() == close(1, 1, 30)


# ---- what has no meaning ----


@pytest.mark.parametrize(("level", "mode", "gate"), [*itertools.product(LEVELS, MODES, GATES)])
def test_combinations_without_meaning_are_refused(level: str, mode: str, gate: str) -> None:
    if (level, mode, gate) in SUPPORTED:
        assert corrected(PREVIOUS, PREVIOUS, TRUE, level=level, mode=mode, gate=gate, low=-1.0, high=5.0).kept.all()
    else:
        with pytest.raises(ValueError, match=r"level|no statistic"):
            corrected(PREVIOUS, PREVIOUS, TRUE, level=level, mode=mode, gate=gate, low=-1.0, high=5.0)


@pytest.mark.parametrize(
    ("changed", "error"),
    [
        ({"mode": "drop"}, "no correction is called 'drop'"),
        ({"level": "turn"}, "no statistic of level 'turn'"),
        ({"gate": "kl"}, "no statistic of level 'token' and gate 'kl'"),
        ({"gate": "tv", "low": 0.5}, "its lower bound cannot be 0.5"),
    ],
)
def test_other_names_and_bounds_are_refused(changed: dict[str, Any], error: str) -> None:
    arguments = {"level": "token", "mode": "mask", "gate": "ratio", "low": -1.0, "high": 5.0} | changed
    with pytest.raises(ValueError, match=error):
        corrected(PREVIOUS, PREVIOUS, TRUE, **arguments)


# ---- for any input ----

SHAPE = (2, 4)
LOGPROBS = st.floats(-100, 0, width=32) | st.just(-math.inf)


def arrays(elements: st.SearchStrategy[Any], dtype: str = "float32") -> st.SearchStrategy[torch.Tensor]:
    return hnp.arrays(dtype, SHAPE, elements=elements).map(torch.from_numpy)


@settings(deadline=None)
@given(
    policy=arrays(LOGPROBS),
    rollout=arrays(LOGPROBS | st.just(math.nan)),
    mask=arrays(st.booleans(), "bool"),
    other=arrays(st.floats(width=32)),
    kind=st.sampled_from(SUPPORTED),
    bounds=st.sampled_from([(-math.inf, 5.0), (0.0, 0.1), (-1.0, 1e12)]),
)
def test_corrections_are_finite_and_masked_positions_have_no_influence(
    policy: torch.Tensor,
    rollout: torch.Tensor,
    mask: torch.Tensor,
    other: torch.Tensor,
    kind: tuple[str, str, str],
    bounds: tuple[float, float],
) -> None:
    def result(policy: torch.Tensor, rollout: torch.Tensor) -> Correction:
        level, mode, gate = kind
        found = measured(policy, rollout, mask, level, gate)
        assert found[mask].isfinite().all()
        return corrected(policy, rollout, mask, level=level, mode=mode, gate=gate, low=bounds[0], high=bounds[1])

    expected = result(policy, rollout)
    assert expected.weights.isfinite().all() and (expected.weights >= 0).all()
    assert not expected.weights[~mask].any() and not expected.kept[~mask].any()
    assert 0 <= expected.units_kept <= expected.units_total
    dirty = result(torch.where(mask, policy, other), torch.where(mask, rollout, other))
    for found, wanted in zip(dirty, expected, strict=True):
        torch.testing.assert_close(found, wanted, rtol=0, atol=0)


# ---- score centering ----

THETA = torch.tensor([0.3, -0.5, 1.1, 0.0], dtype=torch.float64)
SAMPLER = torch.tensor([0.4, 0.3, 0.2, 0.1], dtype=torch.float64)
WEIGHTS: list[dict[str, Any]] = [
    {"mode": None},
    {"mode": "trunc", "high": 1.2},
    {"mode": "clip", "low": 0.8, "high": 1.2},
    {"mode": "mask", "low": 0.5, "high": 2.0},
]


def expected_gradient(
    advantages: list[float], theta: torch.Tensor, sampler: torch.Tensor, weight: dict[str, Any], k: int
) -> torch.Tensor:
    """Over all tokens of a one-token policy, each as likely as the sampler makes it; k = 0 leaves centering out."""
    theta = theta.clone().requires_grad_()
    size = len(theta)
    logprobs, rollout = theta.log_softmax(0)[:, None], sampler.log()[:, None]
    mask, a = torch.ones(size, 1, dtype=torch.bool), torch.tensor(advantages, dtype=torch.float64)[:, None]
    factor: Any = 1.0
    if weight["mode"] is not None:
        factor = corrected(logprobs, rollout, mask, level="token", gate="ratio", **weight).weights
    losses = factor * policy_gradient(logprobs, logprobs.detach(), a, mask).losses
    if k:
        top = sampler.argsort(descending=True)[:k]
        losses = losses + score_centering(
            theta.log_softmax(0)[top].expand(size, 1, k), sampler[top].log().expand(size, 1, k), a, mask, **weight
        )
    return torch.autograd.grad((sampler * losses[:, 0]).sum(), theta)[0]


@pytest.mark.parametrize("weight", WEIGHTS)
def test_with_all_tokens_in_the_head_a_shared_advantage_moves_nothing(weight: dict[str, Any]) -> None:
    assert expected_gradient([1] * 4, THETA, SAMPLER, weight, 0).abs().max() > 0.01
    assert expected_gradient([1] * 4, THETA, SAMPLER, weight, 4).tolist() == close(0, 0, 0, 0, abs=1e-6)


@pytest.mark.parametrize("weight", WEIGHTS)
def test_a_shorter_head_is_exact_when_the_rest_has_one_ratio(weight: dict[str, Any]) -> None:
    # both leave 0.3 and 0.2 to the last two tokens, so the ratio is 1.5 at each of them
    policy, sampler = [0.3, 0.4, 0.15, 0.15], torch.tensor([0.5, 0.3, 0.1, 0.1], dtype=torch.float64)
    theta = torch.tensor(policy, dtype=torch.float64).log()
    assert expected_gradient([1] * 4, theta, sampler, weight, 2).tolist() == close(0, 0, 0, 0, abs=1e-9)


def test_the_term_of_a_head_of_one_token() -> None:
    # pi = 0.5, mu = 0.8, f = 1: rho = 0.2 / 0.5 = 0.4 = alpha; (0.8 - 0.4 * 0.5) * ln 0.5 = -0.41589; times A = 2.
    # With f = min(x, 1): f(pi / mu) = 0.625, 1 / rho = 2.5 capped at 1, alpha = 0.4: (0.5 - 0.2) * ln 0.5 = -0.20794
    pi, mu = rows([0.5])[..., None].log(), rows([0.8])[..., None].log()
    mask = torch.tensor([[True]])
    assert score_centering(pi, mu, rows([2]), mask, mode=None).tolist() == [close(-0.83178)]
    assert score_centering(pi, mu, rows([2]), mask, mode="trunc", high=1.0).tolist() == [close(-0.41589)]
    assert score_centering(pi, mu, rows([2]), ~mask, mode=None).tolist() == [[0]]


def test_no_gradient_flows_through_the_weights_of_the_head() -> None:
    # d/d log pi of sg[0.6] log pi
    pi = rows([0.5])[..., None].log().requires_grad_()
    loss = score_centering(pi, rows([0.8])[..., None].log(), rows([1]), torch.tensor([[True]]), mode=None)
    assert torch.autograd.grad(loss.sum(), pi)[0].item() == pytest.approx(0.6)


def test_a_head_may_be_filled_up() -> None:
    pi, mu = rows([0.5, 0.2]).log()[None], rows([0.8, 0.0]).log()[None]
    mask = torch.tensor([[True]])
    short = score_centering(pi[..., :1], mu[..., :1], rows([1]), mask, mode=None)
    assert torch.equal(score_centering(pi, mu, rows([1]), mask, mode=None), short)


def test_centering_of_an_unknown_correction_is_refused() -> None:
    with pytest.raises(ValueError, match="no correction is called 'geo'"):
        score_centering(torch.zeros(1, 1, 1), torch.zeros(1, 1, 1), rows([1]), torch.tensor([[True]]), mode="geo")


def head(draw: st.DataObject, elements: st.SearchStrategy[float]) -> torch.Tensor:
    return torch.from_numpy(draw.draw(hnp.arrays("float32", (*SHAPE, 3), elements=elements)))


@settings(deadline=None)
@given(
    draw=st.data(),
    mask=arrays(st.booleans(), "bool"),
    advantages=arrays(st.floats(-10, 10, width=32)),
    other=st.sampled_from([math.nan, math.inf, -math.inf, 5.0]),
    weight=st.sampled_from(WEIGHTS),
)
def test_centering_is_finite_and_masked_positions_have_no_influence(
    draw: st.DataObject, mask: torch.Tensor, advantages: torch.Tensor, other: float, weight: dict[str, Any]
) -> None:
    policy, rollout = head(draw, LOGPROBS), head(draw, LOGPROBS | st.just(math.nan))

    def result(policy: torch.Tensor, rollout: torch.Tensor, advantages: torch.Tensor) -> list[torch.Tensor]:
        policy = policy.clone().requires_grad_()
        term = score_centering(policy, rollout, advantages, mask, **weight)
        return [term.detach(), *torch.autograd.grad(term.sum(), policy)]

    expected = result(policy, rollout, advantages)
    assert all(tensor.isfinite().all() and not tensor[~mask].any() for tensor in expected)
    wide = mask[..., None]
    dirty = result(
        torch.where(wide, policy, other), torch.where(wide, rollout, other), torch.where(mask, advantages, other)
    )
    for found, wanted in zip(dirty, expected, strict=True):
        torch.testing.assert_close(found, wanted, rtol=0, atol=0)


@settings(deadline=None)
@given(
    mu=hnp.arrays("float64", SHAPE, elements=st.floats(1e-3, 1)),
    pi=hnp.arrays("float64", SHAPE, elements=st.floats(1e-3, 1)),
)
def test_statistics_agree_with_numpy(mu: np.ndarray, pi: np.ndarray) -> None:
    policy, rollout, mask = torch.from_numpy(np.log(pi)), torch.from_numpy(np.log(mu)), torch.ones(SHAPE).bool()
    a, b = np.clip(mu, 1e-6, 1 - 1e-6), np.clip(pi, 1e-6, 1 - 1e-6)
    binary_kl = a * np.log(a / b) + (1 - a) * np.log((1 - a) / (1 - b))
    by_token = {"ratio": pi / mu, "binary_kl": binary_kl, "tv": np.abs(mu - pi)}
    for gate, expected in by_token.items():
        np.testing.assert_allclose(measured(policy, rollout, mask, "token", gate), expected, rtol=1e-6, atol=1e-9)
    by_row = {
        ("seq", "ratio"): (pi / mu).prod(1),
        ("geo", "ratio"): (pi / mu).prod(1) ** (1 / 4),
        ("seq", "binary_kl"): binary_kl.mean(1),
        ("seq", "tv"): np.abs(mu - pi).mean(1),
    }
    for (level, gate), expected in by_row.items():
        found = measured(policy, rollout, mask, level, gate)
        np.testing.assert_allclose(found, np.repeat(expected[:, None], 4, 1), rtol=1e-6, atol=1e-9)
