"""Filtering: the groups of the next batch. What cannot or should not be trained is dropped and counted by reason, and
its place goes back to the rollout stage, which fills it again."""

from __future__ import annotations

import asyncio
from collections import Counter

from schemas.errors import RolloutsFailed
from schemas.protocols import GroupSource
from schemas.recipe import FilteringConfig, RolloutConfig, WindowConfig
from schemas.types import Filtered, Outcome, StoredGroup
from stages.algorithms.estimators import is_constant
from storage.batches import Outcomes


async def filtering(
    window: GroupSource,
    outcomes: Outcomes,
    step: int,
    rollout: RolloutConfig,
    staleness: WindowConfig,
    config: FilteringConfig,
) -> Filtered | None:
    """`batch_groups` groups that pass; None when the stream ended before. Raises RolloutsFailed when none do."""
    kept: list[StoredGroup] = []
    rejected: list[Outcome] = []
    in_a_row = Counter[str]()
    while len(kept) < rollout.batch_groups:
        group = await window.take()
        if group is None:
            tail = [Outcome(g.sequence, g.group_id, "dropped", "tail", g.num_sampled) for g in kept]
            await asyncio.to_thread(outcomes.record, rejected + tail, step)
            return None
        outcome = judge(group, step, rollout, staleness, config)
        if outcome is None:
            kept.append(group)
            in_a_row.clear()
            continue
        rejected.append(outcome)
        in_a_row[outcome.kind] += 1
        _stop_if_hopeless(outcome, in_a_row, rollout, config)
        window.release(group)
    await asyncio.to_thread(outcomes.record, rejected, step)
    return Filtered(kept, _metrics(rejected))


def judge(
    group: StoredGroup, step: int, rollout: RolloutConfig, staleness: WindowConfig, config: FilteringConfig
) -> Outcome | None:
    """Why a group is not trained at batch `step`; None when it is."""

    def rejected(kind: str, reason: str, detail: str = "") -> Outcome:
        return Outcome(group.sequence, group.group_id, kind, reason, group.num_sampled, detail)  # type: ignore[arg-type]

    usable = group.rewards()
    if not usable:
        reason, _ = Counter(str(segment.status) for segment in group.segments).most_common(1)[0]
        detail = next((segment.error for segment in group.segments if segment.error), "")
        return rejected("failed", reason, detail)
    if len(usable) < rollout.min_group_size:
        return rejected("dropped", "below_min_group_size")
    if staleness.stale == "drop" and step - group.oldest_version > staleness.max_policy_lag:
        return rejected("dropped", "stale")
    if config.zero_variance == "drop" and is_constant(list(group.scores().values())):
        return rejected("dropped", "zero_variance")
    return None


def _stop_if_hopeless(
    outcome: Outcome, in_a_row: Counter[str], rollout: RolloutConfig, config: FilteringConfig
) -> None:
    for kind, limit, key in (
        ("failed", rollout.max_failed_groups, "rollout.max_failed_groups"),
        ("dropped", config.max_dropped_groups, "filtering.max_dropped_groups"),
    ):
        if in_a_row[kind] >= limit:
            raise RolloutsFailed(
                f"{in_a_row[kind]} groups in a row were {kind}, the last one ({outcome.group_id}) because of "
                f"{outcome.reason}: {outcome.detail or 'see `moltflow traces show`'} (limit: {key})"
            )


def _metrics(rejected: list[Outcome]) -> dict[str, float]:
    counts = Counter(f"filtering/{outcome.kind}_{outcome.reason}" for outcome in rejected)
    tokens = sum(outcome.num_tokens for outcome in rejected)
    return {name: float(count) for name, count in counts.items()} | {
        "filtering/rejected_groups": float(len(rejected)),
        "filtering/rejected_tokens": float(tokens),
    }
