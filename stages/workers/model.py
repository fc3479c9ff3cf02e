"""ModelWorker: one training rank in a Ray actor. It reads the rows of a batch from the store and trains them.

What a step needs is decided before its first backward: the rows and microbatches (the stored plan), the mask, and
the denominator over all ranks. Every rank runs the same number of microbatches. Rank 0 sends weights to the engines.
"""

from __future__ import annotations

import math
import os
import random
import socket
import time
from collections.abc import Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from schemas.errors import StoreError, TrainingDiverged
from schemas.recipe import CorrectionConfig, Recipe, RLRecipe, SFTRecipe
from stages.algorithms.correction import correction_weights, log_ratio, mismatch_sums
from stages.algorithms.logprobs import token_temperatures
from stages.algorithms.losses import LOSSES, policy_gradient, token_mean
from stages.algorithms.masks import action_mask
from stages.algorithms.microbatches import plan_microbatches
from stages.workers.automodel import build_policy, clip_gradients
from stages.workers.collate import Microbatch, TrainRow, collate
from stages.workers.conversations import read_conversations
from stages.workers.device import Device
from stages.workers.head import ScoringHead
from stages.workers.optimizer import build_optimizer
from stages.workers.weight_transfer import GlooSender, NcclSender
from storage.batches import Batches
from storage.traces import Traces


