"""Filtering: the groups of the next batch. What cannot or should not be trained is dropped and counted by reason, and
its place goes back to the rollout stage, which fills it again."""

from __future__ import annotations

from collections import Counter
from statistics import fmean

from schemas.errors import RolloutsFailed
from schemas.protocols import GroupSource
from schemas.recipe import FilteringConfig, RolloutConfig, WindowConfig
from schemas.types import Filtered, Outcome, StoredGroup
from stages.algorithms.estimators import is_constant
from stages.workers.threads import to_its_end
from storage.batches import Outcomes

TOO_SMALL = "below_min_group_size"


async def filtering(
    window: GroupSource,
    outcomes: Outcomes,
    step: int,
    rollout: RolloutConfig,
    staleness: WindowConfig,
    config: FilteringConfig,
) -> Filtered | None:
    """`batch_groups` groups that pass; None when the stream ended before. Raises RolloutsFailed when none do.

    Groups of a batch that did not fill up stay pending in the ledger, where a resume finds them.
    """
    kept: list[StoredGroup] = []
    rewards: list[float] = []
    rejected: list[Outcome] = []
    in_a_row = Counter[str]()
    try:
        while len(kept) < rollout.batch_groups:
            group = await window.take()
            if group is None:
                return None
            rewards += group.rewards().values()
            outcome = judge(group, step, rollout, staleness, config)
            if outcome is None:
                kept.append(group)
                in_a_row.clear()
                continue
            rejected.append(outcome)
            window.release(group)
            _stop_if_hopeless(outcome, in_a_row, rollout, config)
    finally:
        await to_its_end(outcomes.record, rejected, step)
    return Filtered(kept, _metrics(rejected, rewards))


def judge(
    group: StoredGroup, step: int, rollout: RolloutConfig, staleness: WindowConfig, config: FilteringConfig
) -> Outcome | None:
    """Why a group is not trained at batch `step`; None when it is."""

    def rejected(kind: str, reason: str, detail: str = "") -> Outcome:
        return Outcome(group.sequence, group.group_id, kind, reason, group.num_sampled, detail)  # type: ignore[arg-type]

    def error(*statuses: str) -> str:
        return next((s.error for s in group.segments if s.error and (s.status in statuses or not statuses)), "")

    usable = group.rewards()
    if not usable:
        reason, _ = Counter(str(segment.status) for segment in group.segments).most_common(1)[0]
        return rejected("failed", reason, error(reason))
    if len(usable) < rollout.min_group_size:
        return rejected("dropped", TOO_SMALL, error())
    if step - group.newest_version > staleness.max_policy_lag:
        return rejected("dropped", "stale")  # whatever the way with stale tokens: none of its tokens could be trained
    if staleness.stale == "drop" and step - group.oldest_version > staleness.max_policy_lag:
        return rejected("dropped", "stale")
    if config.zero_variance == "drop" and is_constant(list(group.scores().values())):
        return rejected("dropped", "zero_variance")
    return None


def _stop_if_hopeless(
    outcome: Outcome, in_a_row: Counter[str], rollout: RolloutConfig, config: FilteringConfig
) -> None:
    key, limit = "filtering.max_dropped_groups", config.max_dropped_groups
    if outcome.kind == "failed" or outcome.reason == TOO_SMALL:
        key, limit = "rollout.max_failed_groups", rollout.max_failed_groups
    in_a_row[key] += 1
    if in_a_row[key] >= limit:
        ended = "failed" if outcome.kind == "failed" else "was dropped"
        raise RolloutsFailed(
            f"{limit} groups and none between them that could be trained; the last one ({outcome.group_id}) {ended} "
            f"because of {outcome.reason}: {outcome.detail or 'see `moltflow traces show`'} (limit: {key} = {limit})"
        )


def _metrics(rejected: list[Outcome], rewards: list[float]) -> dict[str, float]:
    """The reward is over all that succeeded, dropped groups too: a mean of what was kept would hide what was learnt."""
    counts = Counter(f"filtering/{outcome.kind}_{outcome.reason}" for outcome in rejected)
    tokens = sum(outcome.num_tokens for outcome in rejected)
    return {name: float(count) for name, count in counts.items()} | {
        "rollout/reward_mean": fmean(rewards),
        "filtering/rejected_groups": float(len(rejected)),
        "filtering/rejected_tokens": float(tokens),
    }
