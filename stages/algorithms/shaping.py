"""Reward shaping: pure functions of one rollout's reward and how the rollout went.

The order is the caller's: components are weighted first, then what the length costs, then the clip.
"""

from __future__ import annotations

import math
from collections.abc import Mapping


def weighted(components: Mapping[str, float | None], weights: Mapping[str, float]) -> float:
    """Sum of weight * component over the names in `weights`; other components are only recorded.

    ValueError naming every weighted component that is missing, None or not finite: it must not count as 0, since a
    grader that failed says nothing of the answer.
    """
    missing = []
    total = 0.0
    for name, weight in weights.items():
        value = components.get(name)
        if value is None or not math.isfinite(value):
            missing.append(f"{name} ({'missing' if name not in components else value})")
        else:
            total += weight * value
    if missing:
        raise ValueError(f"no reward without {', '.join(missing)}; the components are {', '.join(sorted(components))}")
    return total


def overlong_penalty(peak_context_tokens: int, max_tokens: int, buffer: int, factor: float) -> float:
    """What a long rollout adds to its reward, in [-factor, 0] (soft overlong punishment, DAPO, 2503.14476, eq. 13).

    0 up to max_tokens - buffer, then falling linearly to -factor at max_tokens and beyond. `peak_context_tokens` is the
    longest context among the rollout's segments. ValueError unless buffer > 0.
    """
    if buffer <= 0:
        raise ValueError(f"the overlong buffer is {buffer} tokens, it has to be > 0")
    over = min(max(peak_context_tokens - (max_tokens - buffer), 0), buffer)
    return -factor * (over / buffer) if over else 0.0


def stop_properly(reward: float, truncated: bool, coef: float) -> float:
    """The reward of a rollout that has a truncated segment: reward * coef for 0 <= coef <= 1, coef itself below 0.

    A coef within [0, 1] makes a negative reward milder; where that is unwanted, use one below 0. ValueError above 1.
    """
    if coef > 1:
        raise ValueError(f"the coefficient of truncated rollouts is {coef}, it has to be <= 1")
    if not truncated:
        return reward
    return reward * coef if coef >= 0 else coef


def clip(reward: float, low: float, high: float) -> float:
    """The reward within [low, high]."""
    return min(max(reward, low), high)
