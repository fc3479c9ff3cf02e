"""Masks, log-probs, correction, losses, aggregation: from stored spans to the gradient of one optimizer step."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from schemas.algorithms import CorrectionConfig, KLConfig, PolicyGradientLoss
from stages.algorithms.correction import MAX_LOG_RATIO, log_ratio, mismatch_sums
from stages.algorithms.logprobs import token_scores
from stages.algorithms.masks import action_mask
from stages.algorithms.objective import Microbatch, Objective
from tests.tensors import TRUE, close, rows


def step_loss(
    policy: torch.Tensor,
    rollout: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    denominator: float,
    level: str = "token",
    low: float = 0.5,
    high: float = 5.0,
) -> torch.Tensor:
    """The loss of one microbatch as the trainer puts it together."""
    correction = CorrectionConfig.model_construct(level=level, low=low, high=high)  # also bands without 1
    row_weights = torch.full((len(mask),), 1 / max(denominator, 1), dtype=torch.float64)
    unused = torch.zeros(mask.shape)
    batch = Microbatch(unused, unused, mask, mask, rollout, unused, advantages, row_weights)
    loss, _ = Objective(PolicyGradientLoss(), correction, KLConfig())(batch, policy, None, 0.0)
    return loss


# ---- which tokens are trained ----


def test_a_token_is_trained_when_the_policy_sampled_it_within_the_bound() -> None:
    # trainer at version 6, L = 3: versions 2, 4 and 6 lag 4, 2 and 0; 2 + 2 + 8 sampled tokens after a prompt of 1
    spans = [
        {"start": 1, "end": 3, "turn": 0, "version": 2},
        {"start": 3, "end": 5, "turn": 0, "version": 4},
        {"start": 5, "end": 13, "turn": 0, "version": 6},
    ]
    mask = action_mask(spans, 13, version=6, max_policy_lag=3)
    assert mask.sampled.tolist() == [False] + [True] * 12
    assert mask.lag.tolist() == [0] + [4, 4, 2, 2] + [0] * 8
    assert mask.trained.tolist() == [False] * 3 + [True] * 10


def test_a_finished_rollout_that_waited_five_batches_lags_five() -> None:
    mask = action_mask([{"start": 0, "end": 1, "version": 2}], 1, version=7, max_policy_lag=5)
    assert mask.lag.tolist() == [5] and mask.trained.tolist() == [True]
    assert action_mask([{"start": 0, "end": 1, "version": 1}], 1, version=7, max_policy_lag=5).trained.tolist() == [
        False
    ]


def test_context_between_turns_is_not_trained() -> None:
    spans = [{"start": 2, "end": 4, "version": 0}, {"start": 6, "end": 7, "version": 0}]
    mask = action_mask(spans, 8, version=0, max_policy_lag=0)
    assert mask.trained.int().tolist() == [0, 0, 1, 1, 0, 0, 1, 0]


@pytest.mark.parametrize(
    ("span", "error"),
    [
        ({"start": 3, "end": 6, "version": 0}, "outside a segment of 5 tokens"),
        ({"start": -1, "end": 2, "version": 0}, "outside"),
        ({"start": 0, "end": 2, "version": 3}, "newer policy than the trainer's version 2"),
    ],
)
def test_a_span_that_cannot_be_is_refused(span: dict[str, int], error: str) -> None:
    with pytest.raises(ValueError, match=error):
        action_mask([span], 5, version=2, max_policy_lag=1)


def test_a_token_that_two_spans_claim_is_refused() -> None:
    spans = [{"start": 0, "end": 3, "version": 1}, {"start": 2, "end": 4, "version": 0}]
    with pytest.raises(ValueError, match="starts before the one ahead of it ends, at 3"):
        action_mask(spans, 4, version=1, max_policy_lag=0)


@settings(deadline=None)
@given(
    spans=st.lists(st.tuples(st.integers(0, 5), st.integers(0, 9)), max_size=6),
    version=st.integers(9, 12),
    max_policy_lag=st.integers(0, 12),
)
def test_no_token_past_the_bound_is_ever_trained(
    spans: list[tuple[int, int]], version: int, max_policy_lag: int
) -> None:
    stored, versions = [], []
    for length, sampled_by in spans:  # a token of context before each span
        stored.append({"start": len(versions) + 1, "end": len(versions) + 1 + length, "version": sampled_by})
        versions += [None] + [sampled_by] * length
    mask = action_mask(stored, len(versions), version, max_policy_lag)
    assert mask.trained.tolist() == [v is not None and version - v <= max_policy_lag for v in versions]


# ---- correction ----

PREVIOUS = rows([-1, -1, -1])


def test_icepop_zeroes_what_lies_outside_its_band() -> None:
    # ratios exp(-0.5) = 0.6065, exp(2.5) = 12.18, exp(-0.2) = 0.8187; the band is [0.5, 5]
    policy = PREVIOUS.clone().requires_grad_()
    loss = step_loss(policy, rows([-0.5, -3.5, -0.8]), rows([1, -1, 2]), TRUE, denominator=3)
    (gradient,) = torch.autograd.grad(loss, policy)
    # -w A / 3: the masked token stays in the denominator. Their sum is what a loss with the ratio written out would be.
    assert gradient[0].tolist() == close(-0.6065 * 1 / 3, 0, -0.8187 * 2 / 3)
    assert gradient.sum().item() == pytest.approx(-0.74800, abs=1e-4)


def test_off_weighs_every_token_alike() -> None:
    # ratios exp(2) and exp(-3) would be 7.4 and 0.05
    loss = step_loss(PREVIOUS, rows([-3, -1, 2]), rows([1, -1, 2]), TRUE, denominator=3, level="off")
    assert loss.item() == pytest.approx((1 - 1 + 2) / 3)


def test_no_gradient_flows_through_the_weights() -> None:
    policy = PREVIOUS.clone().requires_grad_()
    assert not log_ratio(policy, PREVIOUS, TRUE).requires_grad


def test_mismatch_is_measured_over_trained_tokens() -> None:
    # d = log pi - log mu = 0.5, -0.5 and, off the mask, 3; k3 = exp(d) - 1 - d: 0.14872 and 0.10653
    mask = torch.tensor([[True, True, False]])
    sums = mismatch_sums(log_ratio(rows([-1, -2, 0]), rows([-1.5, -1.5, -3]), mask), mask)
    assert sums["abs"].item() == pytest.approx(1.0)
    assert sums["k3"].item() == pytest.approx(0.14872 + 0.10653, abs=1e-5)


@pytest.mark.parametrize(("policy", "rollout"), [(-1.0, -math.inf), (-1.0, math.nan), (-math.inf, -math.inf)])
def test_a_logprob_that_is_no_number_counts_as_the_largest_mismatch(policy: float, rollout: float) -> None:
    ratio = log_ratio(rows([policy]), rows([rollout]), torch.tensor([[True]]))
    assert ratio.tolist() == [[MAX_LOG_RATIO]]
    assert step_loss(rows([policy]), rows([rollout]), rows([1]), torch.tensor([[True]]), denominator=1).item() == 0


# ---- loss and aggregation ----


LENGTHS_1_3 = torch.tensor([[True, False, False], [True, True, True]])


def test_the_denominator_is_that_of_the_whole_step_and_not_of_a_microbatch() -> None:
    # rows of 1 and 3 tokens, losses (4; 0, 0, 0): 4 / 4 = 1.0; a mean of microbatch means would give (4 + 0) / 2 = 2.0
    logprobs, ones = rows([-4, 0, 0], [0, 0, 0]), rows([1, 1, 1], [1, 1, 1])
    assert step_loss(logprobs, logprobs, ones, LENGTHS_1_3, 4).item() == 1.0
    parts = [slice(0, 1), slice(1, 2)]
    one_by_one = [step_loss(logprobs[p], logprobs[p], ones[p], LENGTHS_1_3[p], 4).item() for p in parts]
    assert one_by_one == [1.0, 0.0]


@pytest.mark.parametrize("num_microbatches", [1, 2, 4])
def test_the_gradient_is_the_same_in_1_2_or_4_microbatches(num_microbatches: int) -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(5, 7, generator=generator, dtype=torch.float64, requires_grad=True)  # a one-matrix "model"
    inputs = torch.randn(4, 6, 5, generator=generator, dtype=torch.float64)
    token_ids = torch.randint(0, 7, (4, 6), generator=generator)
    rollout = -torch.rand(4, 6, generator=generator, dtype=torch.float64)
    advantages = torch.randn(4, 1, generator=generator, dtype=torch.float64).expand(4, 6)
    mask = torch.arange(6).expand(4, 6) < torch.tensor([[1], [6], [3], [2]])

    def gradient(pieces: int) -> torch.Tensor:
        losses = []
        for part in torch.arange(4).chunk(pieces):
            logits = (inputs[part] @ weight).flatten(0, 1)
            scores = token_scores(logits, token_ids[part].reshape(-1, 1), torch.ones(logits.shape[0]))
            logprobs = scores.logprobs.reshape(token_ids[part].shape)
            losses.append(
                step_loss(logprobs, rollout[part], advantages[part], mask[part], float(mask.sum()), high=50.0)
            )
        return torch.autograd.grad(torch.stack(losses).sum(), weight)[0]

    assert gradient(1).abs().sum() > 0
    torch.testing.assert_close(gradient(num_microbatches), gradient(1), rtol=0, atol=1e-7)


def test_a_microbatch_without_trained_tokens_gives_zero_loss_and_zero_gradient() -> None:
    policy = PREVIOUS.clone().requires_grad_()
    loss = step_loss(policy, PREVIOUS, rows([1, 1, 1]), ~TRUE, denominator=0)
    (gradient,) = torch.autograd.grad(loss, policy)
    assert loss.item() == 0 and gradient.tolist() == [[0, 0, 0]]


def test_a_token_that_the_correction_masks_adds_nothing_even_if_its_logprob_is_infinite() -> None:
    policy = rows([-1, -math.inf, -1]).requires_grad_()
    loss = step_loss(policy, PREVIOUS, rows([1, 1, 1]), TRUE, denominator=3)
    (gradient,) = torch.autograd.grad(loss, policy)
    assert loss.item() == pytest.approx(2 / 3)
    assert gradient[0].tolist() == close(-1 / 3, 0, -1 / 3)


LOGPROBS = st.floats(-100, 0, width=32) | st.just(-math.inf)
ADVANTAGES = st.floats(-10, 10, width=32)
SHAPE = (2, 4)


def arrays(elements: st.SearchStrategy[Any], dtype: str = "float32") -> st.SearchStrategy[torch.Tensor]:
    return hnp.arrays(dtype, SHAPE, elements=elements).map(torch.from_numpy)


@settings(deadline=None)
@given(
    policy=arrays(LOGPROBS),
    rollout=arrays(LOGPROBS | st.just(math.nan)),
    advantages=arrays(ADVANTAGES),
    mask=arrays(st.booleans(), "bool"),
    ends=st.sampled_from([(0.5, 5.0), (1.0, 1.0), (1e-9, 1e9)]),
)
def test_loss_and_gradient_are_finite_for_any_mask_and_any_logprobs(
    policy: torch.Tensor,
    rollout: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    ends: tuple[float, float],
) -> None:
    policy.requires_grad_()
    loss = step_loss(policy, rollout, advantages, mask, float(mask.sum()), "token", *ends)
    (gradient,) = torch.autograd.grad(loss, policy)
    assert loss.isfinite() and gradient.isfinite().all()
    sums = mismatch_sums(log_ratio(policy, rollout, mask), mask)
    assert all(value.isfinite() for value in sums.values())


@settings(deadline=None)
@given(
    policy=arrays(LOGPROBS),
    rollout=arrays(LOGPROBS),
    advantages=arrays(ADVANTAGES),
    mask=arrays(st.booleans(), "bool"),
    other=arrays(LOGPROBS | st.just(math.nan)),
    level=st.sampled_from(["off", "token"]),
)
def test_masked_positions_never_influence_loss_or_gradient(
    policy: torch.Tensor,
    rollout: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    other: torch.Tensor,
    level: str,
) -> None:
    def result(policy: torch.Tensor, rollout: torch.Tensor, advantages: torch.Tensor) -> list[torch.Tensor]:
        policy = policy.clone().requires_grad_()
        loss = step_loss(policy, rollout, advantages, mask, float(mask.sum()), level)
        return [loss.detach(), *torch.autograd.grad(loss, policy)]

    policy = policy.clamp(min=-100)  # a trained token's own log-prob is finite
    expected = result(policy, rollout, advantages)
    assert not expected[1][~mask].any()
    changed = [torch.where(mask, tensor, other) for tensor in (policy, rollout)]
    changed.append(torch.where(mask, advantages, 3.0))
    for found, wanted in zip(result(*changed), expected, strict=True):
        torch.testing.assert_close(found, wanted, rtol=0, atol=0)


@settings(deadline=None)
@given(logprobs=arrays(st.floats(-100, 0, width=32)), mask=arrays(st.booleans(), "bool"))
def test_a_batch_without_advantage_has_zero_gradient(logprobs: torch.Tensor, mask: torch.Tensor) -> None:
    policy = logprobs.clone().requires_grad_()
    loss = step_loss(policy, logprobs, torch.zeros(SHAPE), mask, float(mask.sum()))
    (gradient,) = torch.autograd.grad(loss, policy)
    assert loss.item() == 0 and not gradient.any()
