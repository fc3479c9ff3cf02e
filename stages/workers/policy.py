"""The policy on one training rank: the model, its optimizer, and the optimizer steps of a batch.

What a step needs is decided before its first backward: its rows and microbatches (the stored plan), the masks, and the
weight of every token in it. Every rank runs the same number of microbatches.
"""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

import torch
import torch.distributed as dist

from schemas.algorithms import (
    AdvantageConfig,
    CorrectionConfig,
    KLConfig,
    LossChoice,
    OnPolicyDistillAdvantage,
    PolicyGradientLoss,
    ReinforceAdvantage,
    ReinforceBaselineAdvantage,
)
from schemas.errors import TrainingDiverged
from schemas.recipe import Recipe, RLRecipe
from stages.algorithms.aggregation import row_weights
from stages.algorithms.kl import adaptive_coefficient, kl
from stages.algorithms.microbatches import Place
from stages.algorithms.objective import Objective
from stages.algorithms.returns import discounted_returns, moments, token_rewards, whiten
from stages.workers.automodel import build_policy, clip_gradients
from stages.workers.collate import TrainRow, collate
from stages.workers.device import Device
from stages.workers.head import ScoringHead
from stages.workers.optimizer import build_optimizer

Rows = Mapping[int, TrainRow]
"""This rank's rows by their position in the batch."""
MAXIMA = ("max_lag", "mismatch_max")
"""What is the largest over microbatches and ranks; all else is summed."""


