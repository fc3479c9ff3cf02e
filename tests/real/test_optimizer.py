"""Muon on real ranks: one and two train alike, and what they saved goes on bit for bit."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch.distributed as dist

from schemas.recipe import SFTRecipe
from stages.workers.device import CPU
from stages.workers.model import ModelWorker
from tests.real.ranks import on_ranks

pytestmark = [pytest.mark.real, pytest.mark.timeout(600)]

OPTIMIZER = {
    "type": "muon",
    "lr": 2e-3,
    "adamw_lr": 1e-3,
    "weight_decay": 0.1,
    "offload": True,
    "schedule": {"type": "wsd", "warmup_steps": 2, "decay_share": 0.5},
}


def test_one_rank_and_two_train_alike_and_go_on_bit_for_bit(build_folder: Path, tmp_path: Path) -> None:
    found = {}
    for num_ranks in (2, 1):
        recipe = SFTRecipe.model_validate(
            {
                "kind": "sft",
                "run": {"name": "muon", "root": str(tmp_path)},
                "model": {"path": str(build_folder / "model"), "dtype": "float32"},
                "data": {"path": str(build_folder / "conversations.jsonl"), "batch_size": 16},
                "trainer": {"num_ranks": num_ranks, "max_tokens_per_microbatch": 100, "optimizer": OPTIMIZER},
                "max_steps": 8,
            }
        )
        results = tmp_path / f"{num_ranks}.json"
        on_ranks(num_ranks, _train, recipe, str(tmp_path / "checkpoint"), results)
        found[num_ranks] = json.loads(results.read_text())
    rates = [line["train/learning_rate"] / 2e-3 for line in found[1]["live"]]
    assert rates == pytest.approx([0.5, 1, 1, 1, 1, 0.75, 0.5, 0.25])
    for runs in found.values():
        if "resumed" in runs:
            assert runs["resumed"] == runs["live"][4:], "after loading, the same numbers to the last bit"
    losses = {key: [line["train/loss"] for line in runs["live"]] for key, runs in found.items()}
    assert losses[1] == pytest.approx(losses[2], abs=1e-4)
    assert losses[1][-1] < losses[1][0] - 0.1
    other = [line["train/loss"] for line in found[1]["from_two_ranks"]]
    assert other == pytest.approx(losses[2][4:], abs=1e-4), "one rank goes on from what two have saved"


def _train(recipe: SFTRecipe, checkpoint: str, results: Path) -> None:
    """Eight steps with a checkpoint in the middle, then the last four again from it; before, one rank loads that of
    two."""
    worker = ModelWorker(recipe, CPU, int(os.environ["RANK"]), str(recipe.run.root))
    worker.setup(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
    found = {}
    if recipe.trainer.num_ranks == 1:
        start = f"{checkpoint}-start"
        worker.save(start)
        worker.load(f"{checkpoint}-2")
        found["from_two_ranks"] = _steps(worker, 4, 8)
        worker.load(start)
    found["live"] = _steps(worker, 0, 4)
    worker.save(f"{checkpoint}-{recipe.trainer.num_ranks}")
    found["live"] += _steps(worker, 4, 8)
    worker.load(f"{checkpoint}-{recipe.trainer.num_ranks}")
    found["resumed"] = _steps(worker, 4, 8)
    if dist.get_rank() == 0:
        results.write_text(json.dumps(found))


def _steps(worker: ModelWorker, start: int, end: int) -> list[dict[str, float]]:
    lines = [worker.train_conversations(step) for step in range(start, end)]
    return [{name: value for name, value in line.items() if not name.endswith("seconds")} for line in lines]
