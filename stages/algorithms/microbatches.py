"""Which row is trained in which optimizer step, by which rank, in which forward-backward. Pure and deterministic."""

from __future__ import annotations

import random
from collections.abc import Hashable, Sequence
from typing import NamedTuple


class Place(NamedTuple):
    """Where a row is trained: optimizer step of the batch, rank, forward-backward of the rank in that step."""

    minibatch: int
    rank: int
    microbatch: int


def deal_minibatches(groups: Sequence[Hashable], num_minibatches: int, seed: str) -> list[int]:
    """The minibatch of each row. Groups stay whole and are dealt in an order drawn from `seed`: groups of a batch come
    in the order in which they finished, so its first ones are its short ones."""
    order = list(dict.fromkeys(groups))
    random.Random(seed).shuffle(order)
    minibatch = {group: index % num_minibatches for index, group in enumerate(order)}
    return [minibatch[group] for group in groups]


def plan_batch(num_tokens: Sequence[int], minibatches: Sequence[int], num_ranks: int, max_tokens: int) -> list[Place]:
    """The place of each row: `plan_microbatches` within each minibatch."""
    plan: dict[int, Place] = {}
    for minibatch in sorted(set(minibatches)):
        members = [row for row, other in enumerate(minibatches) if other == minibatch]
        places = plan_microbatches([num_tokens[row] for row in members], num_ranks, max_tokens)
        plan |= {row: Place(minibatch, *place) for row, place in zip(members, places, strict=True)}
    return [plan[row] for row in range(len(num_tokens))]


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


def largest_microbatch(num_tokens: Sequence[int], plan: Sequence[Place]) -> int:
    """Padded tokens of the largest microbatch of several rows in a plan; 0 when each row runs alone."""
    lengths: dict[Place, list[int]] = {}
    for place, count in zip(plan, num_tokens, strict=True):
        lengths.setdefault(place, []).append(count)
    return max((len(rows) * max(rows) for rows in lengths.values() if len(rows) > 1), default=0)
