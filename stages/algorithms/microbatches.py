"""The microbatch plan: which rank trains which row in which forward-backward. Pure and deterministic."""

from __future__ import annotations

from collections.abc import Sequence


def plan_microbatches(num_tokens: Sequence[int], num_ranks: int, max_tokens: int) -> list[tuple[int, int]]:
    """(rank, microbatch) of each row.

    Longest rows first, each to the rank with the fewest tokens so far; inside a rank, rows fill microbatches of at most
    `max_tokens` padded tokens (rows x longest row). A row longer than that runs alone. Ranks may end up with different
    counts, even none: they run the same number of passes, padded with rows of weight zero.
    """
    loads = [0] * num_ranks
    open_microbatch = [(-1, 0, 0)] * num_ranks  # index, rows, longest row
    plan: list[tuple[int, int]] = [(0, 0)] * len(num_tokens)
    for row in sorted(range(len(num_tokens)), key=lambda i: (-num_tokens[i], i)):
        rank = min(range(num_ranks), key=lambda r: (loads[r], r))
        loads[rank] += num_tokens[row]
        index, rows, longest = open_microbatch[rank]
        if index < 0 or (rows + 1) * longest > max_tokens:
            index, rows, longest = index + 1, 0, num_tokens[row]
        open_microbatch[rank] = (index, rows + 1, longest)
        plan[row] = (rank, index)
    return plan
