"""Small records and stores for tests: rows as an agent host writes them, and groups as the driver sees them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from schemas.recipe import RLRecipe, SamplingConfig
from schemas.types import GroupTask, Prompt, Status, StoredGroup, StoredSegment


def recipe(**parts: Any) -> RLRecipe:
    """A recipe with what has no default, and with `parts`."""
    values: dict[str, Any] = {
        "kind": "rl",
        "run": {"name": "test"},
        "model": {"path": "model"},
        "prompts": {"path": "prompts.jsonl"},
        "agent": {"entry": "agent:Agent"},
        "rollout": {"sampling": {"max_tokens": 8}},
        "max_steps": 1,
    }
    return RLRecipe.model_validate(values | parts)


def segment(
    rollout: int = 0,
    reward: float | None = 1.0,
    *,
    status: Status = Status.OK,
    index: int = 0,
    row: int = 0,
    score: float | None = None,
    num_tokens: int = 10,
    num_sampled: int = 4,
    version: int = 0,
    error: str | None = None,
    components: str = "{}",
) -> StoredSegment:
    """One committed trace row. Without a score of its own it has the reward, as the turn loop writes it."""
    if not status.trainable:
        reward = score = None
    return StoredSegment(
        row=row,
        rollout=rollout,
        segment=index,
        status=status,
        reward=reward,
        score=reward if score is None else score,
        num_tokens=num_tokens,
        num_sampled=num_sampled,
        oldest_version=version,
        newest_version=version,
        error=error,
        reward_components=components,
    )


def group(sequence: int, *segments: StoredSegment, rewards: Sequence[float] = (), version: int = 0) -> StoredGroup:
    """A finished group of the given segments, or of one rollout for each reward."""
    made = segments or tuple(segment(rollout, reward, version=version) for rollout, reward in enumerate(rewards))
    return StoredGroup(sequence, f"0000-{sequence:06d}-0", made)


def task(sequence: int, group_size: int = 2) -> GroupTask:
    prompt = Prompt(sequence, [{"role": "user", "content": f"prompt {sequence}"}])
    return GroupTask(sequence, f"0000-{sequence:06d}-0", prompt, group_size, SamplingConfig(), seed=0)


def trace_row(
    sequence: int, rollout: int = 0, *, segment: int = 0, reward: float | None = 1.0, version: int = 0, **changes: Any
) -> dict[str, Any]:
    """A row of the trace store. Prompt [1, 2], then sampled [30 + rollout, 40] with log-probs -0.25 and -0.5."""
    return {
        "sequence": sequence,
        "group_id": f"0000-{sequence:06d}-0",
        "rollout": rollout,
        "segment": segment,
        "opened": "new",
        "run_attempt": 0,
        "status": "ok",
        "error": None,
        "token_ids": [1, 2, 30 + rollout, 40],
        "logprobs": [0.0, 0.0, -0.25, -0.5],
        "spans": [{"start": 2, "end": 4, "turn": 0, "version": version}],
        "num_tokens": 4,
        "num_sampled": 2,
        "oldest_version": version,
        "newest_version": version,
        "turns": [],
        "reward": reward,
        "reward_components": "{}",
        "score": reward,
        "messages": '[{"role": "user", "content": "sort 21"}, {"role": "assistant", "content": "12"}]',
        "tools": "[]",
        "label": "null",
        "info": "{}",
        "image_hashes": [],
        "seed": 0,
        "started_at": 0.0,
        "seconds": 0.0,
    } | changes
