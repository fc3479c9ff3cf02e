"""Aggregation: the weights of an optimizer step's rows, and that no split of the step changes its gradient."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stages.algorithms.aggregation import KINDS, aggregate, row_weights
from stages.algorithms.losses import policy_gradient

LOSSES = torch.tensor([[1.0, 2, 30], [4, 50, 6]], dtype=torch.float64)
MASK = torch.tensor([[True, True, False], [True, False, True]])


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values)


def weights(kind: str, *counts: int, groups: tuple[int, ...] | None = None, max_tokens: int = 1) -> list[float]:
    return row_weights(kind, ints(*counts), ints(*(groups or range(len(counts)))), max_tokens).tolist()


@pytest.mark.parametrize(
    ("kind", "max_tokens", "expected"),
    [
        ("token-mean", 1, 3.25),  # (1 + 2 + 4 + 6) / 4
        ("seq-mean-token-mean", 1, 3.25),  # ((1 + 2) / 2 + (4 + 6) / 2) / 2
        ("seq-mean-token-sum-norm", 1, 6.5),  # (3 + 10) / 2, the plain sequence mean of token sums
        ("seq-mean-token-sum-norm", 3, 2.16667),  # and by Dr. GRPO's constant, 6.5 / 3
        ("prompt-mean-token-mean", 1, 3.25),  # both rows are groups of their own
    ],
)
def test_the_ways_of_averaging(kind: str, max_tokens: int, expected: float) -> None:
    weight = row_weights(kind, MASK.sum(-1), ints(0, 1), max_tokens)
    assert aggregate(LOSSES, MASK, weight).item() == pytest.approx(expected, abs=1e-5)


def test_weights_of_rows_of_one_and_three_tokens() -> None:
    assert weights("token-mean", 1, 3) == [1 / 4, 1 / 4]
    assert weights("seq-mean-token-mean", 1, 3) == [1 / 2, pytest.approx(1 / 6)]
    assert weights("seq-mean-token-sum-norm", 1, 3, max_tokens=8) == [1 / 16, 1 / 16]
    # groups of 1 + 3 and of 2 tokens, two groups
    assert weights("prompt-mean-token-mean", 1, 3, 2, groups=(7, 7, 5)) == [1 / 8, 1 / 8, 1 / 4]


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_without_trained_tokens_counts_nowhere(kind: str) -> None:
    with_it = weights(kind, 1, 0, 3, groups=(0, 1, 2), max_tokens=8)
    without = weights(kind, 1, 3, groups=(0, 2), max_tokens=8)
    assert with_it == [without[0], 0, without[1]]


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_without_trained_tokens_has_loss_0_and_a_gradient_of_zeros(kind: str) -> None:
    logprobs = torch.full((2, 3), -1.0, requires_grad=True)
    mask = torch.zeros(2, 3, dtype=torch.bool)
    losses = policy_gradient(logprobs, logprobs.detach(), torch.ones(2, 3), mask).losses
    loss = aggregate(losses, mask, row_weights(kind, mask.sum(-1), ints(0, 1), 8))
    loss.backward()
    assert loss.item() == 0 and logprobs.grad is not None and not logprobs.grad.any()
    assert row_weights(kind, ints(), ints(), 8).tolist() == []


def test_the_denominator_is_that_of_the_step_and_not_of_a_microbatch() -> None:
    # lengths 1 and 3, losses (4; 0, 0, 0): 4 / 4 = 1.0; a mean of microbatch means would be (4 + 0) / 2 = 2.0
    losses, mask = torch.tensor([[4.0, 0, 0], [0, 0, 0]]), torch.tensor([[True, False, False], [True, True, True]])
    weight = row_weights("token-mean", mask.sum(-1), ints(0, 1), 1)
    assert [aggregate(losses[[i]], mask[[i]], weight[[i]]).item() for i in range(2)] == [1.0, 0.0]


def test_metrics_weigh_tokens_and_not_ranks() -> None:
    # 1 token of value 1 on one rank, 9 of value 0 on the other: 1 / 10, not (1 + 0) / 2
    weight = row_weights("token-mean", ints(1, 9), ints(0, 1), 1)
    values, mask = torch.tensor([[1.0] + [5.0] * 8, [0.0] * 9]), torch.ones(2, 9, dtype=torch.bool)
    mask[0, 1:] = False
    by_rank = [aggregate(values[[i]], mask[[i]], weight[[i]]).item() for i in range(2)]
    assert sum(by_rank) == pytest.approx(0.1)


def test_a_batch_that_filtering_left_short_has_the_denominator_of_what_is_left() -> None:
    assert weights("seq-mean-token-mean", 2, 2) == [1 / 4, 1 / 4]
    assert weights("seq-mean-token-mean", 2) == [1 / 2]


def test_what_cannot_be_averaged_is_refused() -> None:
    with pytest.raises(ValueError, match="no aggregation is called 'mean'; there are token-mean"):
        weights("mean", 1)
    with pytest.raises(ValueError, match="divides by max_tokens, which is 0"):
        weights("seq-mean-token-sum-norm", 1, max_tokens=0)


def in_numpy(kind: str, losses: np.ndarray, mask: np.ndarray, groups: np.ndarray, max_tokens: int) -> float:
    """An independent computation over the whole step."""
    sums, counts = [row[m].sum() for row, m in zip(losses, mask, strict=True)], mask.sum(1)
    trained = [i for i, count in enumerate(counts) if count]
    if not trained:
        return 0.0
    if kind == "token-mean":
        return float(losses[mask].mean())
    if kind == "seq-mean-token-mean":
        return float(np.mean([sums[i] / counts[i] for i in trained]))
    if kind == "seq-mean-token-sum-norm":
        return float(np.mean([sums[i] / max_tokens for i in trained]))
    return float(np.mean([losses[groups == g][mask[groups == g]].mean() for g in {groups[i] for i in trained}]))


@pytest.mark.parametrize("kind", KINDS)
@settings(deadline=None)
@given(
    seed=st.integers(0, 1000),
    num_rows=st.integers(1, 8),
    num_microbatches=st.sampled_from([1, 2, 4]),
    num_ranks=st.sampled_from([1, 2]),
    trained_share=st.sampled_from([0.0, 0.3, 1.0]),
)
def test_no_split_into_microbatches_and_ranks_changes_loss_or_gradient(
    kind: str, seed: int, num_rows: int, num_microbatches: int, num_ranks: int, trained_share: float
) -> None:
    random = np.random.default_rng(seed)
    logprobs, advantages = -random.random((num_rows, 5)), random.normal(size=(num_rows, 5))
    mask, groups = random.random((num_rows, 5)) < trained_share, random.integers(0, 3, num_rows)
    shares = random.integers(0, num_microbatches * num_ranks, num_rows)  # microbatches of any size, also none
    weight = row_weights(kind, torch.from_numpy(mask.sum(1)), torch.from_numpy(groups), 7)
    policy = torch.from_numpy(logprobs).requires_grad_()
    total, by_rank = 0.0, [torch.zeros(num_rows, 5, dtype=torch.float64) for _ in range(num_ranks)]
    for share in range(num_microbatches * num_ranks):
        rows = torch.from_numpy(np.flatnonzero(shares == share))
        part = torch.from_numpy(np.where(mask, advantages, math.nan))[rows]
        m = torch.from_numpy(mask)[rows]
        loss = aggregate(policy_gradient(policy[rows], policy[rows].detach(), part, m).losses, m, weight[rows])
        total += loss.item()
        # FSDP averages over ranks, so each rank multiplies by their number
        by_rank[share % num_ranks] += torch.autograd.grad(loss * num_ranks, policy)[0]
    gradient = torch.stack(by_rank).mean(0)
    assert total == pytest.approx(in_numpy(kind, -advantages * logprobs, mask, groups, 7), abs=1e-12)
    expected = torch.autograd.grad(
        aggregate(-torch.from_numpy(advantages) * policy, torch.from_numpy(mask), weight), policy
    )[0]
    torch.testing.assert_close(gradient, expected, rtol=0, atol=1e-12)
