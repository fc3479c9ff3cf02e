"""Score: the forward passes of frozen models that a batch needs before its advantages: log-probs of the reference.

The old policy's log-probs need no stage: the ranks compute them as the first thing of a batch with several optimizer
steps, and with one they are the detached ones of the training forward.
"""

from __future__ import annotations

from schemas.protocols import Trainer
from schemas.types import Filtered, StepResult
from stages.workers.threads import to_its_end
from storage.scores import Scores


async def score(filtered: Filtered, step: int, trainer: Trainer, scores: Scores) -> StepResult:
    """Score the rows that batch `step` will have."""
    segments = [segment for group in filtered.groups for segment in group.trainable]
    fragments = await trainer.score(step, [s.row for s in segments], [s.num_tokens for s in segments])
    await to_its_end(scores.commit, fragments)
    return StepResult({"score/rows": float(len(segments))})
