"""Exact expected gradients on a policy of two tokens, every trajectory enumerated, against the policy gradient.

The first token is one of two, the second one of three and drawn from a softmax that depends on the first: two
trajectories of a group are one of 36 pairs, each counted as often as the policy draws it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import pytest
import torch

from stages.algorithms.aggregation import aggregate, row_weights
from stages.algorithms.estimators import ESTIMATORS
from stages.algorithms.kl import kl
from stages.algorithms.losses import LOSSES, PolicyLoss
from stages.algorithms.returns import discounted_returns, gae, token_rewards

TRAJECTORIES = list(itertools.product(range(2), range(3)))
THETA = torch.tensor([0.4, -0.3, 0.2, -0.6, 0.5, 1.0, 0.1, -0.8], dtype=torch.float64)
REWARDS = torch.tensor([1.0, -0.5, 2.0, 0.3, 0.3, -1.2], dtype=torch.float64)
PASSES = torch.tensor([0.0, 1, 0, 0, 0, 1], dtype=torch.float64)

AT_RATIO_1: dict[str, Callable[..., PolicyLoss]] = {
    "policy_gradient": LOSSES["policy_gradient"],
    "ppo": LOSSES["ppo"],
    "cispo": partial(LOSSES["cispo"], high=2.0),
    "gspo": partial(LOSSES["gspo"], clip_low=3e-4, clip_high=4e-4),
}


def logprobs_of(theta: torch.Tensor) -> torch.Tensor:
    """Log-probs of both tokens of every trajectory, [6, 2]."""
    first, second = theta[:2].log_softmax(0), theta[2:].reshape(2, 3).log_softmax(-1)
    return torch.stack([torch.stack([first[a], second[a, b]]) for a, b in TRAJECTORIES])


def analytic(objective: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """Gradient of a function of the six trajectories' probabilities."""
    theta = THETA.clone().requires_grad_()
    return torch.autograd.grad(objective(logprobs_of(theta).sum(-1).exp()), theta)[0]


def policy_gradient_of(rewards: torch.Tensor) -> torch.Tensor:
    return analytic(lambda p: (p * rewards).sum())


def expected(
    draws: Sequence[Sequence[int]],
    advantages: Callable[[torch.Tensor], torch.Tensor],
    loss: Callable[..., PolicyLoss] = AT_RATIO_1["policy_gradient"],
) -> torch.Tensor:
    """Minus the expected gradient of the loss, a mean over rollouts of sums over tokens.

    `draws` are all batches of trajectories; `advantages` turns them, [batches, rollouts], into [batches, rollouts, 1 or
    2 tokens].
    """
    theta = THETA.clone().requires_grad_()
    chosen = torch.tensor(draws)
    num_batches, num_rollouts = chosen.shape
    logprobs = logprobs_of(theta)[chosen]
    probability = logprobs.detach().sum((-1, -2)).exp()
    assert probability.sum().item() == pytest.approx(1)
    rows = logprobs.reshape(-1, 2)
    mask = torch.ones_like(rows, dtype=torch.bool)
    a = advantages(chosen).expand(num_batches, num_rollouts, 2).reshape(-1, 2)
    losses = loss(rows, rows.detach(), a, mask).losses
    # the sum over tokens by sequence, a mean over the sequences of each batch
    weight = row_weights("seq-mean-token-sum-norm", mask.sum(-1), torch.arange(len(rows)), 1) * num_batches
    by_batch = probability.repeat_interleave(num_rollouts)
    return -torch.autograd.grad(aggregate(losses, mask, weight * by_batch), theta)[0]


def groups_of(n: int) -> list[tuple[int, ...]]:
    return list(itertools.product(range(6), repeat=n))


