"""The trace store: one row per trajectory segment, appended by agent hosts, committed by the driver.

The driver only ever reads the light columns; tokens are read by the ranks that train them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import pyarrow as pa

from schemas.arrow import TRACES
from schemas.types import Shard, Status, StoredGroup, StoredSegment
from storage.tables import Table

LIGHT_COLUMNS = (
    "sequence",
    "group_id",
    "rollout",
    "segment",
    "status",
    "error",
    "reward",
    "reward_components",
    "score",
    "num_tokens",
    "num_sampled",
    "oldest_version",
    "newest_version",
)
TOKEN_COLUMNS = ("token_ids", "logprobs", "spans", "turns")


class Traces:
    """Traces of one run. `name` tells training (`traces`) from evaluation (`evaluations`)."""

    def __init__(self, run_uri: str, name: str = "traces") -> None:
        self.name = name
        self.table = Table(f"{run_uri}/{name}.lance", TRACES)

    def write(self, rows: Sequence[dict[str, Any]]) -> Shard:
        """Write rows of finished groups as uncommitted fragments; runs where the groups ran."""
        return Shard(self.table.write_fragments(rows), tuple(dict.fromkeys(row["group_id"] for row in rows)))

    def commit(self, shards: Sequence[Shard]) -> list[StoredGroup]:
        """Make shards durable; returns their groups in dispatch order."""
        fragments = [fragment for shard in shards for fragment in shard.fragments]
        return _groups(self.table.commit(fragments, LIGHT_COLUMNS)) if fragments else []

    def groups(self, where: str | None = None) -> list[StoredGroup]:
        """All committed groups in dispatch order, filtered by a SQL expression over the columns."""
        return _groups(self.table.read(LIGHT_COLUMNS, where))

    def tokens(self, rows: Sequence[int]) -> list[dict[str, Any]]:
        """`token_ids`, `logprobs`, `spans` and `turns` of the given row ids, in their order."""
        self.table.refresh()
        return self.table.take(rows, TOKEN_COLUMNS)


def _groups(table: pa.Table) -> list[StoredGroup]:
    rows_by_group: dict[tuple[int, str], list[dict[str, Any]]] = defaultdict(list)
    for row in table.to_pylist():
        rows_by_group[row["sequence"], row["group_id"]].append(row)
    return [
        StoredGroup(
            sequence=sequence,
            group_id=group_id,
            segments=tuple(_segment(row) for row in sorted(rows, key=lambda r: (r["rollout"], r["segment"]))),
        )
        for (sequence, group_id), rows in sorted(rows_by_group.items())
    ]


def _segment(row: dict[str, Any]) -> StoredSegment:
    return StoredSegment(
        row=row["_rowid"],
        rollout=row["rollout"],
        segment=row["segment"],
        status=Status(row["status"]),
        reward=row["reward"],
        score=row["score"],
        num_tokens=row["num_tokens"],
        num_sampled=row["num_sampled"],
        oldest_version=row["oldest_version"],
        newest_version=row["newest_version"],
        error=row["error"],
        reward_components=row["reward_components"],
    )
