"""The demo with three seeds: held-out exact match must rise from under 0.25 to at least 0.6 each time, and
orchestration must stay within 5 % of the critical path. Ends with one line of JSON; exit code 1 if that does not hold.

    make bench BENCH=demo
"""

from __future__ import annotations

import json
import subprocess
import sys

SEEDS = (0, 1, 2)


def main() -> None:
    lines = []
    for seed in SEEDS:
        done = subprocess.run(
            [sys.executable, "-m", "flows.demo", "--seed", str(seed)], stdout=subprocess.PIPE, text=True, check=True
        )
        lines.append(json.loads(done.stdout.splitlines()[-1]))
        print(json.dumps(lines[-1]))
    result = {
        "reward_before_max": max(line["reward_before"] for line in lines),
        "reward_after_min": min(line["reward_after"] for line in lines),
        "orchestration_max": max(line["shares"]["orchestration"] for line in lines),
        "seconds_per_step": [line["seconds_per_step"] for line in lines],
    }
    result["holds"] = (
        result["reward_before_max"] < 0.25 and result["reward_after_min"] >= 0.6 and result["orchestration_max"] <= 0.05
    )
    print(json.dumps(result))
    raise SystemExit(0 if result["holds"] else 1)


if __name__ == "__main__":
    main()
