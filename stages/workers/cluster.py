"""Opens and closes what a flow computes with: Ray, engines, trainer, agent hosts. Start-ups run side by side."""

from __future__ import annotations

import asyncio
import functools
import logging
import os
import shutil
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import ray

from schemas.errors import RecipeError
from schemas.recipe import Recipe, RLRecipe
from stages.workers.agent_pool import AgentPool
from stages.workers.device import Device, select_device
from stages.workers.engine_pool import EnginePool
from stages.workers.threads import to_its_end
from stages.workers.trainer_group import TrainerGroup

OBJECT_STORE_BYTES = 100 << 20
"""Only references and light records travel, so a local Ray needs little."""


@dataclass(frozen=True)
class Cluster:
    """What an RL flow drives."""

    engines: EnginePool
    agents: AgentPool
    trainer: TrainerGroup


@asynccontextmanager
async def open_cluster(recipe: RLRecipe, run_uri: str, run_attempt: int) -> AsyncIterator[Cluster]:
    """Everything ready, and engines and trainer connected; all of it is gone afterwards, whatever happened."""
    device = select_device(recipe.device)
    async with _open_ray(device):
        engines = EnginePool(recipe, device, run_attempt)
        trainer = TrainerGroup(recipe, device, run_uri)
        agents = AgentPool(recipe, run_uri, run_attempt, engines.actors)
        try:
            check_gpus(engines.num_gpus + trainer.num_gpus, ray.cluster_resources().get("GPU", 0))
            await asyncio.gather(engines.ready(), trainer.ready(), agents.ready())
            address, port = await trainer.free_address()
            await asyncio.gather(
                trainer.connect(address, port, engines.transfer_world_size, recipe.refit.timeout_seconds),
                engines.connect(address, port),
            )
            yield Cluster(engines, agents, trainer)
        finally:
            agents.close()
            trainer.close()
            await engines.close()


@asynccontextmanager
async def open_trainer(recipe: Recipe, run_uri: str) -> AsyncIterator[TrainerGroup]:
    """The training ranks alone, ready."""
    device = select_device(recipe.device)
    async with _open_ray(device):
        trainer = TrainerGroup(recipe, device, run_uri)
        try:
            check_gpus(trainer.num_gpus, ray.cluster_resources().get("GPU", 0))
            await trainer.ready()
            yield trainer
        finally:
            trainer.close()


@asynccontextmanager
async def open_engines(recipe: RLRecipe, run_attempt: int) -> AsyncIterator[EnginePool]:
    """The engines alone, ready, with the weights that they loaded."""
    device = select_device(recipe.device)
    async with _open_ray(device):
        engines = EnginePool(recipe, device, run_attempt)
        try:
            check_gpus(engines.num_gpus, ray.cluster_resources().get("GPU", 0))
            await engines.ready()
            yield engines
        finally:
            await engines.close()


def check_gpus(needed: float, found: float) -> None:
    """Raise RecipeError when Ray could never place all workers: it would wait for GPUs that nobody has."""
    if found < needed:
        raise RecipeError(
            f"device: engines and training ranks need {needed:g} GPUs, Ray has {found:g}; "
            "allowed: fewer engines, ranks or parallel sizes, or device=cpu"
        )


@asynccontextmanager
async def _open_ray(device: Device) -> AsyncIterator[None]:
    """Join the cluster that RAY_ADDRESS names, or start one on this machine that ends with this process."""
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # without bytecode every worker compiles thousands of files again
    os.environ |= {
        "RAY_worker_niceness": "0",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_process_group_cleanup_enabled": "true",
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    }
    local = (
        {}
        if os.environ.get("RAY_ADDRESS")
        else {
            "address": "local",  # without it Ray joins any other cluster of this machine
            "num_cpus": max(4, os.cpu_count() or 1),
            "object_store_memory": OBJECT_STORE_BYTES,
            "include_dashboard": False,
        }
    )
    started_here = not ray.is_initialized()
    sockets = tempfile.mkdtemp(prefix="moltflow-")
    try:
        if started_here:
            start = functools.partial(
                ray.init,
                logging_level=logging.ERROR,
                log_to_driver=bool(os.environ.get("MOLTFLOW_WORKER_LOGS")),
                runtime_env={"env_vars": device.env | {"VLLM_RPC_BASE_PATH": sockets}},
                **local,
            )
            await to_its_end(start)  # a Ray that is half started cannot be shut down
        yield
    finally:
        if started_here:
            ray.shutdown()
        shutil.rmtree(sockets, ignore_errors=True)
