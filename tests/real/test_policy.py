"""The optimizer steps of a batch on the real tiny model, in this process: what must not change a gradient, and what the
parts of the objective do together."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from recipes.quickstart.prepare import build_tokenizer
from schemas.recipe import RLRecipe
from stages.algorithms.masks import ActionMask
from stages.algorithms.microbatches import deal_minibatches, plan_batch
from stages.workers.collate import TrainRow
from stages.workers.device import Device, select_device
from stages.workers.policy import Policy

pytestmark = [pytest.mark.real, pytest.mark.timeout(300)]
NUM_ROWS = 12
NUM_TOKENS = build_tokenizer().get_vocab_size()
"""An untrained policy gives about 1 / NUM_TOKENS to each."""


@pytest.fixture(scope="module")
def device(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Device]:
    """This process as the only rank."""
    meeting = tmp_path_factory.mktemp("ranks") / "store"
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=0, world_size=1)
    yield select_device("cpu")
    dist.destroy_process_group()


def make_rows(seed: int = 0) -> list[TrainRow]:
    """Segments of 3 to 14 tokens; the last half of each was sampled, and its last token is masked in every third."""
    draw, rows = random.Random(seed), []
    for index in range(NUM_ROWS):
        length = draw.randrange(3, 15)
        sampled = torch.arange(length) >= length // 2
        trained = sampled & ((torch.arange(length) < length - 1) | (index % 3 > 0))
        rows.append(
            TrainRow(
                token_ids=[draw.randrange(NUM_TOKENS) for _ in range(length)],
                rollout_logprobs=[draw.uniform(-1, 1) - math.log(NUM_TOKENS) if on else 0.0 for on in sampled],
                temperatures=torch.where(sampled, 0.8, 1.0),
                mask=ActionMask(sampled, trained, torch.zeros(length, dtype=torch.int64)),
                outcome=draw.choice([-1.0, 0.5, 1.0]),
            )
        )
    return rows


GROUPS = [f"g{index // 3}" for index in range(NUM_ROWS)]


class Trained:
    """A policy, and the gradients of each of its optimizer steps."""

    def __init__(self, recipe: RLRecipe, device: Device) -> None:
        torch.manual_seed(0)
        self.policy = Policy(recipe, device)
        self.gradients: list[torch.Tensor] = []
        self.policy.optimizer.register_step_pre_hook(lambda *_: self.gradients.append(self._gradient()))
        self._recipe = recipe

    def _gradient(self) -> torch.Tensor:
        return torch.cat([p.grad.flatten() for p in self.policy.model.parameters() if p.grad is not None])

    def train(self, rows: list[TrainRow], max_tokens: int = 10_000, order: list[int] | None = None) -> dict[str, float]:
        order = order or list(range(len(rows)))
        groups = [GROUPS[index] for index in order]
        minibatches = deal_minibatches(sorted(groups), self._recipe.loss.minibatches, "0")
        by_group = dict(zip(sorted(groups), minibatches, strict=True))
        lengths = [len(rows[index].token_ids) for index in order]
        plan = plan_batch(lengths, [by_group[group] for group in groups], 1, max_tokens)
        return self.policy.train({p: rows[index] for p, index in enumerate(order)}, plan, groups, len(rows))


VARIANTS: dict[str, dict[str, Any]] = {
    "grpo": {},
    "ppo in two steps": {
        "loss": {"type": "ppo", "minibatches": 2, "aggregation": "prompt-mean-token-mean", "entropy_coef": 0.01},
        "kl": {"coef": 0.1, "kind": "k3+"},
    },
    "reinforce": {
        "advantage": {"type": "reinforce", "gamma": 0.9},
        "loss": {"type": "cispo", "aggregation": "seq-mean-token-mean"},
        "kl": {"coef": 0.1, "kind": "k1", "place": "reward"},
    },
    "gspo": {
        "advantage": {"type": "reinforce_baseline"},
        "loss": {"type": "gspo", "aggregation": "seq-mean-token-sum-norm"},
        "correction": {"level": "geo", "low": 0.2, "high": 5},
    },
}
each_variant = pytest.mark.parametrize("variant", VARIANTS)


@each_variant
def test_gradients_are_the_same_however_a_batch_is_cut_padded_or_ordered(
    variant: str, make_recipe: Callable[..., RLRecipe], device: Device
) -> None:
    trained = Trained(_still(make_recipe, variant), device)
    whole = trained.train(make_rows())
    expected = list(trained.gradients)
    assert len(expected) == trained._recipe.loss.minibatches and all(g.abs().max() > 1e-4 for g in expected)
    lengths = [len(row.token_ids) for row in make_rows()]
    order = random.Random(1).sample(range(NUM_ROWS), NUM_ROWS)
    # microbatches of about a half, a quarter, and one row each; another order, in which others pad one another
    for max_tokens, chosen in ((sum(lengths) // 2, None), (sum(lengths) // 4, None), (1, None), (30, order)):
        trained.gradients.clear()
        metrics = trained.train(make_rows(), max_tokens, chosen)
        for found, same in zip(trained.gradients, expected, strict=True):
            torch.testing.assert_close(found, same, rtol=0, atol=1e-6)
        without_time = {name: value for name, value in metrics.items() if not name.endswith("seconds")}
        assert without_time == pytest.approx({name: whole[name] for name in without_time}, rel=1e-5, abs=1e-6)


@each_variant
def test_what_lies_off_the_mask_has_no_influence(
    variant: str, make_recipe: Callable[..., RLRecipe], device: Device
) -> None:
    trained = Trained(_still(make_recipe, variant), device)
    trained.train(make_rows())
    expected = list(trained.gradients)
    trained.gradients.clear()
    rows = make_rows()
    for row in rows:
        row.rollout_logprobs = [
            value if on else float("nan") for value, on in zip(row.rollout_logprobs, row.mask.sampled, strict=True)
        ]
    trained.train(rows)
    for found, same in zip(trained.gradients, expected, strict=True):
        assert torch.equal(found, same)


def test_the_ratio_is_to_the_policy_before_the_batch(make_recipe: Callable[..., RLRecipe], device: Device) -> None:
    recipe = make_recipe(
        "epochs",
        loss={"type": "ppo", "epochs": 3, "clip_low": 0.01, "clip_high": 0.01},
        correction={"level": "off"},
        window={"max_policy_lag": 0},
        trainer={"optimizer": {"type": "adamw", "lr": 1e-2}},
    )
    metrics = Trained(recipe, device).train(make_rows())
    assert metrics["train/updates"] == 3
    # the first pass clips nothing; after a step of this size most ratios are outside of [0.99, 1.01]
    assert 0.1 < metrics["train/clipped_token_share"] < 0.67
    assert metrics["train/policy_kl"] != 0


def test_a_teacher_that_is_the_policy_teaches_nothing_and_another_one_its_log_ratio(
    make_recipe: Callable[..., RLRecipe], device: Device
) -> None:
    recipe = make_recipe(
        "distil",
        advantage={"type": "on_policy_distill"},
        reference={"path": "teacher"},
        correction={"level": "off"},
        window={"max_policy_lag": 0},
        trainer={"optimizer": {"type": "adamw", "lr": 1e-30}},
    )
    trained = Trained(recipe, device)
    rows = make_rows()
    for row in rows:
        row.reference_logprobs = torch.zeros(len(row.token_ids))
    trained.train(rows)
    own = [row.old_logprobs for row in rows]
    gradient = trained.gradients.pop()
    assert gradient.abs().max() > 1e-3
    # a teacher that is as sure of every token as the policy, and one whose log-probs are 0.5 higher on each
    for shift, scale in ((0.0, 0.0), (0.5, 0.5)):
        rows = make_rows()
        for row, logprobs in zip(rows, own, strict=True):
            assert logprobs is not None
            row.reference_logprobs = (logprobs + shift) * row.mask.sampled
        metrics = trained.train(rows)
        assert metrics["kl/mean"] == pytest.approx(shift**2 / 2, abs=1e-6)  # k2 of a log-ratio of -shift
        for row in rows:
            assert row.advantages is not None
            assert row.advantages[row.mask.sampled].tolist() == pytest.approx([scale] * int(row.mask.sampled.sum()))
    assert len(trained.gradients) == 1, "without any advantage there is no step"


def test_the_kl_coefficient_follows_what_was_measured(
    make_recipe: Callable[..., RLRecipe], device: Device, tmp_path: Path
) -> None:
    recipe = make_recipe("adaptive", kl={"coef": 0.2, "kind": "k2", "target": 1e-6, "horizon": 120})
    policy = Trained(recipe, device)
    assert policy.train(make_rows())["kl/coef"] == 0.2
    # far above the target: 0.2 (1 + 0.2 x 12 / 120)
    assert policy.policy.kl_coef == pytest.approx(0.204)
    assert policy.train(make_rows())["kl/coef"] == pytest.approx(0.204)


def _still(make_recipe: Callable[..., RLRecipe], variant: str) -> RLRecipe:
    """A recipe that computes gradients and hardly moves the weights."""
    return make_recipe("gradients", trainer={"optimizer": {"type": "adamw", "lr": 1e-30}}, **VARIANTS[variant])
