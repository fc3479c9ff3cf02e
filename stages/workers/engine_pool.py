"""EnginePool: the vLLM engines as one plain async object, for what concerns all of them: starting and refits."""

from __future__ import annotations

import asyncio
from itertools import accumulate
from typing import Any

import ray

from schemas.recipe import RLRecipe
from stages.workers.calls import call_all, kill
from stages.workers.device import Device
from stages.workers.engine import EngineWorker

STOP_SECONDS = 10.0


class EnginePool:
    def __init__(self, recipe: RLRecipe, device: Device, run_attempt: int) -> None:
        args = recipe.engine.args
        num_gpus = device.num_gpus * args.get("tensor_parallel_size", 1) * args.get("pipeline_parallel_size", 1)
        self.num_gpus = num_gpus * recipe.engine.num_engines
        actor = ray.remote(EngineWorker).options(num_cpus=device.num_cpus, num_gpus=num_gpus)
        self.actors = [actor.remote(recipe, device, index, run_attempt) for index in range(recipe.engine.num_engines)]
        self._names = [f"engine {index}" for index in range(len(self.actors))]
        self._start_timeout = recipe.engine.timeout_seconds
        self._refit_timeout = recipe.refit.timeout_seconds
        self._num_processes: list[int] = []

    async def ready(self) -> None:
        self._num_processes = await self._all("ready", timeout_seconds=self._start_timeout)

    @property
    def transfer_world_size(self) -> int:
        """Processes that take part in a refit: all engine processes and trainer rank 0."""
        return 1 + sum(self._num_processes)

    async def connect(self, address: str, port: int) -> None:
        """Every engine process joins the broadcast from trainer rank 0, which sits at rank 0."""
        offsets = list(accumulate(self._num_processes, initial=1))
        timeout = self._refit_timeout
        references = [
            actor.connect.remote(address, port, offset, self.transfer_world_size, timeout)
            for actor, offset in zip(self.actors, offsets, strict=False)
        ]
        await call_all(self._names, references, timeout)

    async def pause(self, clear_cache: bool) -> None:
        """Freeze requests in flight and open the weight update."""
        await self._all("pause", clear_cache)

    async def receive(self, names: list[str], dtypes: list[str], shapes: list[list[int]]) -> None:
        """Take the weights that the trainer is sending."""
        await self._all("receive", names, dtypes, shapes)

    async def resume(self, version: int) -> None:
        """Close the weight update as policy version `version` and let requests go on."""
        await self._all("resume", version)

    async def _all(self, method: str, *arguments: Any, timeout_seconds: float | None = None) -> list[Any]:
        references = [getattr(actor, method).remote(*arguments) for actor in self.actors]
        return await call_all(self._names, references, timeout_seconds or self._refit_timeout)

    async def close(self) -> None:
        """Stop the engines in order; what does not stop in time is killed."""
        stopping = [asyncio.wait_for(_await(actor.stop.remote()), STOP_SECONDS) for actor in self.actors]
        await asyncio.gather(*stopping, return_exceptions=True)
        for actor in self.actors:
            kill(actor)


async def _await(reference: Any) -> None:
    await reference
