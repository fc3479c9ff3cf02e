"""METRICS.md names every metric that the code writes, and no other."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
GROUPS = "rollout|filtering|window|score|advantage|train|correction|mismatch|kl|refit|step|evaluate"


def test_every_metric_is_documented_and_every_documented_one_is_written() -> None:
    sources = [file.read_text() for layer in ("flows", "stages") for file in (ROOT / layer).rglob("*.py")]
    written = {name for text in sources for name in re.findall(rf'"((?:{GROUPS})/[a-z0-9_]+)"', text)}
    table = (ROOT / "METRICS.md").read_text()
    cells = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]
    documented = {name for cell in cells for name in re.findall(r"`([^`]+)`", cell)}
    by_reason = {"filtering/dropped_*", "filtering/failed_*"}
    assert by_reason <= documented and len(written) > 40
    assert documented - by_reason == written
