"""The microbatch plan: which rank trains which row in which pass."""

from __future__ import annotations

from collections import Counter, defaultdict

from hypothesis import given, settings
from hypothesis import strategies as st

from stages.algorithms.microbatches import plan_microbatches


def test_longest_rows_go_first_each_to_the_rank_with_the_fewest_tokens() -> None:
    # 7 -> rank 0, 5 -> rank 1 (0 tokens), 4 -> rank 1 (5 < 7), 2 -> rank 0 (7 < 9)
    assert plan_microbatches([5, 2, 7, 4], 2, max_tokens=100) == [(1, 0), (0, 0), (0, 0), (1, 0)]


def test_a_microbatch_holds_at_most_max_tokens_with_its_padding() -> None:
    # 6, 4, 3, 1 on one rank: 6 and 4 pad to 2 x 6 = 12, a third would make 18; then 3 and 1 pad to 2 x 3 = 6
    assert plan_microbatches([4, 1, 6, 3], 1, max_tokens=12) == [(0, 0), (0, 1), (0, 0), (0, 1)]


def test_a_row_longer_than_max_tokens_runs_alone() -> None:
    assert plan_microbatches([20, 1, 1], 1, max_tokens=8) == [(0, 0), (0, 1), (0, 1)]


def test_fewer_rows_than_ranks_leave_ranks_without_rows() -> None:
    assert plan_microbatches([3], 4, max_tokens=8) == [(0, 0)]
    assert plan_microbatches([], 4, max_tokens=8) == []


def test_equal_rows_keep_their_order() -> None:
    assert plan_microbatches([2, 2, 2, 2], 2, max_tokens=4) == [(0, 0), (1, 0), (0, 0), (1, 0)]


@settings(deadline=None)
@given(
    lengths=st.lists(st.integers(1, 50), max_size=40),
    num_ranks=st.integers(1, 9),
    max_tokens=st.integers(1, 200),
)
def test_any_number_of_rows_fits_any_number_of_ranks(lengths: list[int], num_ranks: int, max_tokens: int) -> None:
    plan = plan_microbatches(lengths, num_ranks, max_tokens)
    assert plan == plan_microbatches(lengths, num_ranks, max_tokens)
    assert len(plan) == len(lengths)  # every row once

    rows: dict[tuple[int, int], list[int]] = defaultdict(list)
    for length, place in zip(lengths, plan, strict=True):
        rows[place].append(length)
    assert all(len(inside) * max(inside) <= max_tokens or len(inside) == 1 for inside in rows.values())

    passes: dict[int, set[int]] = defaultdict(set)
    for rank, microbatch in rows:
        assert 0 <= rank < num_ranks
        passes[rank].add(microbatch)
    assert all(indices == set(range(len(indices))) for indices in passes.values())  # no empty pass inside a rank

    loads = Counter(dict.fromkeys(range(num_ranks), 0))
    for (rank, _), inside in rows.items():
        loads[rank] += sum(inside)
    assert max(loads.values()) - min(loads.values()) <= max(lengths, default=0)
