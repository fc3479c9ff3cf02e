"""Schedules by hand; Muon and AdamW against those of torch; an optimizer whose state lies in host memory."""

from __future__ import annotations

import math

import pytest
import torch

from schemas.errors import RecipeError
from schemas.loading import load_recipe
from schemas.optimizer import (
    AdamWOptimizer,
    ConstantSchedule,
    CosineSchedule,
    LinearSchedule,
    MuonOptimizer,
    OptimizerConfig,
    ScheduleConfig,
    WSDSchedule,
)
from stages.workers.optimizer import build_optimizer, learning_rate_share

# ---- schedules ----

ROOT = math.sqrt(0.5)


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        (ConstantSchedule(), [1] * 10),
        (ConstantSchedule(warmup_steps=4), [0.25, 0.5, 0.75, 1, 1, 1, 1, 1, 1, 1]),
        (LinearSchedule(), [1, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1]),
        # 8 steps from the peak to a tenth: 0.1 + 0.9 x (1 - n / 8)
        (LinearSchedule(warmup_steps=2, floor=0.1), [0.5, 1] + [0.1 + 0.9 * (1 - n / 8) for n in range(8)]),
        # half a cosine over 8 steps: 45 degrees two steps on, 90 four steps on
        (
            CosineSchedule(warmup_steps=2, floor=0.2),
            [0.5, 1, 1, None, 0.2 + 0.4 * (1 + ROOT), None, 0.6, None, 0.2 + 0.4 * (1 - ROOT), None],
        ),
        (WSDSchedule(warmup_steps=2, decay_share=0.4), [0.5, 1, 1, 1, 1, 1, 1, 0.75, 0.5, 0.25]),
        (WSDSchedule(decay_share=0.4, floor=0.5), [1, 1, 1, 1, 1, 1, 1, 0.875, 0.75, 0.625]),
        (
            WSDSchedule(decay_share=0.4, shape="cosine"),
            [1, 1, 1, 1, 1, 1, 1, 0.5 * (1 + ROOT), 0.5, 0.5 * (1 - ROOT)],
        ),
        (WSDSchedule(decay_share=0.4, shape="sqrt"), [1, 1, 1, 1, 1, 1, 1, 0.5, 1 - ROOT, 1 - math.sqrt(0.75)]),
        # the fall waits for the warm-up: 5 steps from there
        (WSDSchedule(warmup_steps=5, decay_share=1), [0.2, 0.4, 0.6, 0.8, 1, 1, 0.8, 0.6, 0.4, 0.2]),
    ],
)
def test_the_share_of_the_peak_by_step(schedule: ScheduleConfig, expected: list[float | None]) -> None:
    found = [learning_rate_share(schedule, step, num_steps=10) for step in range(10)]
    for share, wanted in zip(found, expected, strict=True):
        assert wanted is None or share == pytest.approx(wanted, abs=1e-12)


@pytest.mark.parametrize("schedule", [LinearSchedule(floor=0.3), CosineSchedule(floor=0.3), WSDSchedule(floor=0.3)])
def test_the_floor_is_reached_behind_the_last_step_and_kept(schedule: ScheduleConfig) -> None:
    assert [learning_rate_share(schedule, step, 10) for step in (10, 11, 99)] == pytest.approx([0.3] * 3)
    assert learning_rate_share(schedule, 9, 10) > 0.3


@pytest.mark.parametrize("schedule", [LinearSchedule, CosineSchedule, WSDSchedule])
def test_a_warm_up_as_long_as_the_run_is_only_that(schedule: type[LinearSchedule]) -> None:
    shares = [learning_rate_share(schedule(warmup_steps=3, floor=0), step, 3) for step in range(4)]
    assert shares == pytest.approx([1 / 3, 2 / 3, 1, 1])


# ---- optimizers ----


class Model(torch.nn.Module):
    """Embedding, two matrices (tall and wide), norm, head."""

    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.embed = torch.nn.Embedding(11, 6)
        self.up = torch.nn.Linear(6, 20)
        self.down = torch.nn.Linear(20, 6, bias=False)
        self.norm = torch.nn.LayerNorm(6)
        self.lm_head = torch.nn.Linear(6, 11, bias=False)
        if tied:
            self.lm_head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(ids)
        return self.lm_head(self.norm(hidden + self.down(torch.tanh(self.up(hidden)))))


MATRICES = ("up.weight", "down.weight")


def trained(config: OptimizerConfig, steps: int = 4, tied: bool = False) -> dict[str, torch.Tensor]:
    model = Model(tied)
    optimizer, schedule = build_optimizer(model, config, steps)
    for step in range(steps):
        _gradient(model, step)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad(set_to_none=True)
    return {name: weight.detach() for name, weight in model.named_parameters()}


