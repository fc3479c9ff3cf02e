"""ModelWorker: one training rank in a Ray actor. It reads the rows of a batch from the store and trains them.

Rank 0 sends the weights to the engines.
"""

from __future__ import annotations

import os
import random
import socket
from collections.abc import Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from schemas.errors import StoreError
from schemas.recipe import Recipe, RLRecipe, SFTRecipe
from stages.algorithms.logprobs import token_temperatures
from stages.algorithms.masks import action_mask
from stages.algorithms.microbatches import Place, largest_microbatch, plan_batch
from stages.workers.collate import TrainRow
from stages.workers.conversations import read_conversations
from stages.workers.device import Device
from stages.workers.policy import Policy
from stages.workers.reference import Reference
from stages.workers.weight_transfer import GlooSender, NcclSender
from storage.batches import Batches
from storage.scores import Scores
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
        self._policy = Policy(self._recipe, self._device)
        if isinstance(self._recipe, RLRecipe):
            self._batches = Batches(self._run_uri)
            self._traces = Traces(self._run_uri)
            self._scores = Scores(self._run_uri)
            if (reference := self._recipe.reference) is not None:
                self._reference = Reference(self._recipe.model, reference.path, self._device)
        elif isinstance(self._recipe, SFTRecipe):
            self._conversations = read_conversations(self._recipe.data, self._recipe.model)

    # Training

    def score(self, step: int, trace_rows: Sequence[int], num_tokens: Sequence[int]) -> tuple[str, ...]:
        """Log-probs of the reference for this rank's share of the rows; fragments of the scores table."""
        plan = plan_batch(num_tokens, [0] * len(num_tokens), self._num_ranks, self._max_tokens)
        count = max(place.microbatch for place in plan) + 1
        numbers = [[i for i, place in enumerate(plan) if place == (0, self._rank, index)] for index in range(count)]
        chosen = [trace_rows[i] for microbatch in numbers for i in microbatch]
        rows = dict(zip(chosen, self._rows(step, chosen, [0.0] * len(chosen)), strict=True))
        found = self._reference.logprobs([[rows[trace_rows[i]] for i in microbatch] for microbatch in numbers])
        return self._scores.write(
            [
                {"step": step, "trace_row": trace_rows[i], "reference_logprobs": logprobs}
                for microbatch, of_rows in zip(numbers, found, strict=True)
                for i, logprobs in zip(microbatch, of_rows, strict=True)
            ]
        )

    def train(self, step: int) -> dict[str, float]:
        """Train the stored batch `step`; returns its metrics, equal on all ranks."""
        recipe = self._recipe
        assert isinstance(recipe, RLRecipe)
        record = self._batches.read(step)
        if not record:
            raise StoreError(f"{self._batches.table.uri}: batch {step} is not in the store")
        plan = [Place(row["minibatch"], row["rank"], row["microbatch"]) for row in record]
        lengths = [row["num_tokens"] for row in record]
        if record[0]["num_ranks"] != self._num_ranks or largest_microbatch(lengths, plan) > self._max_tokens:
            plan = plan_batch(lengths, [place.minibatch for place in plan], self._num_ranks, self._max_tokens)
        mine = [position for position, place in enumerate(plan) if place.rank == self._rank]
        trace_rows = [record[position]["trace_row"] for position in mine]
        rows = self._rows(step, trace_rows, [record[position]["advantage"] for position in mine])
        if recipe.reference is not None:
            for row, logprobs in zip(rows, self._scores.read(step, trace_rows), strict=True):
                row.reference_logprobs = torch.zeros(len(row.token_ids))
                row.reference_logprobs[row.mask.sampled] = torch.tensor(logprobs)
        num_rollouts = len({(row["group_id"], row["rollout"]) for row in record})
        return self._policy.train(
            dict(zip(mine, rows, strict=True)), plan, [row["group_id"] for row in record], num_rollouts
        )

    def _rows(self, step: int, trace_rows: Sequence[int], outcomes: Sequence[float]) -> list[TrainRow]:
        assert isinstance(self._recipe, RLRecipe)
        bound = self._recipe.window.max_policy_lag
        return [
            TrainRow(
                trace["token_ids"],
                trace["logprobs"],
                token_temperatures(trace["spans"], trace["turns"], len(trace["token_ids"])),
                action_mask(trace["spans"], len(trace["token_ids"]), step, bound),
                outcome,
            )
            for trace, outcome in zip(self._traces.tokens(trace_rows), outcomes, strict=True)
        ]

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
        plan = plan_batch([len(row.token_ids) for row in chosen], [0] * size, self._num_ranks, self._max_tokens)
        mine = {position: row for position, row in enumerate(chosen) if plan[position].rank == self._rank}
        metrics = self._policy.train(mine, plan, [str(position) for position in range(size)], size)
        return {name: value for name, value in metrics.items() if name.startswith("train/")}  # nothing was sampled

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
        tied = bool(getattr(self._policy.model.config, "tie_word_embeddings", False))
        for name, tensor in self._policy.model.state_dict().items():
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
        checkpointer.save_model(self._policy.model, folder)
        checkpointer.save_optimizer(self._policy.optimizer, self._policy.model, folder, self._policy.schedule)
        state = {"cpu": torch.get_rng_state(), "kl_coef": self._policy.kl_coef}
        torch.save(state, Path(folder) / f"random-rank-{self._rank}.pt")
        checkpointer.close()

    def load(self, folder: str) -> None:
        """Continue from what `save` wrote, by any number of ranks."""
        checkpointer = self._checkpointer(folder, consolidated=False)
        checkpointer.load_model(self._policy.model, str(Path(folder) / "model"))
        checkpointer.load_optimizer(self._policy.optimizer, self._policy.model, folder, self._policy.schedule)
        self._policy.kl_coef = torch.load(Path(folder) / "random-rank-0.pt", weights_only=True)["kl_coef"]
        path = Path(folder) / f"random-rank-{self._rank}.pt"
        if path.is_file():
            torch.set_rng_state(torch.load(path, weights_only=True)["cpu"])
        checkpointer.close()

    def export(self, folder: str) -> str:
        """Write the weights in Hugging Face layout with tokenizer and chat template; returns the files' folder."""
        from transformers import AutoTokenizer

        checkpointer = self._checkpointer(folder, consolidated=True)
        tokenizer = AutoTokenizer.from_pretrained(self._recipe.model.path)
        checkpointer.save_model(self._policy.model, folder, tokenizer=tokenizer, is_final_checkpoint=True)
        checkpointer.close()
        return str(Path(folder) / "model" / "consolidated")

    def _checkpointer(self, folder: str, consolidated: bool) -> Any:
        from nemo_automodel.components.checkpoint.checkpointing import Checkpointer
        from nemo_automodel.components.checkpoint.config import CheckpointingConfig

        config = CheckpointingConfig(
            checkpoint_dir=folder, save_consolidated=consolidated, model_repo_id=self._recipe.model.path
        )
        return Checkpointer(config, dp_rank=self._rank, tp_rank=0, pp_rank=0)
