"""The ledger: what became of every dispatched group, folded from the `batches` and `outcomes` tables.

Nothing is counted twice and nothing is stored for it: the tables are the truth, a checkpoint only remembers how far
training had come.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from schemas.errors import StoreError
from storage.batches import Batches, Outcomes
from storage.traces import Traces


@dataclass(frozen=True)
class Ledger:
    """`trained`, `dropped`, `failed` and `pending` are disjoint and together are the sequences 0..dispatched-1.

    `finished` are the pending ones whose traces are stored: they are served before anything new is admitted.
    `lost` are the pending ones without traces: they are dispatched again.
    """

    dispatched: int
    trained: dict[int, int]
    dropped: dict[int, str]
    failed: dict[int, str]
    finished: frozenset[int]

    @property
    def pending(self) -> frozenset[int]:
        return frozenset(range(self.dispatched)) - self.trained.keys() - self.dropped.keys() - self.failed.keys()

    @property
    def lost(self) -> list[int]:
        return sorted(self.pending - self.finished)

    def summary(self) -> dict[str, object]:
        """Counts as plain numbers, dropped and failed by reason."""
        return {
            "dispatched": self.dispatched,
            "trained": len(self.trained),
            "dropped": dict(Counter(self.dropped.values())),
            "failed": dict(Counter(self.failed.values())),
            "pending": len(self.pending),
            "finished": len(self.finished),
        }


def read_ledger(traces: Traces, batches: Batches, outcomes: Outcomes, dispatched: int = 0) -> Ledger:
    """Fold the tables. `dispatched` is the driver's own count where it knows more than the tables show.

    Raises StoreError when a group was trained in two batches, or is trained and also dropped or failed.
    """
    trained: dict[int, int] = {}
    for row in batches.table.read(["step", "sequence"]).to_pylist():
        earlier = trained.setdefault(row["sequence"], row["step"])
        if earlier != row["step"]:
            raise StoreError(f"group {row['sequence']} is in batch {earlier} and again in batch {row['step']}")
    ended: dict[str, dict[int, str]] = {"dropped": {}, "failed": {}}
    for row in outcomes.table.read(["sequence", "outcome", "reason"]).to_pylist():
        ended[row["outcome"]][row["sequence"]] = row["reason"]
    dropped, failed = ended["dropped"], ended["failed"]
    for one, other, names in (
        (trained, dropped, "trained and dropped"),
        (trained, failed, "trained and failed"),
        (dropped, failed, "dropped and failed"),
    ):
        if both := sorted(one.keys() & other.keys()):
            raise StoreError(f"groups {both[:8]} are both {names}")
    stored = set(traces.table.read(["sequence"])["sequence"].to_pylist())
    seen = stored | trained.keys() | dropped.keys() | failed.keys()
    return Ledger(
        dispatched=max(dispatched, max(seen, default=-1) + 1),
        trained=trained,
        dropped=dropped,
        failed=failed,
        finished=frozenset(stored - trained.keys() - dropped.keys() - failed.keys()),
    )
