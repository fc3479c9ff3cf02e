"""Which tokens of a segment are trained. This is where the bound on policy lag is enforced."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch


class ActionMask(NamedTuple):
    sampled: torch.Tensor  # [tokens] bool, true where the policy's own tokens are
    trained: torch.Tensor  # [tokens] bool, the sampled ones whose lag is within the bound
    lag: torch.Tensor  # [tokens] int64, refits between sampling and training; 0 where not sampled


def action_mask(spans: Sequence[Mapping[str, int]], num_tokens: int, version: int, max_policy_lag: int) -> ActionMask:
    """Mask of one segment at trainer version `version`: a token of policy version v has lag `version - v`.

    `spans` have `start`, `end` and `version`, in order. ValueError for one that lies outside [0, num_tokens), overlaps
    the one ahead of it or comes from the future.
    """
    sampled = torch.zeros(num_tokens, dtype=torch.bool)
    lag = torch.zeros(num_tokens, dtype=torch.int64)
    last_end = 0
    for span in spans:
        if not 0 <= span["start"] <= span["end"] <= num_tokens:
            raise ValueError(f"span {dict(span)} lies outside a segment of {num_tokens} tokens")
        if span["start"] < last_end:
            raise ValueError(f"span {dict(span)} starts before the one ahead of it ends, at {last_end}")
        if span["version"] > version:
            raise ValueError(f"span {dict(span)} was sampled by a newer policy than the trainer's version {version}")
        last_end = span["end"]
        sampled[span["start"] : last_end] = True
        lag[span["start"] : last_end] = version - span["version"]
    return ActionMask(sampled, sampled & (lag <= max_policy_lag), lag)
