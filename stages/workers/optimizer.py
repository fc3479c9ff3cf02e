"""The optimizer of a model and the schedule of its learning rate, by optimizer step."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.optim.lr_scheduler import LambdaLR

from schemas.errors import RecipeError
from schemas.optimizer import ConstantSchedule, MuonOptimizer, OptimizerConfig, ScheduleConfig, WSDSchedule
from stages.workers.muon import Muon


def build_optimizer(
    model: torch.nn.Module, config: OptimizerConfig, num_steps: int
) -> tuple[torch.optim.Optimizer, LambdaLR]:
    """The optimizer of the model's trainable weights and its schedule over `num_steps` optimizer steps.

    RecipeError for a weight that the optimizer has no rule for.
    """
    weights = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
    optimizer: torch.optim.Optimizer
    if isinstance(config, MuonOptimizer):
        optimizer = Muon(*_split(model, weights), config)
    else:
        optimizer = torch.optim.AdamW(
            weights.values(),
            lr=config.lr,
            betas=config.betas,
            eps=config.eps,
            weight_decay=config.weight_decay,
            foreach=False,
        )
    if config.offload:
        _keep_in_host_memory(optimizer)
    return optimizer, LambdaLR(optimizer, lambda step: learning_rate_share(config.schedule, step, num_steps))


def learning_rate_share(schedule: ScheduleConfig, step: int, num_steps: int) -> float:
    """Learning rate of 0-based optimizer step `step` of `num_steps` as a share of the peak. Warm-up ends at the peak
    and skips 0. WSD: MiniCPM, arXiv 2404.06395; its `sqrt` shape: arXiv 2405.18392."""
    if step < schedule.warmup_steps:
        return (step + 1) / schedule.warmup_steps
    if isinstance(schedule, ConstantSchedule):
        return 1.0
    start, shape = float(schedule.warmup_steps), str(schedule.type)
    if isinstance(schedule, WSDSchedule):
        start, shape = max(start, num_steps * (1 - schedule.decay_share)), schedule.shape
    progress = min(1.0, max(0.0, step - start) / max(1.0, num_steps - start))
    left = {
        "linear": 1 - progress,
        "cosine": 0.5 * (1 + math.cos(math.pi * progress)),
        "sqrt": 1 - math.sqrt(progress),
    }[shape]
    return schedule.floor + (1 - schedule.floor) * left


def _split(model: torch.nn.Module, weights: dict[str, torch.Tensor]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """The matrices between embedding and head, and all else."""
    from nemo_automodel.components.utils.model_utils import get_lm_head_module

    ends = [module for module in model.modules() if isinstance(module, torch.nn.Embedding)]
    outer = {id(weight) for module in (*ends, get_lm_head_module(model)) if module for weight in module.parameters()}
    matrices: list[torch.Tensor] = []
    others: list[torch.Tensor] = []
    for name, weight in weights.items():
        if weight.ndim > 2:
            raise RecipeError(
                f"trainer.optimizer.type: found muon with {name} of shape {list(weight.shape)}; allowed: adamw "
                "(muon has rules for matrices and vectors alone)"
            )
        (matrices if weight.ndim == 2 and id(weight) not in outer else others).append(weight)
    return matrices, others


def _keep_in_host_memory(optimizer: torch.optim.Optimizer) -> None:
    """Moves the state to its weights for a step, and back; scalars stay where the optimizer put them."""

    def move(to_host: bool) -> None:
        for weight, state in optimizer.state.items():
            for name, value in state.items():
                if isinstance(value, torch.Tensor) and value.ndim > 0:
                    state[name] = value.to("cpu" if to_host else weight.device)

    def before_step(*_: Any) -> None:
        move(to_host=False)

    def after(*_: Any) -> None:
        move(to_host=True)

    optimizer.register_step_pre_hook(before_step)
    optimizer.register_step_post_hook(after)
    optimizer.register_load_state_dict_post_hook(after)
    after()
