"""AdamW and its learning-rate schedules."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch.optim.lr_scheduler import LambdaLR

from schemas.recipe import ConstantSchedule, CosineSchedule, OptimizerConfig


def build_optimizer(
    parameters: Iterable[torch.nn.Parameter], config: OptimizerConfig, max_steps: int
) -> tuple[torch.optim.Optimizer, LambdaLR]:
    """The optimizer and its schedule over `max_steps` optimizer steps."""
    optimizer = torch.optim.AdamW(
        parameters, lr=config.lr, betas=config.betas, eps=config.eps, weight_decay=config.weight_decay, foreach=False
    )
    return optimizer, LambdaLR(optimizer, lambda step: learning_rate_share(config.schedule, step, max_steps))


def learning_rate_share(schedule: ConstantSchedule | CosineSchedule, step: int, max_steps: int) -> float:
    """Learning rate of 0-based optimizer step `step` as a share of the peak. Warm-up ends at the peak and skips 0."""
    if step < schedule.warmup_steps:
        return (step + 1) / schedule.warmup_steps
    if isinstance(schedule, ConstantSchedule):
        return 1.0
    progress = min(1.0, (step - schedule.warmup_steps) / max(1, max_steps - schedule.warmup_steps))
    return schedule.floor + (1 - schedule.floor) * 0.5 * (1 + math.cos(math.pi * progress))