def grouped(type: str, rewards: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
    """Each batch is one group."""

    def advantages(chosen: torch.Tensor) -> torch.Tensor:
        groups = torch.arange(len(chosen))[:, None].expand_as(chosen)
        found = ESTIMATORS[type](rewards[chosen].flatten(), groups.flatten())
        return found.reshape(*chosen.shape, 1)

    return advantages


def assert_equal(found: torch.Tensor, wanted: torch.Tensor, atol: float = 1e-12) -> None:
    assert wanted.abs().max() > 0.01
    torch.testing.assert_close(found, wanted, rtol=0, atol=atol)


# ---- one number by rollout ----


@pytest.mark.parametrize("loss", AT_RATIO_1)
@pytest.mark.parametrize("n", [1, 2])
def test_the_reward_itself_is_unbiased(n: int, loss: str) -> None:
    found = expected(groups_of(n), grouped("reinforce", REWARDS), AT_RATIO_1[loss])
    assert_equal(found, policy_gradient_of(REWARDS))


@pytest.mark.parametrize("loss", AT_RATIO_1)
@pytest.mark.parametrize("n", [2, 3])
def test_rloo_is_unbiased(n: int, loss: str) -> None:
    assert_equal(expected(groups_of(n), grouped("rloo", REWARDS), AT_RATIO_1[loss]), policy_gradient_of(REWARDS))


@pytest.mark.parametrize("loss", AT_RATIO_1)
@pytest.mark.parametrize("type", ["dr_grpo", "reinforce_baseline"])
@pytest.mark.parametrize("n", [2, 3])
def test_the_mean_of_the_group_as_baseline_costs_a_factor(n: int, type: str, loss: str) -> None:
    # a rollout is a share 1/n of its own baseline: E[(r - mean) grad] = (1 - 1/n) E[r grad]
    found = expected(groups_of(n), grouped(type, REWARDS), AT_RATIO_1[loss])
    assert_equal(found, (1 - 1 / n) * policy_gradient_of(REWARDS))


def test_the_mean_of_the_batch_as_baseline_costs_a_factor() -> None:
    # two prompts with rewards of their own, two rollouts each; the batch of four is the baseline: 1 - 1/4
    by_prompt = torch.stack([REWARDS, PASSES])

    def advantages(chosen: torch.Tensor) -> torch.Tensor:
        prompts = torch.tensor([0, 0, 1, 1])
        rewards = by_prompt[prompts, chosen]
        return torch.stack([ESTIMATORS["flash_reinforce"](batch, prompts) for batch in rewards])[..., None]

    wanted = (policy_gradient_of(REWARDS) + policy_gradient_of(PASSES)) / 2
    assert_equal(expected(groups_of(4), advantages), (1 - 1 / 4) * wanted)


def binomial_weight(n: int, p: float, advantage: Callable[[float, int], float]) -> float:
    """Factor of the gradient of the pass rate, k the successes among the other n - 1 rollouts of a group.

    E[success * grad] = grad p and E[failure * grad] = -grad p, so it is the mean over k of a success's advantage among
    k + 1 less a failure's among k. Groups that all passed or all failed have no advantage.
    """
    total = 0.0
    for k in range(n):
        share = math.comb(n - 1, k) * p**k * (1 - p) ** (n - 1 - k)
        total += share * ((advantage(1, k + 1) if k + 1 < n else 0) - (advantage(0, k) if k > 0 else 0))
    return total


@pytest.mark.parametrize("n", [2, 3, 4])
def test_grpo_reweights_the_gradient_by_the_pass_rate(n: int) -> None:
    def advantage(reward: float, successes: int) -> float:
        rewards = np.array([1.0] * successes + [0.0] * (n - successes))
        return float((reward - rewards.mean()) / (rewards.std(ddof=1) + 1e-6))

    p = float((logprobs_of(THETA).sum(-1).exp() * PASSES).sum())
    found = expected(groups_of(n), grouped("grpo", PASSES))
    assert_equal(found, binomial_weight(n, p, advantage) * policy_gradient_of(PASSES))


def test_grpo_with_two_rollouts_is_the_gradient_of_the_pass_rate_over_root_two() -> None:
    # one success and one failure: +-1/2 over a sample std of 1/sqrt(2); (1 - p) / sqrt(2) + p / sqrt(2)
    wanted = policy_gradient_of(PASSES) / math.sqrt(2)
    assert_equal(expected(groups_of(2), grouped("grpo", PASSES)), wanted, atol=1e-6)


def test_grpo_with_two_rollouts_follows_which_one_won_and_not_by_how_much() -> None:
    # +-1/sqrt(2) by the sign of r_1 - r_2: sqrt(2) times the gradient of winning against a fixed copy of itself, a tie
    # counting half
    wins = (REWARDS[:, None] > REWARDS[None, :]).double() + (REWARDS[:, None] == REWARDS[None, :]).double() / 2
    wanted = analytic(lambda p: math.sqrt(2) * p @ wins @ p.detach())
    assert_equal(expected(groups_of(2), grouped("grpo", REWARDS)), wanted, atol=1e-5)


@pytest.mark.parametrize("n", [2, 3, 4])
def test_maxrl_follows_the_log_of_the_pass_rate_cut_after_n_minus_1_terms(n: int) -> None:
    # log p = -sum over k of (1 - p)^k / k
    def cut(p: torch.Tensor) -> torch.Tensor:
        fails = 1 - (p * PASSES).sum()
        return torch.stack([-(fails**k) / k for k in range(1, n)]).sum()

    assert_equal(expected(groups_of(n), grouped("maxrl", PASSES)), analytic(cut))


def test_maxrl_nears_the_gradient_of_the_log_of_the_pass_rate() -> None:
    # the first n - 1 terms are a share 1 - (1 - p)^(n - 1) of the whole gradient, grad p / p
    p = float((logprobs_of(THETA).sum(-1).exp() * PASSES).sum())
    whole = analytic(lambda q: (q * PASSES).sum().log())
    for n in (2, 4):
        assert_equal(expected(groups_of(n), grouped("maxrl", PASSES)), (1 - (1 - p) ** (n - 1)) * whole)
    assert binomial_weight(64, p, lambda r, k: r * 64 / k - 1) * p == pytest.approx(1, abs=1e-3)


# ---- one number by token ----


def by_token(compute: Callable[[int], torch.Tensor]) -> Callable[[torch.Tensor], torch.Tensor]:
    """Advantages of the two tokens of each trajectory, whatever else is in its batch."""
    return lambda chosen: torch.stack([compute(i) for i in range(6)])[chosen]


def outcome(i: int) -> torch.Tensor:
    return token_rewards(float(REWARDS[i]), None, 0.0, num_actions=2)


@pytest.mark.parametrize("loss", AT_RATIO_1)
def test_undiscounted_returns_are_unbiased(loss: str) -> None:
    found = expected(groups_of(1), by_token(lambda i: discounted_returns(outcome(i), 1.0)), AT_RATIO_1[loss])
    assert_equal(found, policy_gradient_of(REWARDS))


def test_a_discount_shrinks_what_the_first_token_learns() -> None:
    found = expected(groups_of(1), by_token(lambda i: discounted_returns(outcome(i), 0.5)))
    scale = torch.tensor([0.5] * 2 + [1.0] * 6, dtype=torch.float64)  # theta of the first token, of the second
    assert_equal(found, scale * policy_gradient_of(REWARDS))


def true_values(i: int) -> torch.Tensor:
    """What the policy's reward will be on average, before the first and before the second token."""
    p, first = logprobs_of(THETA).sum(-1).exp(), TRAJECTORIES[i][0]
    here = torch.tensor([a == first for a, _ in TRAJECTORIES])
    return torch.stack([(p * REWARDS).sum(), (p * REWARDS)[here].sum() / p[here].sum()])


def wrong_values(i: int) -> torch.Tensor:
    return torch.tensor([3.0, [-7.0, 0.5][TRAJECTORIES[i][0]]], dtype=torch.float64)


@pytest.mark.parametrize("loss", AT_RATIO_1)
def test_generalised_advantages_at_lambda_1_are_unbiased_with_any_values(loss: str) -> None:
    found = expected(groups_of(1), by_token(lambda i: gae(outcome(i), wrong_values(i), 1.0, 1.0)[0]), AT_RATIO_1[loss])
    assert_equal(found, policy_gradient_of(REWARDS))


@pytest.mark.parametrize("lam", [0.0, 0.5, 0.95])
def test_generalised_advantages_are_unbiased_at_any_lambda_with_the_true_values(lam: float) -> None:
    found = expected(groups_of(1), by_token(lambda i: gae(outcome(i), true_values(i), 1.0, lam)[0]))
    assert_equal(found, policy_gradient_of(REWARDS))


def test_generalised_advantages_are_biased_by_wrong_values_below_lambda_1() -> None:
    found = expected(groups_of(1), by_token(lambda i: gae(outcome(i), wrong_values(i), 1.0, 0.5)[0]))
    assert (found - policy_gradient_of(REWARDS)).abs().max() > 0.01


COEF = 0.3
REFERENCE = torch.linspace(-1, 1, 8, dtype=torch.float64)


def penalised(kind: str) -> torch.Tensor:
    penalties = kl(logprobs_of(THETA), logprobs_of(REFERENCE), kind)
    return expected(
        groups_of(1), by_token(lambda i: discounted_returns(token_rewards(float(REWARDS[i]), penalties[i], COEF), 1.0))
    )


def gradient_of_reward_less_kl() -> torch.Tensor:
    return analytic(lambda p: (p * (REWARDS - COEF * (p.log() - logprobs_of(REFERENCE).sum(-1)))).sum())


def test_k1_in_the_reward_gives_the_gradient_of_reward_less_kl() -> None:
    assert_equal(penalised("k1"), gradient_of_reward_less_kl())


def test_k3_in_the_reward_takes_the_kl_of_the_reference_from_the_penalty() -> None:
    # E[(exp(-d) - 1) grad log p] = -grad KL(reference || policy) at each token, given those before it
    theta = THETA.clone().requires_grad_()
    first, second = theta[:2].log_softmax(0), theta[2:].reshape(2, 3).log_softmax(-1)
    q_first, q_second = REFERENCE[:2].softmax(0), REFERENCE[2:].reshape(2, 3).softmax(-1)
    others = -(q_first * first).sum() - (first.detach().exp()[:, None] * q_second * second).sum()
    bias = COEF * torch.autograd.grad(others, theta)[0]
    assert_equal(penalised("k3"), gradient_of_reward_less_kl() + bias)


# ---- several ----


def test_a_mean_over_tokens_of_rollouts_of_equal_length_is_a_factor_of_its_own() -> None:
    # token-mean divides by the tokens, two a rollout
    theta = THETA.clone().requires_grad_()
    logprobs = logprobs_of(theta)
    mask = torch.ones(6, 2, dtype=torch.bool)
    p = logprobs.detach().sum(-1).exp()
    losses = LOSSES["policy_gradient"](logprobs, logprobs.detach(), REWARDS[:, None].expand(6, 2), mask).losses
    weight = row_weights("token-mean", mask.sum(-1), torch.arange(6), 1) * 6
    found = -torch.autograd.grad(aggregate(losses, mask, weight * p), theta)[0]
    assert_equal(found, policy_gradient_of(REWARDS) / 2)
