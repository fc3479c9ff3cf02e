"""Importance correction between the engine that sampled and the trainer, and the measure of their mismatch.

mu is the probability of a token by the engine that sampled it, pi that by the policy in the trainer: with several
optimizer steps a batch, the policy before the first. Weights and gates are detached.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

MAX_LOG_RATIO = 30.0
"""Log-ratios are clamped to this magnitude before the exponential, so that no float overflows."""


def log_ratio(policy_logprobs: torch.Tensor, rollout_logprobs: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """log pi(token) - log mu(token), detached; 0 off the mask, -inf or NaN log-probs clamped. All [batch, seq]."""
    difference = policy_logprobs.detach() - rollout_logprobs
    difference = torch.nan_to_num(difference, nan=MAX_LOG_RATIO, posinf=MAX_LOG_RATIO, neginf=-MAX_LOG_RATIO)
    return difference.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).masked_fill(~mask, 0.0)


LEVELS = ("token", "seq", "geo")
MODES = ("mask", "clip", "trunc")
GATES = ("ratio", "binary_kl", "tv")

MIN_PROBABILITY = 1e-6
"""Probabilities of binary_kl stay this far from 0 and 1, so that no logarithm is infinite."""


class Correction(NamedTuple):
    weights: torch.Tensor  # [rows, seq], what each token's loss is multiplied by; 0 off the mask
    kept: torch.Tensor  # [rows, seq] bool, the trained tokens that no gate took out
    units_kept: torch.Tensor  # 0-d int64, units that were kept: tokens, or rows at levels seq and geo
    units_total: torch.Tensor  # 0-d int64, units with trained tokens


def statistic(
    ratio_log: torch.Tensor,
    policy_logprobs: torch.Tensor,
    rollout_logprobs: torch.Tensor,
    mask: torch.Tensor,
    level: str,
    gate: str,
) -> torch.Tensor:
    """The number that a gate compares with its bounds, all [rows, seq]; every token of a row has the row's at seq, geo.

    `ratio_log` is that of `log_ratio`. By gate:

    - ratio: pi / mu; seq: its product over the row's trained tokens, geo: the geometric mean (GSPO, 2507.18071, eq. 7)
    - binary_kl: mu log(mu / pi) + (1 - mu) log((1 - mu) / (1 - pi)), the divergence seen by who can only tell this
      token from the others; seq: its mean over the row
    - tv: |mu - pi|; seq: its mean over the row

    Always finite; a log-prob that is NaN counts as a divergence of 30. Off the mask it means nothing. ValueError for
    other names, and for a divergence at level geo.
    """
    if level not in LEVELS or gate not in GATES or (level == "geo" and gate != "ratio"):
        raise ValueError(
            f"no statistic of level {level!r} and gate {gate!r}: binary_kl and tv have levels token and seq"
        )
    by_token = ratio_log if gate == "ratio" else _divergence(policy_logprobs.detach(), rollout_logprobs, gate)
    if level != "token":
        total = by_token.double().masked_fill(~mask, 0.0).sum(-1, keepdim=True)
        if gate != "ratio" or level == "geo":
            total = total / mask.sum(-1, keepdim=True).clamp(min=1)
        by_token = total.to(by_token.dtype).expand_as(by_token)
    return by_token.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp() if gate == "ratio" else by_token


def correction(
    ratio_log: torch.Tensor,
    policy_logprobs: torch.Tensor,
    rollout_logprobs: torch.Tensor,
    mask: torch.Tensor,
    *,
    level: str,
    mode: str,
    gate: str,
    low: float = -math.inf,
    high: float,
) -> Correction:
    """What the loss of each token is multiplied by, since another policy (the engine's) sampled it; all [rows, seq].

    - mask: the token's ratio where `statistic` lies in [low, high], else 0 (IcePop, 2510.18855; by row at seq and geo).
    - clip: the ratio within [low, high]. trunc: the ratio, at most `high` (TIS, fengyao.notion.site/off-policy-rl).

    Masked tokens stay in the loss's denominator, so the mask can only shrink a step. ValueError for what has no
    meaning: clip and trunc of anything but the token's ratio, a divergence with a lower bound above 0, other names.
    """
    if mode not in MODES:
        raise ValueError(f"no correction is called {mode!r}; there are {', '.join(MODES)}")
    if mode != "mask" and (level != "token" or gate != "ratio"):
        raise ValueError(f"{mode} bounds the ratio of a token: level token and gate ratio, not {level} and {gate}")
    if gate != "ratio" and low > 0:
        raise ValueError(f"{gate} is 0 where both policies agree: its lower bound cannot be {low}")
    measured = statistic(ratio_log, policy_logprobs, rollout_logprobs, mask, level, gate)
    kept = mask & (measured >= low) & (measured <= high) if mode == "mask" else mask
    weights = ratio_log.exp() if mode == "mask" else _weight(ratio_log.exp(), mode, low, high)
    units_kept, units = (kept, mask) if level == "token" else (kept.any(-1), mask.any(-1))
    return Correction(weights.masked_fill(~kept, 0.0), kept, units_kept.sum(), units.sum())


def score_centering(
    policy_top_logprobs: torch.Tensor,
    rollout_top_logprobs: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    *,
    mode: str | None,
    low: float = -math.inf,
    high: float = math.inf,
) -> torch.Tensor:
    """What is added to the losses so that an advantage that all tokens share moves nothing, [rows, seq].

    The score grad log pi has mean 0 under pi, but not under mu: an advantage A of all tokens drifts by A * E_mu[f(pi /
    mu) grad log pi], f being the weight of the losses. That mean is subtracted: exactly over the head, the engine's k
    most probable tokens [rows, seq, k] (the policy's log-probs of them with gradient), and over the rest as if pi / mu
    were one number there. With rho = max(1 - sum mu, 1e-6) / max(1 - sum pi, 1e-6) and alpha = rho f(1 / rho), since
    the scores of all tokens add up to 0 under pi, the term is A * sum over the head of sg[mu f(pi / mu) - alpha pi] log
    pi.

    `mode` says what the losses are weighted by at level token: None for nothing (f = 1), else as in `correction` with
    the same bounds. A head with fewer than k tokens is filled up with -inf; the term is 0 off the mask. ValueError for
    another mode.
    """
    if mode is not None and mode not in MODES:
        raise ValueError(f"no correction is called {mode!r}; there are {', '.join(MODES)}")
    head = mask[..., None] & (rollout_top_logprobs > -math.inf)
    pi, mu = (torch.where(head, top.detach().exp(), 0.0) for top in (policy_top_logprobs, rollout_top_logprobs))
    ratio = log_ratio(policy_top_logprobs, rollout_top_logprobs, head).exp()
    rho = (1 - mu.sum(-1, keepdim=True)).clamp(min=1e-6) / (1 - pi.sum(-1, keepdim=True)).clamp(min=1e-6)
    scale = mu * _weight(ratio, mode, low, high) - rho * _weight(1 / rho, mode, low, high) * pi
    scored = head & (policy_top_logprobs != -math.inf)
    terms = torch.where(scored, scale * policy_top_logprobs, torch.zeros_like(policy_top_logprobs))
    return torch.where(mask, advantages, 0.0) * terms.sum(-1)


def _weight(ratio: torch.Tensor, mode: str | None, low: float, high: float) -> torch.Tensor:
    if mode is None:
        return torch.ones_like(ratio)
    if mode == "mask":
        return torch.where((ratio >= low) & (ratio <= high), ratio, torch.zeros_like(ratio))
    return ratio.clamp(low, high) if mode == "clip" else ratio.clamp(max=high)


def _divergence(policy_logprobs: torch.Tensor, rollout_logprobs: torch.Tensor, gate: str) -> torch.Tensor:
    mu, pi = rollout_logprobs.exp(), policy_logprobs.exp()
    if gate == "tv":
        divergence = (mu - pi).abs()
    else:
        mu, pi = (x.clamp(MIN_PROBABILITY, 1 - MIN_PROBABILITY) for x in (mu, pi))
        divergence = mu * (mu / pi).log() + (1 - mu) * ((1 - mu) / (1 - pi)).log()
    return torch.nan_to_num(divergence, nan=MAX_LOG_RATIO)


def mismatch_sums(ratio_log: torch.Tensor, mask: torch.Tensor) -> dict[str, torch.Tensor]:
    """Sums over trained tokens of |d| and of exp(d) - 1 - d (k3, an estimate of KL(mu || pi)), d = log pi - log mu."""
    d = ratio_log.double()
    return {"abs": (d.abs() * mask).sum(), "k3": ((d.exp() - 1 - d) * mask).sum()}
