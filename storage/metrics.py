"""`metrics.jsonl`: one line per batch, appended; later lines of the same step add to it."""

from __future__ import annotations

import json
from typing import Any

from storage.runs import RunFolder


def append_metrics(run: RunFolder, line: dict[str, Any]) -> None:
    start = "\n" if run.has("metrics.jsonl") else ""  # so that a line which a kill cut short ends before this one
    with run.fs.open(f"{run.path}/metrics.jsonl", "ab") as file:
        file.write((start + json.dumps(line)).encode())


def read_metrics(run: RunFolder) -> list[dict[str, Any]]:
    """The lines in step order, one per step. A line that a kill cut short is left out."""
    if not run.has("metrics.jsonl"):
        return []
    by_step: dict[int, dict[str, Any]] = {}
    for text in run.fs.cat_file(f"{run.path}/metrics.jsonl").decode().splitlines():
        try:
            line = json.loads(text)
        except json.JSONDecodeError:
            continue
        by_step[line["step"]] = by_step.get(line["step"], {}) | line
    return [by_step[step] for step in sorted(by_step)]
