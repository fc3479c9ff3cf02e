"""What the frozen and the value model said of the rows of a batch: computed once, before the batch is recorded."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from schemas.arrow import SCORES
from schemas.errors import StoreError
from storage.tables import Table


class Scores:
    def __init__(self, run_uri: str) -> None:
        self.table = Table(f"{run_uri}/scores.lance", SCORES)

    def write(self, rows: Sequence[dict[str, Any]]) -> tuple[str, ...]:
        """Write rows as uncommitted fragments; runs on the rank that computed them."""
        return self.table.write_fragments(rows) if rows else ()

    def commit(self, fragments: Sequence[str]) -> None:
        """Make them durable."""
        if fragments:
            self.table.commit(fragments, ["step"])

    def read(self, step: int, trace_rows: Sequence[int]) -> list[list[float]]:
        """Reference log-probs of the sampled tokens of each row, as scored for batch `step`.

        A batch that was scored and not recorded before a kill is scored again, to the same numbers. Raises StoreError
        for a row that was not scored.
        """
        self.table.refresh()
        found = self.table.read(["trace_row", "reference_logprobs"], where=f"step = {step}").to_pylist()
        scores = {row["trace_row"]: row["reference_logprobs"] for row in found}
        missing = [row for row in trace_rows if row not in scores]
        if missing:
            raise StoreError(f"{self.table.uri}: rows {missing[:8]} of batch {step} have no scores")
        return [scores[row] for row in trace_rows]
