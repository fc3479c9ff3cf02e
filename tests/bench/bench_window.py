"""What the window gives in simulation: the table of modes, `auto` against the best fixed number, and its own cost.

    python tests/bench/bench_window.py

The last line is one JSON object. Times in the tables are virtual; only `microseconds_per_group` is measured.
"""

from __future__ import annotations

import itertools
import json
import math
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from stages.window import Window
from tests.simulation import Setting, compare_auto, print_table, row, run_virtual, stored_group, table

NUMBERS = (1, 1.25, 1.5, 2, 2.5, 3, 3.5, 5, 6)  # groups in flight, in batches
GRID = {
    "engine": (math.inf, 1.0),  # groups at full speed, in batches
    "batch_groups": (8, 32),
    "max_policy_lag": (0, 1, 3),
    "sigma": (0.5, 1.0),
    "mean": (0.4, 1.6, 6.4),
}


def grid() -> list[dict[str, Any]]:
    rows = []
    print("\nauto against the best fixed number of groups in flight (in batches), by useful throughput in `mask`")
    print("engine  batch  L  sigma  mean   best   auto  lowest..highest  auto / best")
    for engine, batch, lag, sigma, mean in itertools.product(*GRID.values()):
        if engine < math.inf and batch > 8:
            continue
        setting = Setting(
            batch_groups=batch,
            max_policy_lag=lag,
            sigma=sigma,
            mean=mean,
            engine_groups=engine * batch,
            batches=200 if batch == 8 else 130,
            warmup=80,
        )
        ratio, best, auto = compare_auto(setting, NUMBERS)
        places = [metrics["window/places"] / batch for metrics in auto.batches]
        print(
            f"{engine:>6g} {batch:>6} {lag:>2} {sigma:>6} {mean:>5} {best:>6} {auto.places / batch:>6.2f} "
            f"{min(places):>9.2f}..{max(places):<6.2f} {ratio:>11.3f}",
            flush=True,
        )
        rows.append({"engine": engine, "lag": lag, "ratio": ratio})
    return rows


def microseconds_per_group(batch_groups: int = 256, num_batches: int = 20) -> float:
    """Cost of one group's way through a window with four batches out, in admission order (the slower one)."""

    async def main() -> float:
        window = Window(Setting(stale="wait").window, batch_groups)
        sequences = itertools.count()
        started = time.perf_counter()
        for version in range(1, num_batches + 1):
            while window.places_held < window.capacity:
                sequence = next(sequences)
                await window.admit(sequence)
                window.finish(stored_group(sequence, [(version - 1, 1.0)]))
            for _ in range(batch_groups):
                await window.take()
            window.publish(version)
        return (time.perf_counter() - started) / (batch_groups * num_batches) * 1e6

    return run_virtual(main())


def main() -> None:
    print("8 groups a batch, L = 3, work of mean 1.6 train-times and sigma 1")
    modes = table(Setting())
    print_table(modes)
    print("\nthe same with an engine that runs 8 groups at full speed")
    full = [row(Setting(engine_groups=8, groups_in_flight=number)) for number in (16, 20, 24, 32, 40, "auto")]
    print_table(full)
    rows = grid()
    within = {
        f"auto_over_best_min_{name}": round(min(row["ratio"] for row in rows if chosen(row)), 3)
        for name, chosen in {
            "lag_1_3": lambda row: row["lag"] > 0 and row["engine"] == math.inf,
            "lag_1_3_full_engine": lambda row: row["lag"] > 0 and row["engine"] < math.inf,
            "lag_0": lambda row: row["lag"] == 0,
        }.items()
    }
    cost = round(microseconds_per_group(), 1)
    print(f"\n{cost} microseconds a group in the window")
    useful = {f"{row['stale']}_{row['groups_in_flight']}_{row['patience']}": row["useful"] for row in modes}
    print(json.dumps({"bench": "window", **within, "microseconds_per_group": cost, "useful_throughput": useful}))


if __name__ == "__main__":
    main()
