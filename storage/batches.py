"""The write-ahead record of batches, and the outcomes of groups that were not trained.

A batch is committed here before its training starts; from then on it is trained exactly once in the history of the
weights, whatever is killed and whenever. Everything that training needs beside the traces is in the record, so live
training, resume and replay read the same thing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from schemas.arrow import BATCHES, OUTCOMES
from schemas.errors import StoreError
from schemas.types import Batch, Outcome
from storage.tables import Table


class Batches:
    def __init__(self, run_uri: str, run_attempt: int = 0) -> None:
        self.table = Table(f"{run_uri}/batches.lance", BATCHES)
        self._run_attempt = run_attempt

    def record(self, batch: Batch, plan: Sequence[tuple[int, int, int]], num_ranks: int) -> None:
        """Commit a batch. `plan` holds (minibatch, rank, microbatch) by segment, planned for `num_ranks` ranks."""
        self.table.append(
            [
                {
                    "step": batch.step,
                    "position": position,
                    "sequence": segment.sequence,
                    "group_id": segment.group_id,
                    "rollout": segment.rollout,
                    "segment": segment.segment,
                    "trace_row": segment.row,
                    "num_tokens": segment.num_tokens,
                    "advantage": segment.advantage,
                    "minibatch": minibatch,
                    "num_ranks": num_ranks,
                    "rank": rank,
                    "microbatch": microbatch,
                    "run_attempt": self._run_attempt,
                }
                for position, (segment, (minibatch, rank, microbatch)) in enumerate(
                    zip(batch.segments, plan, strict=True)
                )
            ]
        )

    def read(self, step: int) -> list[dict[str, Any]]:
        """Rows of one batch in batch order. Raises StoreError when it was recorded more than once."""
        self.table.refresh()
        rows = sorted(self.table.read(where=f"step = {step}").to_pylist(), key=lambda row: row["position"])
        if [row["position"] for row in rows] != list(range(len(rows))):
            attempts = sorted({row["run_attempt"] for row in rows})
            raise StoreError(f"{self.table.uri}: batch {step} was recorded more than once, by run attempts {attempts}")
        return rows

    def steps(self, start: int = 0) -> list[int]:
        """Steps of the committed batches from `start` on, ascending."""
        table = self.table.read(["step"], where=f"step >= {start}")
        return sorted(set(table["step"].to_pylist()))


class Outcomes:
    def __init__(self, run_uri: str, run_attempt: int = 0) -> None:
        self.table = Table(f"{run_uri}/outcomes.lance", OUTCOMES)
        self._run_attempt = run_attempt

    def record(self, outcomes: Sequence[Outcome], step: int) -> None:
        """Commit that groups will not be trained, decided while batch `step` was under way."""
        self.table.append(
            [
                {
                    "sequence": outcome.sequence,
                    "group_id": outcome.group_id,
                    "outcome": outcome.kind,
                    "reason": outcome.reason,
                    "step": step,
                    "num_tokens": outcome.num_tokens,
                    "detail": outcome.detail,
                    "run_attempt": self._run_attempt,
                }
                for outcome in outcomes
            ]
        )
