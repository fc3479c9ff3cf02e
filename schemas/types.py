"""Small frozen records that travel along the edges of the graph. None of them holds tokens or tensors.

Prompt -> GroupTask -> StoredGroup (of StoredSegments) -> Batch -> StepResult
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Literal

from schemas.chat import ParsedTurn
from schemas.recipe import SamplingConfig


class Status(StrEnum):
    """How a rollout ended. Only `OK` and `TRUNCATED` rollouts have a reward and can be trained."""

    OK = "ok"
    TRUNCATED = "truncated"
    AGENT_ERROR = "agent_error"
    NO_REWARD = "no_reward"
    TIMEOUT = "timeout"
    INFRASTRUCTURE_ERROR = "infrastructure_error"
    PROMPT_TOO_LONG = "prompt_too_long"

    @property
    def trainable(self) -> bool:
        return self in (Status.OK, Status.TRUNCATED)


@dataclass(frozen=True, slots=True)
class Prompt:
    """One dataset row. Example: `Prompt(index=3, messages=[{"role": "user", "content": "2+2"}], label="4")`."""

    index: int
    messages: list[dict[str, Any]]
    label: Any = None
    tools: list[dict[str, Any]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class GroupTask:
    """A prompt to attempt `group_size` times. `group_id` is epoch-prompt-attempt, e.g. `0000-000017-0`."""

    sequence: int
    group_id: str
    prompt: Prompt
    group_size: int
    sampling: SamplingConfig
    seed: int


@dataclass(frozen=True, slots=True)
class StoredSegment:
    """The light columns of one committed trace row: what the driver needs to filter and weigh it."""

    row: int
    rollout: int
    segment: int
    status: Status
    reward: float | None
    score: float | None
    num_tokens: int
    num_sampled: int
    oldest_version: int
    newest_version: int
    error: str | None = None
    reward_components: str = "{}"  # JSON object


@dataclass(frozen=True, slots=True)
class StoredGroup:
    """A finished group whose traces are committed. Segments are in (rollout, segment) order."""

    sequence: int
    group_id: str
    segments: tuple[StoredSegment, ...]

    @property
    def trainable(self) -> tuple[StoredSegment, ...]:
        """Segments of the rollouts that succeeded and sampled at least one token."""
        return tuple(s for s in self.segments if s.status.trainable and s.num_sampled > 0)

    @property
    def oldest_version(self) -> int:
        """Oldest policy version among the tokens that can be trained; -1 when there are none."""
        return min((s.oldest_version for s in self.trainable), default=-1)

    @property
    def newest_version(self) -> int:
        """Newest policy version among the tokens that can be trained; -1 when there are none."""
        return max((s.newest_version for s in self.trainable), default=-1)

    @property
    def num_sampled(self) -> int:
        return sum(s.num_sampled for s in self.segments)

    @property
    def num_failed(self) -> int:
        """Rollouts that did not succeed, one each however many segments they have."""
        return len({s.rollout for s in self.segments if not s.status.trainable})

    def rewards(self) -> dict[int, float]:
        """Reward by rollout, one each however many segments it has."""
        return {s.rollout: s.reward for s in self.trainable if s.reward is not None}

    def scores(self) -> dict[int, float]:
        """Unshaped score by rollout; the reward where there is no score."""
        return self.rewards() | {s.rollout: s.score for s in self.trainable if s.score is not None}


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a dispatched group that is not trained: `kind` is dropped or failed, `reason` is counted."""

    sequence: int
    group_id: str
    kind: Literal["dropped", "failed"]
    reason: str
    num_tokens: int = 0
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Shard:
    """What an agent host hands over: fragments written but not committed, and the groups whose rows they hold."""

    fragments: tuple[str, ...]
    group_ids: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Filtered:
    """The groups of the next batch, in the window's order, and the counts of what was dropped on the way."""

    groups: Sequence[StoredGroup]
    metrics: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class TrainableSegment:
    """One row of a batch: where its tokens lie and the advantage that all its sampled tokens share."""

    sequence: int
    group_id: str
    rollout: int
    segment: int
    row: int
    num_tokens: int
    advantage: float


@dataclass(frozen=True, slots=True)
class Batch:
    """What is trained between two refits. Each batch is followed by one refit, so `step` is also the trainer's policy
    version at its start."""

    step: int
    segments: tuple[TrainableSegment, ...]
    metrics: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class StepResult:
    """Metrics of one stage or step, under their documented names."""

    metrics: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class ParseOptions:
    """How a sampled turn becomes a chat message: `tools` that may be called, `stop` the string that ended it."""

    tools: list[dict[str, Any]] = field(default_factory=list)
    stop: str | None = None


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """One turn for an engine: exact token ids in, a sample for each of `request_ids` out, parsed if `parse` is set."""

    request_ids: tuple[str, ...]
    token_ids: Sequence[int]
    sampling: SamplingConfig
    parse: ParseOptions | None = None


@dataclass(frozen=True, slots=True)
class Generation:
    """What an engine sampled: `token_ids` with the `logprobs` it gave them, and the policy version by span.

    `versions` holds (version, start, end) over `token_ids`. `finish_reason` is stop, length or abort; `stop` is the
    string of the request that ended it; `parsed` is there if the request asked for it. Example:
    `Generation("r1", [53, 54, 2], [-0.1, -0.7, -0.01], ((3, 0, 2), (4, 2, 3)), "stop")`: a refit came before the last.
    """

    request_id: str
    token_ids: Sequence[int]
    logprobs: Sequence[float]
    versions: tuple[tuple[int, int, int], ...]
    finish_reason: str
    error: str | None = None
    stop: str | None = None
    parsed: ParsedTurn | None = None
