"""TrainerGroup: the training ranks as one plain async object. Each method runs on all ranks at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import ray

from schemas.recipe import Recipe
from stages.workers.calls import call, call_all, kill
from stages.workers.device import Device
from stages.workers.model import ModelWorker


class TrainerGroup:
    def __init__(self, recipe: Recipe, device: Device, run_uri: str) -> None:
        self.num_gpus = device.num_gpus * recipe.trainer.num_ranks
        actor = ray.remote(ModelWorker).options(num_cpus=device.num_cpus, num_gpus=device.num_gpus)
        self._actors = [actor.remote(recipe, device, rank, run_uri) for rank in range(recipe.trainer.num_ranks)]
        self._names = [f"trainer rank {rank}" for rank in range(len(self._actors))]
        self._timeout = recipe.trainer.timeout_seconds

    async def ready(self) -> None:
        """Wait until all ranks have joined and loaded the model."""
        await self._all("setup", *await self.free_address())

    async def free_address(self) -> tuple[str, int]:
        address, port = await call(self._names[0], self._actors[0].free_address.remote(), self._timeout)
        return address, port

    async def score(self, step: int, rows: Sequence[int], num_tokens: Sequence[int]) -> list[str]:
        """Score trace rows for batch `step` by the reference; fragments of the scores table, to be committed."""
        return [fragment for written in await self._all("score", step, rows, num_tokens) for fragment in written]

    async def train(self, step: int) -> dict[str, float]:
        """Train stored batch `step`; its metrics."""
        return dict((await self._all("train", step))[0])

    async def train_conversations(self, step: int) -> dict[str, float]:
        """Supervised step `step`; its metrics."""
        return dict((await self._all("train_conversations", step))[0])

    async def connect(self, address: str, port: int, world_size: int, timeout_seconds: float) -> None:
        """Rank 0's end of the broadcast to the engines."""
        connected = self._actors[0].connect.remote(address, port, world_size, timeout_seconds)
        await call(self._names[0], connected, timeout_seconds)

    async def weight_names(self) -> tuple[list[str], list[str], list[list[int]]]:
        """Names, dtypes and shapes of the weights in the order in which they are sent."""
        names, dtypes, shapes = await call(self._names[0], self._actors[0].weight_names.remote(), self._timeout)
        return names, dtypes, shapes

    async def send_weights(self, timeout_seconds: float) -> None:
        """Broadcast the weights; the engines must be receiving."""
        await self._all("send_weights", timeout_seconds=timeout_seconds)

    async def save(self, folder: str) -> None:
        await self._all("save", folder)

    async def load(self, folder: str) -> None:
        await self._all("load", folder)

    async def export(self, folder: str) -> str:
        """Write the weights in Hugging Face layout; the folder that holds them."""
        return str((await self._all("export", folder))[0])

    async def _all(self, method: str, *arguments: Any, timeout_seconds: float | None = None) -> list[Any]:
        references = [getattr(actor, method).remote(*arguments) for actor in self._actors]
        return await call_all(self._names, references, timeout_seconds or self._timeout)

    def close(self) -> None:
        for actor in self._actors:
            kill(actor)
