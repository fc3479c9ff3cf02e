"""From losses by token to one number: every way of averaging is a weight of a row's tokens.

The weights are taken over all rows of an optimizer step, on all ranks, before its first backward. The loss of a step is
then a plain sum, so any split into microbatches and ranks gives the same gradient. A row is one segment.
"""

from __future__ import annotations

import torch

KINDS = ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum-norm", "prompt-mean-token-mean")


def row_weights(kind: str, counts: torch.Tensor, groups: torch.Tensor, max_tokens: int) -> torch.Tensor:
    """Weight of each trained token of a row, counts [rows], groups [rows] int64 -> [rows] float64.

    `counts` are trained tokens by row, over the whole optimizer step, and N their sum; S counts the rows and P the
    groups that have any. A row without trained tokens weighs 0.

    - token-mean: 1 / N (DAPO, 2503.14476, eq. 8)
    - seq-mean-token-mean: 1 / (S * count) (GRPO, 2402.03300, eq. 3)
    - seq-mean-token-sum-norm: 1 / (S * max_tokens), max_tokens a constant of the run (Dr. GRPO, 2503.20783, 3.2)
    - prompt-mean-token-mean: 1 / (P * trained tokens of the row's group)

    ValueError for another kind, and for max_tokens < 1 where it is needed.
    """
    tokens = counts.double()
    trained = tokens > 0
    if kind == "token-mean":
        denominators = tokens.sum().expand_as(tokens)
    elif kind == "seq-mean-token-mean":
        denominators = trained.sum() * tokens
    elif kind == "seq-mean-token-sum-norm":
        if max_tokens < 1:
            raise ValueError(f"seq-mean-token-sum-norm divides by max_tokens, which is {max_tokens}: it has to be >= 1")
        denominators = (trained.sum() * max_tokens).double().expand_as(tokens)
    elif kind == "prompt-mean-token-mean":
        _, index = groups.unique(return_inverse=True)
        by_group = torch.zeros_like(tokens).index_add(0, index, tokens)
        denominators = (by_group > 0).sum() * by_group[index]
    else:
        raise ValueError(f"no aggregation is called {kind!r}; there are {', '.join(KINDS)}")
    return torch.where(trained, 1 / denominators.clamp(min=1), 0.0)


def aggregate(losses: torch.Tensor, mask: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Sum over rows of weight * sum over trained tokens of the loss: losses, mask [rows, seq], weights [rows] -> 0-d.

    Positions off the mask never matter, NaN too.
    """
    return (torch.where(mask, losses, torch.zeros_like(losses)).sum(-1) * weights).sum()
