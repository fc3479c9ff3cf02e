"""The objective of RL on one microbatch: policy loss, importance correction, KL and entropy, as one number.

    loss = sum over trained tokens of weight x (correction x policy loss + kl_coef x KL - entropy_coef x entropy)

`weight` is that of the token's row in its optimizer step (`aggregation.py`), so any split of the step into microbatches
and ranks gives the same gradient, and all terms have the same denominator.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from schemas.algorithms import CorrectionConfig, CustomLoss, KLConfig, LossChoice, LossConfig
from schemas.entries import load_object
from stages.algorithms.aggregation import aggregate
from stages.algorithms.correction import Correction, correction, log_ratio, mismatch_sums
from stages.algorithms.kl import kl
from stages.algorithms.losses import LOSSES, PolicyLoss


@dataclass(frozen=True)
class Microbatch:
    """Right-padded to the longest row. All tensors are [rows, seq] but `row_weights` [rows].

    `old_logprobs` are those of the policy before the batch; without them, that is the policy itself. A KL is measured
    to `reference_logprobs`; without them, to the policy that sampled.
    """

    token_ids: torch.Tensor
    attention_mask: torch.Tensor
    sampled: torch.Tensor
    trained: torch.Tensor
    rollout_logprobs: torch.Tensor
    temperatures: torch.Tensor
    advantages: torch.Tensor
    row_weights: torch.Tensor
    old_logprobs: torch.Tensor | None = None
    reference_logprobs: torch.Tensor | None = None


def policy_loss(config: LossChoice) -> Callable[..., PolicyLoss]:
    """The loss function of a recipe, `f(logprobs, old_logprobs, advantages, mask)`. Raises RecipeError for a function
    of the user that cannot be loaded."""
    if isinstance(config, CustomLoss):
        return partial(load_object(config.function, "loss.function"), **config.args)
    return partial(LOSSES[config.type], **config.model_dump(exclude={"type", *LossConfig.model_fields}))


class Objective:
    """The objective of one recipe."""

    def __init__(self, loss: LossChoice, correction: CorrectionConfig, kl: KLConfig) -> None:
        self._policy_loss = policy_loss(loss)
        self._correction = correction
        self._kl = kl
        self._entropy_coef = loss.entropy_coef

    @property
    def needs_entropy(self) -> bool:
        return self._entropy_coef != 0

    def __call__(
        self, batch: Microbatch, logprobs: torch.Tensor, entropy: torch.Tensor | None, kl_coef: float
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """(loss, sums over trained tokens for the metrics). `logprobs` and `entropy` are [rows, seq]."""
        mask, detached = batch.trained, logprobs.detach()
        old = detached if batch.old_logprobs is None else batch.old_logprobs
        ratio_log = log_ratio(old, batch.rollout_logprobs, mask)
        corrected = self._corrected(ratio_log, old, batch)
        policy = self._policy_loss(logprobs, old, batch.advantages, mask)
        losses = torch.where(corrected.weights == 0, 0.0, corrected.weights * policy.losses)
        sums = {f"mismatch_{name}": value for name, value in mismatch_sums(ratio_log, mask).items()}
        reference = batch.rollout_logprobs if batch.reference_logprobs is None else batch.reference_logprobs
        if kl_coef and self._kl.place == "loss":
            losses = losses + kl_coef * kl(logprobs, reference, self._kl.kind)
        if entropy is not None:
            losses = losses - self._entropy_coef * entropy
            sums["entropy"] = _total(entropy.detach(), mask)
        loss = aggregate(losses, mask, batch.row_weights)
        sums |= {
            "trained": mask.sum(),
            "loss": loss.detach(),
            "policy_loss": aggregate(policy.losses.detach(), mask, batch.row_weights),
            "clipped": _total(policy.clipped, mask),
            "kept": _total(corrected.kept, mask),
            "kept_units": corrected.units_kept,
            "units": corrected.units_total,
            "logprob": _total(detached, mask),
            "policy_kl": _total(old - detached, mask),
            "kl": _total(kl(detached, reference, self._kl.kind), mask),
            "mismatch_max": ratio_log.abs().max(),
        }
        return loss, sums

    def _corrected(self, ratio_log: torch.Tensor, old: torch.Tensor, batch: Microbatch) -> Correction:
        config, mask = self._correction, batch.trained
        if config.level == "off":
            return Correction(mask.to(ratio_log.dtype), mask, mask.sum(), mask.sum())
        return correction(
            ratio_log,
            old,
            batch.rollout_logprobs,
            mask,
            level=config.level,
            mode=config.mode,
            gate=config.gate,
            low=config.low,
            high=config.high,
        )


def _total(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return torch.where(mask, values.double(), 0.0).sum()
