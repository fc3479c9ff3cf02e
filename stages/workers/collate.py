"""Rows of the store as padded tensors: what one forward-backward sees."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from stages.algorithms.masks import ActionMask
from stages.algorithms.objective import Microbatch


@dataclass
class TrainRow:
    """One segment ready to train. `advantages` and `old_logprobs` [tokens] are filled in by the rank that trains it."""

    token_ids: Sequence[int]
    rollout_logprobs: Sequence[float]
    temperatures: torch.Tensor  # [tokens], those that the tokens were sampled at
    mask: ActionMask
    outcome: float
    """What the estimator made of the rollout's reward: the advantage, or what is spread over the tokens."""
    advantages: torch.Tensor | None = None
    old_logprobs: torch.Tensor | None = None
    reference_logprobs: torch.Tensor | None = None  # [tokens], 0 where not sampled
    weight: float = 0.0
    """Weight of each trained token in the loss of its optimizer step."""


def collate(rows: Sequence[TrainRow], device: torch.device) -> Microbatch:
    """Without rows: a microbatch of weight zero, for a rank that must join a collective and has nothing to train."""
    longest = max((len(row.token_ids) for row in rows), default=2)
    count = max(len(rows), 1)
    attention_mask = torch.ones(count, longest, dtype=torch.int64)
    for index, row in enumerate(rows):
        attention_mask[index, len(row.token_ids) :] = 0

    def padded(
        values: Sequence[Sequence[float] | torch.Tensor], dtype: torch.dtype, padding: float = 0
    ) -> torch.Tensor:
        tensor = torch.full((count, longest), padding, dtype=dtype)
        for index, value in enumerate(values):
            tensor[index, : len(value)] = torch.as_tensor(value, dtype=dtype)
        return tensor.to(device)

    advantages = [row.advantages for row in rows if row.advantages is not None]
    old_logprobs = [row.old_logprobs for row in rows if row.old_logprobs is not None]
    reference_logprobs = [row.reference_logprobs for row in rows if row.reference_logprobs is not None]
    weights = [row.weight for row in rows] or [0.0]
    return Microbatch(
        token_ids=padded([row.token_ids for row in rows], torch.int64),
        attention_mask=attention_mask.to(device),
        sampled=padded([row.mask.sampled for row in rows], torch.bool),
        trained=padded([row.mask.trained for row in rows], torch.bool),
        rollout_logprobs=padded([row.rollout_logprobs for row in rows], torch.float32),
        temperatures=padded([row.temperatures for row in rows], torch.float32, 1.0),
        advantages=padded(advantages, torch.float32),
        row_weights=torch.tensor(weights, dtype=torch.float64, device=device),
        old_logprobs=padded(old_logprobs, torch.float32) if old_logprobs else None,
        reference_logprobs=padded(reference_logprobs, torch.float32) if reference_logprobs else None,
    )