def _gradient(model: torch.nn.Module, step: int) -> None:
    ids = torch.randint(0, 11, (8,), generator=torch.Generator().manual_seed(step))
    torch.nn.functional.cross_entropy(model(ids), ids.roll(1)).backward()


@pytest.mark.parametrize("adjust_lr", ["original", "match_rms_adamw"])
@pytest.mark.parametrize("tied", [False, True])
def test_muon_steps_matrices_as_torch_does_and_all_else_as_adamw(adjust_lr: str, tied: bool) -> None:
    options = {"lr": 0.02, "adjust_lr": adjust_lr, "adamw_lr": 3e-3, "weight_decay": 0.1, "momentum": 0.9}
    found = trained(MuonOptimizer(**options, ns_steps=4), tied=tied)
    model = Model(tied)
    weights = dict(model.named_parameters())
    muon = torch.optim.Muon(
        [weights[name] for name in MATRICES],
        lr=0.02,
        weight_decay=0.1,
        momentum=0.9,
        ns_steps=4,
        adjust_lr_fn=adjust_lr,
    )
    others = [weight for name, weight in weights.items() if name not in MATRICES]
    adamw = torch.optim.AdamW(others, lr=3e-3, betas=(0.9, 0.95), weight_decay=0.1)
    for step in range(4):
        _gradient(model, step)
        muon.step()
        adamw.step()
        model.zero_grad()
    assert found.keys() == weights.keys()
    for name, weight in weights.items():
        assert torch.equal(found[name], weight), name


def test_both_rates_follow_the_schedule() -> None:
    config = MuonOptimizer(lr=0.02, adamw_lr=1e-3, schedule=LinearSchedule(warmup_steps=2))
    optimizer, schedule = build_optimizer(Model(), config, num_steps=6)
    rates = []
    for _ in range(6):
        rates.append(schedule.get_last_lr())
        optimizer.step()
        schedule.step()
    assert [rate[0] / 0.02 for rate in rates] == pytest.approx([0.5, 1, 1, 0.75, 0.5, 0.25])
    assert [rate[1] / 1e-3 for rate in rates] == pytest.approx([0.5, 1, 1, 0.75, 0.5, 0.25])


def test_without_a_rate_of_their_own_the_other_weights_take_that_of_the_matrices() -> None:
    optimizer, _ = build_optimizer(Model(), MuonOptimizer(lr=2e-4), 1)
    assert [group["lr"] for group in optimizer.param_groups] == [2e-4, 2e-4]


def test_muon_refuses_a_weight_that_is_neither_matrix_nor_vector() -> None:
    model = Model()
    model.experts = torch.nn.Parameter(torch.zeros(4, 6, 6))
    with pytest.raises(RecipeError, match=r"found muon with experts of shape \[4, 6, 6\]; allowed: adamw"):
        build_optimizer(model, MuonOptimizer(), 1)
    model.experts.requires_grad = False
    build_optimizer(model, MuonOptimizer(), 1)


def test_the_recipe_refuses_muon_s_own_rate_for_what_adamw_trains() -> None:
    overrides = ["run.name=a", "model.path=m", "kind=sft", "max_steps=1", "data={path: d}"]
    overrides.append("trainer.optimizer={type: muon, lr: 0.02, adjust_lr: original}")
    with pytest.raises(RecipeError, match=r"trainer.optimizer.adamw_lr .*: found null with adjust_lr = original"):
        load_recipe([], overrides)
    muon = load_recipe([], [*overrides, "trainer.optimizer.adamw_lr=1e-4"]).trainer.optimizer
    assert isinstance(muon, MuonOptimizer) and muon.adamw_lr == 1e-4


@pytest.mark.parametrize("kind", [AdamWOptimizer, MuonOptimizer])
def test_state_in_host_memory_changes_no_weight(kind: type[AdamWOptimizer]) -> None:
    kept, moved = (trained(kind(lr=1e-2, offload=offload)) for offload in (False, True))
    assert all(torch.equal(kept[name], moved[name]) for name in kept)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("kind", [AdamWOptimizer, MuonOptimizer])
def test_state_is_on_the_gpu_for_the_step_alone(kind: type[AdamWOptimizer]) -> None:
    model = Model().to("cuda")
    optimizer, _ = build_optimizer(model, kind(offload=True), 1)
    during: list[set[str]] = []
    optimizer.register_step_pre_hook(lambda *_: during.append(_devices(optimizer)))
    for _ in range(2):
        for weight in model.parameters():
            weight.grad = torch.zeros_like(weight)
        optimizer.step()
        assert _devices(optimizer) == {"cpu"}
    assert during[1] == {"cuda"}
    optimizer.load_state_dict(optimizer.state_dict())
    assert _devices(optimizer) == {"cpu"}


def _devices(optimizer: torch.optim.Optimizer) -> set[str]:
    values = [value for state in optimizer.state.values() for value in state.values() if value.ndim > 0]
    return {value.device.type for value in values}
