"""Filtering: what is dropped and why, and that the batch is filled up, or the run stopped with the reason."""

from __future__ import annotations

import asyncio
from collections import deque
from pathlib import Path

import pytest

from schemas.errors import RolloutsFailed
from schemas.recipe import FilteringConfig, RolloutConfig, WindowConfig
from schemas.types import Filtered, Status, StoredGroup
from stages.advantage import advantage
from stages.filtering import filtering, judge
from storage.batches import Outcomes
from storage.traces import Traces
from tests.builders import group, recipe, segment, trace_row

KEEP, DROP = FilteringConfig(zero_variance="keep"), FilteringConfig(zero_variance="drop")
ROLLOUT = RolloutConfig(batch_groups=2, group_size=4, min_group_size=2, max_failed_groups=3)
L_1 = WindowConfig(max_policy_lag=1, stale="mask")


class Source:
    """The train side of a window with these groups; None ends the stream."""

    def __init__(self, *groups: StoredGroup | None) -> None:
        self._groups = deque(groups)
        self.released: list[int] = []

    async def take(self) -> StoredGroup | None:
        if not self._groups:
            await asyncio.Event().wait()  # more is on its way
        return self._groups.popleft()

    def release(self, group: StoredGroup) -> None:
        self.released.append(group.sequence)


def verdict(group: StoredGroup, *, step: int = 0, window: WindowConfig = L_1, config: FilteringConfig = KEEP) -> str:
    outcome = judge(group, step, ROLLOUT, window, config)
    return "kept" if outcome is None else f"{outcome.kind}: {outcome.reason}: {outcome.detail}".rstrip(": ")


def recorded(outcomes: Outcomes) -> list[tuple[int, str, str, int]]:
    rows = outcomes.table.read().to_pylist()
    return [(row["sequence"], row["outcome"], row["reason"], row["step"]) for row in rows]


@pytest.fixture
def outcomes(tmp_path: Path) -> Outcomes:
    return Outcomes(str(tmp_path))


# ---- one group ----


def test_a_group_of_which_enough_succeeded_is_kept() -> None:
    failed = segment(3, None, status=Status.INFRASTRUCTURE_ERROR, num_sampled=0, version=-1)
    assert verdict(group(0, segment(0, 1.0), segment(1, 0.0), segment(2, 0.0), failed)) == "kept"


def test_a_group_without_success_failed_for_its_commonest_reason() -> None:
    timeouts = [segment(i, None, status=Status.TIMEOUT, error="no end within 5 s") for i in (1, 2)]
    error = segment(0, None, status=Status.AGENT_ERROR, error="KeyError: 'x'")
    assert verdict(group(0, error, *timeouts)) == "failed: timeout: no end within 5 s"


def test_a_group_with_too_few_successes_is_dropped_and_tells_what_failed() -> None:
    error = segment(1, None, status=Status.AGENT_ERROR, error="KeyError: 'x'")
    assert verdict(group(0, segment(0, 1.0), error)) == "dropped: below_min_group_size: KeyError: 'x'"


def test_a_rollout_of_several_segments_counts_once_towards_the_group_size() -> None:
    assert verdict(group(0, segment(0, 1.0), segment(0, 1.0, index=1))) == "dropped: below_min_group_size"


def test_a_rollout_that_sampled_nothing_does_not_count() -> None:
    assert verdict(group(0, segment(0, 1.0), segment(1, 0.0, num_sampled=0))) == "dropped: below_min_group_size"


def test_drop_discards_a_group_with_a_token_past_the_bound() -> None:
    window = WindowConfig(max_policy_lag=1, stale="drop")
    old = group(0, segment(0, 1.0, version=4), segment(1, 0.0, version=5))
    assert verdict(old, step=5, window=window) == "kept"  # oldest token lags 5 - 4 = 1
    assert verdict(old, step=6, window=window) == "dropped: stale"  # 6 - 4 = 2


