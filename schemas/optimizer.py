"""Optimizers and schedules of the learning rate, as parts of a recipe."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, PositiveFloat, model_validator

from schemas.config import Config, Decay, Probability


class ConstantSchedule(Config):
    type: Literal["constant"] = "constant"
    """The learning rate stays at `lr` after the warm-up."""
    warmup_steps: Annotated[int, Field(ge=0)] = 0
    """Optimizer steps of linear warm-up."""


class LinearSchedule(Config):
    type: Literal["linear"] = "linear"
    """After the warm-up the learning rate falls along a line until the last step."""
    warmup_steps: Annotated[int, Field(ge=0)] = 0
    """Optimizer steps of linear warm-up."""
    floor: Probability = 0.0
    """Learning rate at the end, as a share of `lr`."""


class CosineSchedule(Config):
    type: Literal["cosine"] = "cosine"
    """After the warm-up the learning rate falls along a half cosine until the last step."""
    warmup_steps: Annotated[int, Field(ge=0)] = 0
    """Optimizer steps of linear warm-up."""
    floor: Probability = 0.1
    """Learning rate at the end, as a share of `lr`."""


class WSDSchedule(Config):
    type: Literal["wsd"] = "wsd"
    """Warm-up, stable, decay: the learning rate stays at `lr` until it falls in the last part of the run."""
    warmup_steps: Annotated[int, Field(ge=0)] = 0
    """Optimizer steps of linear warm-up."""
    decay_share: Annotated[float, Field(gt=0, le=1)] = 0.2
    """Part of all optimizer steps, at the end, in which the learning rate falls; it never falls within the warm-up."""
    shape: Literal["linear", "cosine", "sqrt"] = "linear"
    """Course of the fall; `sqrt` is one minus the root of the progress: fast at first, then slow."""
    floor: Probability = 0.0
    """Learning rate at the end, as a share of `lr`."""


ScheduleConfig = Annotated[
    ConstantSchedule | LinearSchedule | CosineSchedule | WSDSchedule, Field(discriminator="type")
]


class _Optimizer(Config):
    type: str
    lr: PositiveFloat = 1e-6
    """Peak learning rate."""
    betas: tuple[Decay, Decay] = (0.9, 0.95)
    """Decay of AdamW's running means of the gradient and of its square."""
    eps: PositiveFloat = 1e-8
    """Added to the root of the second mean, so that AdamW never divides by zero."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    """Share of a weight, times the learning rate, that a step takes away (decoupled decay)."""
    max_grad_norm: PositiveFloat = 1.0
    """Gradients are scaled down to this global norm."""
    schedule: ScheduleConfig = ConstantSchedule()
    """Course of the learning rate over optimizer steps."""
    offload: bool = False
    """Keep the optimizer's state in host memory between steps: less GPU memory, two copies of it a step more."""


class AdamWOptimizer(_Optimizer):
    type: Literal["adamw"] = "adamw"
    """Adam with decoupled weight decay, for all weights."""


class MuonOptimizer(_Optimizer):
    type: Literal["muon"] = "muon"
    """Orthogonalised momentum for the weight matrices; embedding, head, norms and biases are left to AdamW."""
    momentum: Decay = 0.95
    """Decay of the running mean of the gradient that Muon orthogonalises (with Nesterov's look ahead)."""
    ns_steps: Annotated[int, Field(ge=1, lt=100)] = 5
    """Newton-Schulz iterations of the orthogonalisation."""
    adjust_lr: Literal["match_rms_adamw", "original"] = "match_rms_adamw"
    """Factor on `lr` for a matrix of A rows and B columns: 0.2 sqrt(max(A, B)), which makes updates as large as AdamW's
    at the same `lr`, or sqrt(max(1, A / B)), for which `lr` is around 0.02."""
    adamw_lr: PositiveFloat | None = None
    """Peak learning rate of what is left to AdamW; unset takes `lr`."""

    @model_validator(mode="after")
    def _rates_are_of_their_kind(self) -> Self:
        if self.adjust_lr == "original" and self.adamw_lr is None:
            raise ValueError(
                "adamw_lr: found null with adjust_lr = original, whose `lr` is too large for AdamW; allowed: a number"
            )
        return self


OptimizerConfig = Annotated[AdamWOptimizer | MuonOptimizer, Field(discriminator="type")]
