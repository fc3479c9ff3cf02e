"""Muon for the weight matrices, AdamW for all other weights, as one optimizer with one state to save.

The step of a matrix is that of torch.optim.Muon (https://kellerjordan.github.io/posts/muon/, arXiv 2502.16982). That
class also runs on sharded matrices, but orthogonalises them in bfloat16 from partial sums of each rank: the update
depends on the number of ranks by a tenth, and takes a dozen collectives a matrix. Here each rank gathers the momentum
of one matrix after another, orthogonalises it whole, and keeps its own part.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim._muon import DEFAULT_A, DEFAULT_B, DEFAULT_C, EPS, _adjust_lr, _zeropower_via_newtonschulz
from torch.optim.adamw import adamw

from schemas.optimizer import MuonOptimizer


class Muon(torch.optim.Optimizer):
    def __init__(self, matrices: Sequence[torch.Tensor], others: Sequence[torch.Tensor], config: MuonOptimizer) -> None:
        """`matrices` are [out, in], all others of any shape; sharded or not."""
        of_matrices = {"momentum": config.momentum, "ns_steps": config.ns_steps, "adjust_lr": config.adjust_lr}
        of_others = {"lr": config.adamw_lr or config.lr, "betas": config.betas, "eps": config.eps}
        groups = [{"params": list(matrices), **of_matrices}, {"params": list(others), **of_others}]
        super().__init__(groups, {"lr": config.lr, "weight_decay": config.weight_decay})
        # made here and not at the first step: a checkpoint before it must be the same as none
        for weight in matrices:
            self.state[weight] = {"momentum_buffer": torch.zeros_like(weight)}
        for weight in others:
            self.state[weight] = {
                "step": torch.tensor(0.0),
                "exp_avg": torch.zeros_like(weight),
                "exp_avg_sq": torch.zeros_like(weight),
            }

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:
        """Updates every weight that has a gradient; collective over the ranks that share the matrices."""
        matrices, others = self.param_groups
        for weight in matrices["params"]:
            if weight.grad is not None:
                self._step_matrix(weight, weight.grad, matrices)
        moved = [weight for weight in others["params"] if weight.grad is not None]
        states = [self.state[weight] for weight in moved]
        adamw(
            moved,
            [weight.grad for weight in moved],
            *([state[name] for state in states] for name in ("exp_avg", "exp_avg_sq")),
            [],
            [state["step"] for state in states],
            foreach=False,
            amsgrad=False,
            beta1=others["betas"][0],
            beta2=others["betas"][1],
            lr=others["lr"],
            weight_decay=others["weight_decay"],
            eps=others["eps"],
            maximize=False,
        )

    def _step_matrix(self, weight: torch.Tensor, gradient: torch.Tensor, group: dict[str, Any]) -> None:
        momentum = self.state[weight]["momentum_buffer"]
        momentum.lerp_(gradient, 1 - group["momentum"])
        update = gradient.lerp(momentum, group["momentum"])
        whole = update.full_tensor() if isinstance(update, DTensor) else update
        whole = _zeropower_via_newtonschulz(whole, (DEFAULT_A, DEFAULT_B, DEFAULT_C), group["ns_steps"], EPS)
        if isinstance(update, DTensor):  # every rank has the whole: without a source there is nothing to send
            whole = distribute_tensor(whole, update.device_mesh, update.placements, src_data_rank=None)
        weight.mul_(1 - group["lr"] * group["weight_decay"])
        weight.add_(whole, alpha=-_adjust_lr(group["lr"], group["adjust_lr"], weight.shape))