@pytest.mark.parametrize("stale", ["mask", "wait"])
def test_without_drop_old_tokens_are_masked_later_but_a_group_of_nothing_else_is_dropped(stale: str) -> None:
    window = WindowConfig(max_policy_lag=1, stale=stale)
    mixed = group(0, segment(0, 1.0, version=0), segment(1, 0.0, version=8))
    assert verdict(mixed, step=9, window=window) == "kept"
    assert verdict(mixed, step=10, window=window) == "dropped: stale"


def test_a_failed_rollout_does_not_make_its_group_stale() -> None:
    failed = segment(2, None, status=Status.TIMEOUT, version=0)
    old = group(0, segment(0, 1.0, version=5), segment(1, 0.0, version=5), failed)
    assert verdict(old, step=6, window=WindowConfig(max_policy_lag=1, stale="drop")) == "kept"


def test_a_group_without_variance_is_dropped_when_the_recipe_says_so() -> None:
    constant = group(0, rewards=[0.4, 0.4, 0.4])
    assert verdict(constant, config=DROP) == "dropped: zero_variance"
    assert verdict(constant, config=KEEP) == "kept"


def test_variance_is_that_of_the_unshaped_score() -> None:
    # all wrong, but the length penalty made the rewards differ: training on it would follow the penalty alone
    shaped = [segment(i, reward, score=0.0) for i, reward in enumerate([0.0, -0.2, -1.0])]
    assert verdict(group(0, *shaped), config=DROP) == "dropped: zero_variance"
    different = [segment(i, 0.0, score=score) for i, score in enumerate([1.0, 0.0])]
    assert verdict(group(0, *different), config=DROP) == "kept"


# ---- a batch ----


async def fill(source: Source, outcomes: Outcomes, config: FilteringConfig = DROP) -> Filtered | None:
    return await asyncio.wait_for(filtering(source, outcomes, 7, ROLLOUT, L_1, config), 10)


GOOD = [group(sequence, rewards=[1, 0], version=7) for sequence in range(10)]
CONSTANT = [group(sequence, rewards=[1, 1], version=7) for sequence in range(10)]
FAILED = [
    group(sequence, *[segment(i, None, status=Status.AGENT_ERROR, error="KeyError: 'x'") for i in range(2)])
    for sequence in range(10)
]


async def test_what_is_dropped_is_counted_released_and_filled_up(outcomes: Outcomes) -> None:
    source = Source(CONSTANT[0], GOOD[1], FAILED[2], CONSTANT[3], GOOD[4], GOOD[5])
    filtered = await fill(source, outcomes)
    assert filtered is not None
    assert [kept.sequence for kept in filtered.groups] == [1, 4]
    assert filtered.metrics == {
        "filtering/dropped_zero_variance": 2,
        "rollout/reward_mean": 0.75,  # (2 + 1 + 2 + 1) / 8: dropped groups count too
        "filtering/failed_agent_error": 1,
        "filtering/rejected_groups": 3,
        "filtering/rejected_tokens": 3 * 2 * 4,  # groups x rollouts x sampled tokens
    }
    assert source.released == [0, 2, 3]
    assert recorded(outcomes) == [
        (0, "dropped", "zero_variance", 7),
        (2, "failed", "agent_error", 7),
        (3, "dropped", "zero_variance", 7),
    ]


async def test_ratios_are_over_whole_groups_however_many_rollouts_failed_or_segments_they_have(
    outcomes: Outcomes,
) -> None:
    # of three groups one is dropped: its four rollouts, one of them failed and one of two segments, are one group
    dropped = group(
        0,
        segment(0, 0.0, num_sampled=5, version=7),
        segment(1, 0.0, num_sampled=6, version=7),
        segment(1, 0.0, index=1, num_sampled=7, version=7),
        segment(2, 0.0, num_sampled=8, version=7),
        segment(3, None, status=Status.TIMEOUT, num_sampled=9, version=7),
    )
    source = Source(dropped, GOOD[1], GOOD[2])  # and more in flight, of which nothing is counted before it is whole
    filtered = await fill(source, outcomes)
    assert filtered is not None and filtered.metrics == {
        "filtering/dropped_zero_variance": 1,
        "rollout/reward_mean": 2 / 7,  # one reward for each rollout that has one: 0, 0, 0, then 1, 0 and 1, 0
        "filtering/rejected_groups": 1,
        "filtering/rejected_tokens": 5 + 6 + 7 + 8 + 9,
    }


