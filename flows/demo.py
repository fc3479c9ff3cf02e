"""`make demo`: build a tiny model, warm it up with SFT, train it with asynchronous RL, and say what happened.

python -m flows.demo [--seed N] [key=value ...]     the overrides go to the RL recipe
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

from rich.console import Console

from flows.artifacts import draw_reward_curve
from flows.cli import reporting
from flows.launch import prepare_process, run_recipes
from schemas.loading import load_recipe
from storage.metrics import read_metrics
from storage.runs import RunFolder

QUICKSTART = Path("recipes/quickstart")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m flows.demo")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    options = parser.parse_args()
    prepare_process()
    started = time.time()
    console = Console(stderr=True)

    from recipes.quickstart.prepare import build

    console.print("[bold]1/3[/] building a 0.14M-parameter Qwen3, its tokenizer and the data")
    build(seed=options.seed)
    seed = f"run.seed={options.seed}"
    sft = load_recipe([QUICKSTART / "sft.yaml"], ["run.name=demo-sft", seed])
    rl = load_recipe([QUICKSTART / "rl.yaml"], ["run.name=demo", seed, *options.overrides])
    for recipe in (sft, rl):  # the demo's own runs start from nothing each time
        RunFolder(f"{recipe.run.root}/{recipe.run.name}").remove()

    console.print("[bold]2/3[/] warm start: supervised fine-tuning  [bold]3/3[/] reinforcement learning")
    _, result = run_recipes([sft, rl])
    picture = Path(result["run"]) / "reward.png"
    draw_reward_curve(read_metrics(RunFolder(result["run"])), result["evaluations"], picture)
    line = _summary(result, time.time() - started)
    _tell(console, line, picture)
    print(json.dumps(line))
    if line["reward_after"] <= line["reward_before"]:
        raise SystemExit("the reward did not rise")


def _summary(result: dict[str, Any], seconds_total: float) -> dict[str, Any]:
    evaluations = result["evaluations"]
    return {
        "run": result["run"],
        "reward_before": evaluations[min(evaluations)],
        "reward_after": evaluations[max(evaluations)],
        "steps": result["steps_trained"],
        "seconds_to_first_step": round(result["first_step_at"] - result["started_at"], 2),
        "seconds_per_step": round(result["seconds_per_step"], 3),
        "seconds_total": round(seconds_total, 1),
        "shares": {part: round(share, 4) for part, share in result["shares"].items()},
    }


def _tell(console: Console, line: dict[str, Any], picture: Path) -> None:
    console.print(
        f"\nheld-out exact match went from [bold]{line['reward_before']:.3f}[/] to [bold]{line['reward_after']:.3f}[/] "
        f"in {line['steps']} batches\n"
        f"first batch after {line['seconds_to_first_step']} s, then {line['seconds_per_step']} s a batch\n"
        f"run folder   {line['run']}\n"
        f"reward curve {picture}\n"
        "try next     .venv/bin/moltflow runs show demo\n"
        "             .venv/bin/moltflow traces show demo\n"
        "             .venv/bin/moltflow train recipes/quickstart/rl.yaml run.name=mine advantage.type=rloo\n",
        soft_wrap=True,
    )


if __name__ == "__main__":
    reporting(main)
