"""Every recipe of recipes/estimators on the quickstart's task: held-out exact match before and after some batches. Ends
with a table and one line of JSON; exit code 1 if one of them did not rise.

    make bench BENCH=estimators           needs `make demo` before: it starts from the same warm model
    .venv/bin/python tests/bench/bench_estimators.py --steps 60 ppo gspo
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from storage.metrics import read_metrics
from storage.runs import RunFolder

RECIPES = Path("recipes/estimators")
WARM = Path("recipes/quickstart/build/warm/model/consolidated")
TEACHER = Path("runs/demo/exports/final/model/consolidated")


def measure(name: str, steps: int) -> dict[str, float | str]:
    """One run from the warm model; its held-out reward before and after."""
    file = RECIPES / f"{name}.yaml" if name != "grpo" else Path("recipes/quickstart/rl.yaml")
    folder = RunFolder(f"runs/estimator-{name}")
    folder.remove()
    start = time.time()
    overrides = [f"run.name={folder.name}", f"max_steps={steps}"]
    subprocess.run([sys.executable, "-m", "flows.cli", "train", str(file), *overrides], check=True, stdout=sys.stderr)
    seconds = time.time() - start
    lines = read_metrics(folder)
    rewards = [line["evaluate/reward_mean"] for line in lines if "evaluate/reward_mean" in line]
    found = {"estimator": name, "before": rewards[0], "after": rewards[-1], "steps": steps, "seconds": round(seconds)}
    if name == "on_policy_distill":
        kl = [line["kl/mean"] for line in lines if "kl/mean" in line]
        found |= {"kl_before": round(kl[0], 4), "kl_after": round(sum(kl[-5:]) / len(kl[-5:]), 4)}
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("names", nargs="*", default=["grpo", *sorted(file.stem for file in RECIPES.glob("*.yaml"))])
    options = parser.parse_args()
    if missing := [str(folder) for folder in (WARM, TEACHER) if not folder.is_dir()]:
        raise SystemExit(f"missing: {', '.join(missing)}; run `make demo` first")
    rows = []
    for name in options.names:
        rows.append(measure(name, options.steps))
        print(json.dumps(rows[-1]), flush=True)
    print("\n| estimator | reward before | after | steps | seconds |\n|---|---|---|---|---|")
    for row in rows:
        print(f"| {row['estimator']} | {row['before']:.3f} | {row['after']:.3f} | {row['steps']} | {row['seconds']} |")
    holds = all(row["after"] > row["before"] for row in rows)  # type: ignore[operator]
    print(json.dumps({"bench": "estimators", "rows": rows, "holds": holds}))
    raise SystemExit(0 if holds else 1)


if __name__ == "__main__":
    main()