class Policy:
    def __init__(self, recipe: Recipe, device: Device) -> None:
        """Build model and optimizer; collective over all ranks."""
        self._num_ranks = recipe.trainer.num_ranks
        self._max_grad_norm = recipe.trainer.optimizer.max_grad_norm
        self._loss: LossChoice = PolicyGradientLoss()
        self._advantage: AdvantageConfig | None = None
        self._kl, correction, self._max_row_tokens = KLConfig(), CorrectionConfig(level="off"), 1
        if isinstance(recipe, RLRecipe):
            self._loss, self._advantage, self._kl = recipe.loss, recipe.advantage, recipe.kl
            correction, self._max_row_tokens = recipe.correction, recipe.agent.max_context_tokens
        self._objective = Objective(self._loss, correction, self._kl)
        self._sharded = build_policy(recipe.model, device)
        self.model = self._sharded.model
        self.device = next(self.model.parameters()).device
        self._score = ScoringHead(self.model)
        num_updates = recipe.max_steps * self._loss.epochs * self._loss.minibatches
        self.optimizer, self.schedule = build_optimizer(self.model, recipe.trainer.optimizer, num_updates)
        self.kl_coef = self._kl.coef
        """Weight of the KL in the next batch; an adaptive one moves with what was measured."""

    def train(self, rows: Rows, plan: Sequence[Place], groups: Sequence[str], num_rollouts: int) -> dict[str, float]:
        """The optimizer steps of one batch; its metrics, equal on all ranks. `plan` and `groups` are by position."""
        start = time.perf_counter()
        totals = self._over_ranks(_totals(list(rows.values())))
        counts = torch.zeros(len(plan), dtype=torch.float64, device=self.device)
        for position, row in rows.items():
            counts[position] = float(row.mask.trained.sum())
        dist.all_reduce(counts)
        if self._loss.epochs * self._loss.minibatches > 1 or self._reward_coef:
            self._remember_old_logprobs(rows, plan)
        self._spread_outcomes(list(rows.values()))
        minibatches = sorted({place.minibatch for place in plan})
        for minibatch in minibatches:
            self._weigh(rows, plan, groups, counts.cpu(), minibatch)
        sums: defaultdict[str, float] = defaultdict(float)
        for minibatch in minibatches * self._loss.epochs:
            self._update(rows, plan, minibatch, sums)
        found = self._over_ranks(sums)
        coef, self.kl_coef = self.kl_coef, self._next_kl_coef(found, num_rollouts)
        return _metrics(totals, found, time.perf_counter() - start) | {"kl/coef": coef}

    def _update(self, rows: Rows, plan: Sequence[Place], minibatch: int, sums: defaultdict[str, float]) -> None:
        """One optimizer step. Without any gradient it leaves the weights as they are; a gradient that is not finite
        raises TrainingDiverged before it touches them."""
        for chosen in self._microbatches(rows, plan, minibatch):
            batch = collate(chosen, self.device)
            scores = self._score(batch, batch.trained, self._objective.needs_entropy)
            loss, found = self._objective(batch, *scores, self.kl_coef)
            (loss * self._num_ranks).backward()  # FSDP averages gradients over ranks; the weights are global already
            for name, value in found.items():
                sums[name] = max(sums[name], float(value)) if name in MAXIMA else sums[name] + float(value)
        norm = clip_gradients(self._sharded, self._max_grad_norm, self._num_ranks)
        if not math.isfinite(norm):
            raise TrainingDiverged(f"the gradient norm is {norm} (loss {sums['loss']}); the weights are unchanged")
        each = {"updates": 1.0, "updated": float(norm > 0), "grad_norm": norm}
        each["learning_rate"] = self.schedule.get_last_lr()[0]
        for name, value in each.items():
            sums[name] += value / self._num_ranks  # the same on all ranks
        if norm > 0:
            self.optimizer.step()
            self.schedule.step()
        self.optimizer.zero_grad(set_to_none=True)

    @torch.no_grad()
    def _remember_old_logprobs(self, rows: Rows, plan: Sequence[Place]) -> None:
        """The policy's log-probs before its first step on the batch."""
        for minibatch in sorted({place.minibatch for place in plan}):
            for chosen in self._microbatches(rows, plan, minibatch):
                batch = collate(chosen, self.device)
                scores = self._score(batch, batch.sampled)
                # a pass that this rank only joins has no rows
                for row, values in zip(chosen, scores.logprobs.cpu(), strict=False):
                    row.old_logprobs = values[: len(row.token_ids)]

    def _spread_outcomes(self, rows: Sequence[TrainRow]) -> None:
        """From the outcome of each row to an advantage for each of its tokens."""
        for row in rows:
            sampled = row.mask.sampled
            row.advantages = torch.zeros(len(row.token_ids), dtype=torch.float64)
            row.advantages[sampled] = row.outcome
            if isinstance(self._advantage, ReinforceAdvantage) and sampled.any():
                rewards = token_rewards(row.outcome, self._reward_kl(row), self._reward_coef, int(sampled.sum()))
                row.advantages[sampled] = discounted_returns(rewards, self._advantage.gamma)
            elif isinstance(self._advantage, OnPolicyDistillAdvantage):
                log_ratio = self._reward_kl(row)
                assert log_ratio is not None, "a distillation remembers the old log-probs"
                row.advantages[sampled] = -self._reward_coef * log_ratio
        if self._whitens:
            self._whiten(rows)

    @property
    def _whitens(self) -> bool:
        if isinstance(self._advantage, ReinforceAdvantage):
            return self._advantage.whiten
        return isinstance(self._advantage, ReinforceBaselineAdvantage)

    def _whiten(self, rows: Sequence[TrainRow]) -> None:
        """Over the trained tokens of all ranks."""
        own = torch.stack([torch.zeros(3, dtype=torch.float64), *(_moments(row) for row in rows)]).sum(0)
        own = own.to(self.device)
        dist.all_reduce(own)
        for row in rows:
            assert row.advantages is not None
            row.advantages = whiten(row.advantages, *own.cpu())

    def _reward_kl(self, row: TrainRow) -> torch.Tensor | None:
        """KL of each sampled token that its reward is reduced by."""
        if not self._reward_coef or row.old_logprobs is None:
            return None
        reference = row.reference_logprobs
        if reference is None:
            reference = torch.as_tensor(row.rollout_logprobs, dtype=torch.float32)
        return kl(row.old_logprobs, reference, "k1")[row.mask.sampled].double()

    @property
    def _reward_coef(self) -> float:
        """Weight of the log-ratio to the reference in the reward of a token: all there is of it in a distillation."""
        if isinstance(self._advantage, OnPolicyDistillAdvantage):
            return 1.0
        return self.kl_coef if self._kl.place == "reward" else 0.0

    def _next_kl_coef(self, found: Mapping[str, float], num_rollouts: int) -> float:
        if self._kl.target is None:
            return self.kl_coef
        measured = found["kl"] / max(found["trained"], 1.0)
        return adaptive_coefficient(self.kl_coef, measured, self._kl.target, self._kl.horizon, num_rollouts)

    def _weigh(
        self, rows: Rows, plan: Sequence[Place], groups: Sequence[str], counts: torch.Tensor, minibatch: int
    ) -> None:
        """The weight of each row's tokens in this optimizer step, from the token counts of all ranks."""
        members = [position for position, place in enumerate(plan) if place.minibatch == minibatch]
        numbers = {group: number for number, group in enumerate(dict.fromkeys(groups))}
        group = torch.tensor([numbers[groups[position]] for position in members])
        weights = row_weights(self._loss.aggregation, counts[members], group, self._max_row_tokens)
        for position, weight in zip(members, weights.tolist(), strict=True):
            if position in rows:
                rows[position].weight = weight

    def _microbatches(self, rows: Rows, plan: Sequence[Place], minibatch: int) -> Iterator[list[TrainRow]]:
        """Rows of each pass of this rank, as many passes as the rank with the most."""
        count = max(place.microbatch for place in plan if place.minibatch == minibatch) + 1
        for index in range(count):
            yield [row for p, row in rows.items() if (plan[p].minibatch, plan[p].microbatch) == (minibatch, index)]

    def _over_ranks(self, values: Mapping[str, float]) -> dict[str, float]:
        """Sums, or maxima, over ranks, in one collective. All ranks have the same names."""
        names = sorted(values)
        own = torch.tensor([values[name] for name in names], dtype=torch.float64, device=self.device)
        gathered = torch.empty(self._num_ranks * len(names), dtype=torch.float64, device=self.device)
        dist.all_gather_into_tensor(gathered, own)
        by_rank = gathered.view(self._num_ranks, len(names))
        sums, maxima = by_rank.sum(0).tolist(), by_rank.amax(0).tolist()
        return {name: maxima[i] if name in MAXIMA else sums[i] for i, name in enumerate(names)}