async def test_the_reward_that_is_logged_is_the_one_that_is_trained(outcomes: Outcomes, tmp_path: Path) -> None:
    # a recipe's own 0.75 x correct + 0.25 x style; means of the components would say 0.5, their sums 1
    traces = Traces(str(tmp_path))
    for sequence in range(2):
        rows = [
            trace_row(sequence, 0, reward=0.75, version=7, reward_components='{"correct": 1.0, "style": 0.0}'),
            trace_row(sequence, 1, reward=0.25, version=7, reward_components='{"correct": 0.0, "style": 1.0}'),
        ]
        traces.commit([traces.write(rows)])
    filtered = await fill(Source(*traces.groups()), outcomes)
    assert filtered is not None and filtered.metrics["rollout/reward_mean"] == 0.5
    batch = advantage(filtered, 7, recipe(advantage={"type": "dr_grpo"}))
    assert [segment.advantage for segment in batch.segments] == [0.25, -0.25] * 2  # 0.75 and 0.25 around 0.5
    assert batch.metrics["advantage/reward_mean"] == 0.5


async def test_a_batch_that_drops_nothing_records_nothing(outcomes: Outcomes) -> None:
    version = outcomes.table.version
    filtered = await fill(Source(*GOOD[:2]), outcomes)
    assert filtered is not None and filtered.metrics["filtering/rejected_groups"] == 0
    assert outcomes.table.version == version


async def test_a_stream_that_ends_gives_no_batch_and_leaves_its_tail_pending(outcomes: Outcomes) -> None:
    source = Source(CONSTANT[0], GOOD[1], None)
    assert await fill(source, outcomes) is None
    assert recorded(outcomes) == [(0, "dropped", "zero_variance", 7)]
    assert source.released == [0]


async def test_failures_in_a_row_stop_the_run_with_the_reason_and_are_recorded(outcomes: Outcomes) -> None:
    with pytest.raises(RolloutsFailed) as stopped:
        await fill(Source(GOOD[0], *FAILED[1:4]), outcomes)
    assert str(stopped.value) == (
        "3 groups and none between them that could be trained; the last one (0000-000003-0) failed because of "
        "agent_error: KeyError: 'x' (limit: rollout.max_failed_groups = 3)"
    )
    # recorded, so that a resume does not meet the same failures again and stop at once
    assert [sequence for sequence, *_ in recorded(outcomes)] == [1, 2, 3]


async def test_a_group_that_passes_starts_the_count_anew(outcomes: Outcomes) -> None:
    filtered = await fill(Source(*FAILED[:2], GOOD[2], *FAILED[3:5], GOOD[5]), outcomes)
    assert filtered is not None and len(filtered.groups) == 2


async def test_too_small_groups_count_as_failures(outcomes: Outcomes) -> None:
    small = [
        group(i, segment(0, 1.0), segment(1, None, status=Status.TIMEOUT, error="no end within 5 s")) for i in range(2)
    ]
    with pytest.raises(RolloutsFailed, match=r"below_min_group_size: no end within 5 s \(limit: rollout.max_failed"):
        await fill(Source(small[0], FAILED[2], small[1]), outcomes)


async def test_dropping_all_groups_stops_the_run_too(outcomes: Outcomes) -> None:
    config = FilteringConfig(zero_variance="drop", max_dropped_groups=4)
    with pytest.raises(RolloutsFailed, match=r"zero_variance.*limit: filtering.max_dropped_groups = 4"):
        await fill(Source(*CONSTANT), outcomes, config)


async def test_what_was_judged_is_recorded_when_the_run_is_cancelled(outcomes: Outcomes) -> None:
    running = asyncio.create_task(filtering(Source(CONSTANT[0]), outcomes, 7, ROLLOUT, L_1, DROP))
    await asyncio.sleep(0.05)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert recorded(outcomes) == [(0, "dropped", "zero_variance", 7)]
