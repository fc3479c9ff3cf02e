"""Rows of the store as padded tensors: what one forward-backward sees."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from stages.algorithms.masks import ActionMask


@dataclass(frozen=True)
class TrainRow:
    """One segment ready to train: all sampled tokens share `advantage`."""

    token_ids: Sequence[int]
    rollout_logprobs: Sequence[float]
    temperatures: torch.Tensor  # [tokens], those that the tokens were sampled at
    mask: ActionMask
    advantage: float


@dataclass(frozen=True)
class Microbatch:
    """Right-padded to the longest row. All tensors are [rows, seq]; `advantages` are broadcast over each row."""

    token_ids: torch.Tensor
    attention_mask: torch.Tensor
    trained: torch.Tensor
    rollout_logprobs: torch.Tensor
    temperatures: torch.Tensor
    advantages: torch.Tensor


def collate(rows: Sequence[TrainRow], device: torch.device) -> Microbatch:
    """Without rows: a microbatch of weight zero, for a rank that must join a collective and has nothing to train."""
    longest = max((len(row.token_ids) for row in rows), default=2)
    count = max(len(rows), 1)
    token_ids = torch.zeros(count, longest, dtype=torch.int64)
    attention_mask = torch.ones(count, longest, dtype=torch.int64)
    trained = torch.zeros(count, longest, dtype=torch.bool)
    rollout_logprobs = torch.zeros(count, longest)
    temperatures = torch.ones(count, longest)
    advantages = torch.zeros(count, longest)
    for index, row in enumerate(rows):
        length = len(row.token_ids)
        token_ids[index, :length] = torch.as_tensor(row.token_ids)
        attention_mask[index, length:] = 0
        trained[index, :length] = row.mask.trained
        rollout_logprobs[index, :length] = torch.as_tensor(row.rollout_logprobs, dtype=torch.float32)
        temperatures[index, :length] = row.temperatures
        advantages[index] = row.advantage
    tensors = (token_ids, attention_mask, trained, rollout_logprobs, temperatures, advantages)
    return Microbatch(*(tensor.to(device) for tensor in tensors))
