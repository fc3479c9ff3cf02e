"""Train step: record the batch ahead of it, then train it. From the record on, the batch counts as trained, whatever is
killed: a resume trains it again from the checkpoint before it, to the same weights."""

from __future__ import annotations

import time

from schemas.protocols import ConversationTrainer, Trainer
from schemas.recipe import RLRecipe
from schemas.types import Batch, StepResult
from stages.algorithms.microbatches import deal_minibatches, plan_batch
from stages.workers.threads import to_its_end
from storage.batches import Batches


async def train_step(batch: Batch, batches: Batches, trainer: Trainer, recipe: RLRecipe) -> StepResult:
    """One batch: an optimizer step over all ranks for each of its minibatches."""
    start = time.perf_counter()
    groups = [segment.group_id for segment in batch.segments]
    minibatches = deal_minibatches(groups, recipe.loss.minibatches, f"{recipe.run.seed}-{batch.step}")
    lengths = [segment.num_tokens for segment in batch.segments]
    num_ranks, max_tokens = recipe.trainer.num_ranks, recipe.trainer.max_tokens_per_microbatch
    plan = plan_batch(lengths, minibatches, num_ranks, max_tokens)
    await to_its_end(batches.record, batch, plan, num_ranks)
    stored = time.perf_counter()
    metrics = await trainer.train(batch.step)
    return StepResult(
        metrics | {"train/store_seconds": stored - start, "train/step_seconds": time.perf_counter() - stored}
    )


async def sft_step(step: int, trainer: ConversationTrainer) -> StepResult:
    """One supervised optimizer step on the conversations that the seed chose for `step`."""
    return StepResult(await trainer.train_conversations(step))