def _moments(row: TrainRow) -> torch.Tensor:
    assert row.advantages is not None
    return torch.stack(list(moments(row.advantages, row.mask.trained)))


def _totals(rows: Sequence[TrainRow]) -> dict[str, float]:
    """This rank's share of what is counted once for a batch."""
    return {
        "rows": float(len(rows)),
        "tokens": float(sum(len(row.token_ids) for row in rows)),
        "sampled": float(sum(int(row.mask.sampled.sum()) for row in rows)),
        "trained": float(sum(int(row.mask.trained.sum()) for row in rows)),
        "lag": float(sum(int(row.mask.lag[row.mask.trained].sum()) for row in rows)),
        "max_lag": float(max((int((row.mask.lag * row.mask.trained).max()) for row in rows), default=0)),
    }


def _metrics(totals: Mapping[str, float], sums: Mapping[str, float], seconds: float) -> dict[str, float]:
    """Means over the tokens that were trained, as often as they were; over the optimizer steps where it says so."""
    trained, visits = max(totals["trained"], 1.0), max(sums["trained"], 1.0)
    updates = sums["updates"]
    metrics = {
        "train/loss": sums["loss"] / updates,
        "train/policy_loss": sums["policy_loss"] / updates,
        "train/grad_norm": sums["grad_norm"] / updates,
        "train/learning_rate": sums["learning_rate"] / updates,
        "train/updates": updates,
        "train/updated": sums["updated"] / updates,
        "train/clipped_token_share": sums["clipped"] / visits,
        "train/policy_kl": sums["policy_kl"] / visits,
        "train/logprob_mean": sums["logprob"] / visits,
        "train/rows": totals["rows"],
        "train/tokens": totals["tokens"],
        "train/trained_tokens": totals["trained"],
        "train/stale_token_share": 1 - totals["trained"] / max(totals["sampled"], 1.0),
        "train/lag_mean": totals["lag"] / trained,
        "train/lag_max": totals["max_lag"],
        "train/compute_seconds": seconds,
        "correction/masked_token_share": 1 - sums["kept"] / visits,
        "correction/rejected_share": 1 - sums["kept_units"] / max(sums["units"], 1.0),
        "mismatch/abs_mean": sums["mismatch_abs"] / visits,
        "mismatch/abs_max": sums["mismatch_max"],
        "mismatch/k3": sums["mismatch_k3"] / visits,
        "kl/mean": sums["kl"] / visits,
    }
    if "entropy" in sums:
        metrics["train/entropy"] = sums["entropy"] / visits
    return metrics