class ModelWorker:
    def __init__(self, recipe: Recipe, device: Device, rank: int, run_uri: str) -> None:
        self._recipe = recipe
        self._device = device
        self._rank = rank
        self._num_ranks = recipe.trainer.num_ranks
        self._run_uri = run_uri
        self._max_tokens = recipe.trainer.max_tokens_per_microbatch
        self._sender: GlooSender | NcclSender | None = None
        self._policy_loss = LOSSES[recipe.loss.type] if isinstance(recipe, RLRecipe) else policy_gradient

    def free_address(self) -> tuple[str, int]:
        """An address on this rank's machine where ranks or engines can meet."""
        host = "127.0.0.1" if self._device.kind == "cpu" else socket.gethostbyname(socket.gethostname())
        with socket.socket() as probe:
            probe.bind((host, 0))
            return host, int(probe.getsockname()[1])

    def setup(self, address: str, port: int) -> None:
        """Join the process group and load the model; collective over all ranks."""
        os.environ |= {"RANK": str(self._rank), "WORLD_SIZE": str(self._num_ranks), "LOCAL_RANK": "0"}
        os.environ |= {"MASTER_ADDR": address, "MASTER_PORT": str(port)}
        if self._device.kind == "cpu":
            torch.set_num_threads(1)
        dist.init_process_group(
            self._device.process_group,
            init_method=f"tcp://{address}:{port}",
            rank=self._rank,
            world_size=self._num_ranks,
            timeout=timedelta(seconds=self._recipe.trainer.timeout_seconds),
        )
        torch.manual_seed(self._recipe.run.seed)
        self._sharded = build_policy(self._recipe.model, self._device)
        self._model = self._sharded.model
        self._torch_device = next(self._model.parameters()).device
        self._score = ScoringHead(self._model)
        self._optimizer, self._schedule = build_optimizer(
            self._model, self._recipe.trainer.optimizer, self._recipe.max_steps
        )
        if isinstance(self._recipe, RLRecipe):
            self._batches = Batches(self._run_uri)
            self._traces = Traces(self._run_uri)
        elif isinstance(self._recipe, SFTRecipe):
            self._conversations = read_conversations(self._recipe.data, self._recipe.model)

    # Training

    def train(self, step: int) -> dict[str, float]:
        """Train the stored batch `step`; returns its metrics, equal on all ranks."""
        recipe = self._recipe
        assert isinstance(recipe, RLRecipe)
        record = self._batches.read(step)
        if not record:
            raise StoreError(f"{self._batches.table.uri}: batch {step} is not in the store")
        if record[0]["num_ranks"] != self._num_ranks or _largest(record) > self._max_tokens:
            plan = plan_microbatches([row["num_tokens"] for row in record], self._num_ranks, self._max_tokens)
            record = [
                row | {"rank": rank, "microbatch": microbatch}
                for row, (rank, microbatch) in zip(record, plan, strict=True)
            ]
        mine = [row for row in record if row["rank"] == self._rank]
        tokens = self._traces.tokens([row["trace_row"] for row in mine])
        rows = [
            TrainRow(
                trace["token_ids"],
                trace["logprobs"],
                token_temperatures(trace["spans"], trace["turns"], len(trace["token_ids"])),
                action_mask(trace["spans"], len(trace["token_ids"]), step, recipe.window.max_policy_lag),
                row["advantage"],
            )
            for row, trace in zip(mine, tokens, strict=True)
        ]
        microbatches = [row["microbatch"] for row in mine]
        return self._optimize(rows, microbatches, recipe.correction)

    def train_conversations(self, step: int) -> dict[str, float]:
        """Supervised step `step`: the policy gradient with advantage 1 on the assistant's tokens, uncorrected."""
        recipe = self._recipe
        assert isinstance(recipe, SFTRecipe)
        count, size = len(self._conversations), recipe.data.batch_size
        epochs: dict[int, list[int]] = {}
        chosen = []
        for position in range(step * size, (step + 1) * size):
            epoch, index = divmod(position, count)
            if epoch not in epochs:
                epochs[epoch] = list(range(count))
                random.Random(f"{recipe.run.seed}-{epoch}").shuffle(epochs[epoch])
            chosen.append(self._conversations[epochs[epoch][index]])
        plan = plan_microbatches([len(row.token_ids) for row in chosen], self._num_ranks, self._max_tokens)
        mine = [(row, microbatch) for row, (rank, microbatch) in zip(chosen, plan, strict=True) if rank == self._rank]
        off = CorrectionConfig(level="off")
        metrics = self._optimize([row for row, _ in mine], [microbatch for _, microbatch in mine], off)
        return {name: value for name, value in metrics.items() if name.startswith("train/")}  # nothing was sampled

    def _optimize(
        self, rows: Sequence[TrainRow], plan: Sequence[int], correction: CorrectionConfig
    ) -> dict[str, float]:
        """One optimizer step over all ranks' rows. A batch without any gradient leaves the weights as they are; one
        with a gradient that is not finite raises TrainingDiverged before it touches them."""
        start = time.perf_counter()
        totals = self._reduce(_totals(rows, plan), maxima=("microbatches", "max_lag"))
        sums = {"loss": 0.0, "kept": 0.0, "abs": 0.0, "k3": 0.0, "logprob": 0.0, "max_abs": 0.0}
        for index in range(int(totals["microbatches"])):
            chosen = [row for row, microbatch in zip(rows, plan, strict=True) if microbatch == index]
            batch = collate(chosen, self._torch_device)
            self._loss(batch, correction, totals["trained"], sums).backward()
        sums = self._reduce(sums, maxima=("max_abs",))
        learning_rate = self._schedule.get_last_lr()[0]
        grad_norm = clip_gradients(self._sharded, self._recipe.trainer.optimizer.max_grad_norm, self._num_ranks)
        if not math.isfinite(grad_norm):
            raise TrainingDiverged(f"the gradient norm is {grad_norm} (loss {sums['loss']}); the weights are unchanged")
        if grad_norm > 0:
            self._optimizer.step()
            self._schedule.step()
        self._optimizer.zero_grad(set_to_none=True)
        return _metrics(totals, sums, grad_norm, learning_rate, time.perf_counter() - start)

    def _loss(
        self, batch: Microbatch, correction: CorrectionConfig, denominator: float, sums: dict[str, float]
    ) -> torch.Tensor:
        logprobs = self._score(batch, batch.trained).logprobs
        ratio_log = log_ratio(logprobs, batch.rollout_logprobs, batch.trained)
        weights = correction_weights(ratio_log, correction.level, correction.low, correction.high)
        loss = token_mean(self._policy_loss(logprobs, batch.advantages, weights), batch.trained, denominator)
        mismatch = mismatch_sums(ratio_log, batch.trained)
        sums["loss"] += float(loss.detach())
        sums["kept"] += float(((weights > 0) & batch.trained).sum())
        sums["abs"] += float(mismatch["abs"])
        sums["k3"] += float(mismatch["k3"])
        sums["max_abs"] = max(sums["max_abs"], float(ratio_log.abs().max()))
        sums["logprob"] += float(torch.where(batch.trained, logprobs.detach(), 0.0).sum())
        return loss * self._num_ranks  # FSDP averages gradients over ranks; the denominator already is global

    def _reduce(self, values: dict[str, float], maxima: Sequence[str]) -> dict[str, float]:
        """Sums over ranks, in one collective for the sums and one for the few maxima."""
        for names, operation in (
            ([name for name in values if name not in maxima], dist.ReduceOp.SUM),
            (list(maxima), dist.ReduceOp.MAX),
        ):
            tensor = torch.tensor([values[name] for name in names], dtype=torch.float64, device=self._torch_device)
            dist.all_reduce(tensor, op=operation)
            values = values | dict(zip(names, tensor.tolist(), strict=True))
        return values

    # Weights

    def connect(self, address: str, port: int, world_size: int, timeout_seconds: float) -> None:
        """Open the broadcast to the engines; rank 0 only."""
        if self._device.weight_transfer == "gloo":
            self._sender = GlooSender(address, port, world_size, timeout_seconds)
        else:
            self._sender = NcclSender(address, port, world_size)

    def weight_names(self) -> tuple[list[str], list[str], list[list[int]]]:
        """Names, dtypes and shapes of what `send_weights` sends, in its order."""
        entries = [(name, list(tensor.shape)) for name, tensor in self._weights()]
        return [name for name, _ in entries], [self._recipe.model.dtype] * len(entries), [shape for _, shape in entries]

    def send_weights(self) -> None:
        """Gather each tensor on all ranks, one after another, and broadcast it from rank 0."""
        gathered = self._gathered()
        if self._rank == 0:
            assert self._sender is not None, "connect comes before send_weights"
            self._sender.send(gathered)
        else:
            for _ in gathered:
                pass

    def _weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        tied = bool(getattr(self._model.config, "tie_word_embeddings", False))
        for name, tensor in self._model.state_dict().items():
            if torch.is_floating_point(tensor) and not (tied and name == "lm_head.weight"):
                yield name, tensor

    @torch.no_grad()
    def _gathered(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in self._weights():
            full = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
            yield name, full.detach().to(getattr(torch, self._recipe.model.dtype)).contiguous()

    # Checkpoints

    def save(self, folder: str) -> None:
        """Write weights, optimizer, schedule and random state to `folder`; collective over all ranks."""
        checkpointer = self._checkpointer(folder, consolidated=False)
        checkpointer.save_model(self._model, folder)
        checkpointer.save_optimizer(self._optimizer, self._model, folder, self._schedule)
        torch.save({"cpu": torch.get_rng_state()}, Path(folder) / f"random-rank-{self._rank}.pt")
        checkpointer.close()

    def load(self, folder: str) -> None:
        """Continue from what `save` wrote, by any number of ranks."""
        checkpointer = self._checkpointer(folder, consolidated=False)
        checkpointer.load_model(self._model, str(Path(folder) / "model"))
        checkpointer.load_optimizer(self._optimizer, self._model, folder, self._schedule)
        state = Path(folder) / f"random-rank-{self._rank}.pt"
        if state.is_file():
            torch.set_rng_state(torch.load(state, weights_only=True)["cpu"])
        checkpointer.close()

    def export(self, folder: str) -> str:
        """Write the weights in Hugging Face layout with tokenizer and chat template; returns the files' folder."""
        from transformers import AutoTokenizer

        checkpointer = self._checkpointer(folder, consolidated=True)
        tokenizer = AutoTokenizer.from_pretrained(self._recipe.model.path)
        checkpointer.save_model(self._model, folder, tokenizer=tokenizer, is_final_checkpoint=True)
        checkpointer.close()
        return str(Path(folder) / "model" / "consolidated")

    def _checkpointer(self, folder: str, consolidated: bool) -> Any:
        from nemo_automodel.components.checkpoint.checkpointing import Checkpointer
        from nemo_automodel.components.checkpoint.config import CheckpointingConfig

        config = CheckpointingConfig(
            checkpoint_dir=folder, save_consolidated=consolidated, model_repo_id=self._recipe.model.path
        )
        return Checkpointer(config, dp_rank=self._rank, tp_rank=0, pp_rank=0)


def _largest(record: Sequence[dict[str, Any]]) -> int:
    """Padded tokens of the largest microbatch of several rows in a stored plan; 0 when each row runs alone."""
    lengths: dict[tuple[int, int], list[int]] = {}
    for row in record:
        lengths.setdefault((row["rank"], row["microbatch"]), []).append(row["num_tokens"])
    return max((len(rows) * max(rows) for rows in lengths.values() if len(rows) > 1), default=0)


def _totals(rows: Sequence[TrainRow], plan: Sequence[int]) -> dict[str, float]:
    """This rank's share of what must be known before the first backward."""
    return {
        "rows": float(len(rows)),
        "tokens": float(sum(len(row.token_ids) for row in rows)),
        "sampled": float(sum(int(row.mask.sampled.sum()) for row in rows)),
        "trained": float(sum(int(row.mask.trained.sum()) for row in rows)),
        "lag": float(sum(int(row.mask.lag[row.mask.trained].sum()) for row in rows)),
        "max_lag": float(max((int((row.mask.lag * row.mask.trained).max()) for row in rows), default=0)),
        "microbatches": float(max(plan, default=-1) + 1),
    }


def _metrics(
    totals: dict[str, float], sums: dict[str, float], grad_norm: float, learning_rate: float, seconds: float
) -> dict[str, float]:
    trained = max(totals["trained"], 1.0)
    return {
        "train/loss": sums["loss"],
        "train/grad_norm": grad_norm,
        "train/learning_rate": learning_rate,
        "train/updated": float(grad_norm > 0),
        "train/logprob_mean": sums["logprob"] / trained,
        "train/rows": totals["rows"],
        "train/tokens": totals["tokens"],
        "train/trained_tokens": totals["trained"],
        "train/stale_token_share": 1 - totals["trained"] / max(totals["sampled"], 1.0),
        "train/lag_mean": totals["lag"] / trained,
        "train/lag_max": totals["max_lag"],
        "train/compute_seconds": seconds,
        "correction/masked_token_share": (totals["trained"] - sums["kept"]) / trained,
        "mismatch/abs_mean": sums["abs"] / trained,
        "mismatch/abs_max": sums["max_abs"],
        "mismatch/k3": sums["k3"] / trained,
    }
