"""Policy losses by token: pure functions of log-probs, advantages and the mask of trained tokens, by `loss.type`.

`logprobs` are the policy's and carry the gradient; `old_logprobs` are those of the policy before the step, so in its
first optimizer step every ratio is 1. All are [rows, seq], a row being one segment. Where `mask` is false nothing has
any influence and the loss is 0; how tokens are averaged is `aggregation`'s. A log-prob of -inf never makes a loss or a
gradient infinite; one that is NaN does show, as NaN, where it is trained.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from stages.algorithms.correction import MAX_LOG_RATIO

MIN_LOGPROB = -1e4
"""Log-probs are raised to this before they are subtracted: -inf less -inf is a ratio of 1, not NaN."""


class PolicyLoss(NamedTuple):
    losses: torch.Tensor  # [rows, seq], 0 off the mask
    clipped: torch.Tensor  # [rows, seq] bool, true where a bound on the ratio decides the loss


def ppo(
    logprobs: torch.Tensor,
    old_logprobs: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = None,
) -> PolicyLoss:
    """-min(r A, clamp(r, 1 - clip_low, 1 + clip_high) A), r = pi / pi_old (PPO, 1707.06347, eq. 7).

    Two bounds are DAPO's clip-higher (2503.14476, eq. 10). `dual_clip` c > 1 bounds the loss of a token with A < 0 by
    -c A (1912.09729, eq. 5).
    """
    ratio = _log_ratios(logprobs, old_logprobs, mask).exp()
    return _clipped(ratio, advantages, mask, clip_low, clip_high, dual_clip)


def gspo(
    logprobs: torch.Tensor,
    old_logprobs: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    *,
    clip_low: float,
    clip_high: float,
) -> PolicyLoss:
    """PPO's clip on s_t = sg[s] pi_t / sg[pi_t], s the geometric mean of the row's ratios (2507.18071, 4.3).

    This is GSPO-token, which is GSPO when all tokens of a row share their advantage. The bounds are much narrower than
    PPO's: the paper has 3e-4 and 4e-4.
    """
    num_trained = mask.sum(-1, keepdim=True).clamp(min=1)
    mean = _log_ratios(logprobs, old_logprobs, mask).sum(-1, keepdim=True) / num_trained
    ratio = (mean.detach() + _log_ratios(logprobs, logprobs.detach(), mask)).exp()
    return _clipped(ratio, advantages, mask, clip_low, clip_high, None)


def cispo(
    logprobs: torch.Tensor,
    old_logprobs: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    *,
    high: float,
    low: float | None = None,
) -> PolicyLoss:
    """-sg[clamp(r, low, high)] A log pi: every token keeps its gradient (CISPO, MiniMax-M1, 2506.13585, eq. 4).

    `low` and `high` bound the ratio itself, not its distance from 1; the paper leaves `low` out.
    """
    ratio = _log_ratios(logprobs, old_logprobs, mask).detach().exp()
    bounded = ratio.clamp(min=low, max=high)
    return PolicyLoss(_score_loss(bounded * torch.where(mask, advantages, 0.0), logprobs), (bounded != ratio) & mask)


def policy_gradient(
    logprobs: torch.Tensor, old_logprobs: torch.Tensor, advantages: torch.Tensor, mask: torch.Tensor
) -> PolicyLoss:
    """-A log pi (REINFORCE; Sutton & Barto 13.3), the gradient of `ppo` at a ratio of 1. `old_logprobs` play no part.

    A token without advantage adds nothing, even where its log-prob is infinite.
    """
    losses = _score_loss(torch.where(mask, advantages, 0.0), logprobs)
    return PolicyLoss(losses, torch.zeros_like(mask))


LOSSES: dict[str, Callable[..., PolicyLoss]] = {
    "policy_gradient": policy_gradient,
    "ppo": ppo,
    "cispo": cispo,
    "gspo": gspo,
}


def value_loss(
    values: torch.Tensor, old_values: torch.Tensor, returns: torch.Tensor, mask: torch.Tensor, clip: float | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """0.5 max((V - R)^2, (V_old + clamp(V - V_old, -clip, clip) - R)^2) and where the second is the larger.

    All [rows, seq], `values` with gradient, `old_values` from before the step (OpenAI Baselines' PPO; 2005.12729, 3).
    Without `clip` the plain squared error. 0 and false off the mask.
    """
    values, old_values, returns = (torch.where(mask, tensor, 0.0) for tensor in (values, old_values, returns))
    plain = (values - returns).square() / 2
    if clip is None:
        return plain, torch.zeros_like(mask)
    near = (old_values + (values - old_values).clamp(-clip, clip) - returns).square() / 2
    clipped = near > plain
    return torch.where(clipped, near, plain), clipped


def _log_ratios(logprobs: torch.Tensor, old_logprobs: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    new, old = (torch.where(mask, tensor, 0.0).clamp(min=MIN_LOGPROB) for tensor in (logprobs, old_logprobs))
    return (new - old).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def _clipped(
    ratio: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None,
) -> PolicyLoss:
    advantages = torch.where(mask, advantages, 0.0)
    free, bounded = ratio * advantages, ratio.clamp(1 - clip_low, 1 + clip_high) * advantages
    clipped = bounded < free
    objective = torch.where(clipped, bounded, free)
    if dual_clip is not None:
        floor = dual_clip * advantages
        beneath = (advantages < 0) & (objective < floor)
        objective, clipped = torch.where(beneath, floor, objective), clipped | beneath
    return PolicyLoss(-objective, clipped)


def _score_loss(scale: torch.Tensor, logprobs: torch.Tensor) -> torch.Tensor:
    silent = (scale == 0) | (logprobs == -torch.inf)
    return torch.where(silent, torch.zeros_like(logprobs), -scale * logprobs)
