"""AgentPool: the agent hosts as one plain async object. Groups go in, shards of finished groups come out."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any

import ray

from schemas.errors import WorkerError
from schemas.recipe import RLRecipe
from schemas.types import GroupTask, Shard
from stages.agents.attempt import MAX_CLOSE_SECONDS
from stages.workers.agent import AgentWorker
from stages.workers.calls import call, call_all, kill

GRACE_SECONDS = 60.0
"""From an agent's deadline to the end of its group: closing environments, writing traces."""
CALL_SECONDS = MAX_CLOSE_SECONDS + 30.0
"""Longest that a host may take to accept or stop groups, which waits for their environments to close."""
CHECK_SECONDS = 5.0


class AgentPool:
    """A group lives on one host, the one with the fewest groups."""

    def __init__(self, recipe: RLRecipe, run_uri: str, run_attempt: int, engines: Sequence[Any]) -> None:
        actor = ray.remote(AgentWorker).options(num_cpus=0, scheduling_strategy="SPREAD")
        names = [f"host{index}" for index in range(recipe.agent.num_hosts)]
        self._hosts = [actor.remote(recipe, run_uri, run_attempt, name, engines) for name in names]
        self._names = [f"agent {name}" for name in names]
        self._start_timeout = recipe.engine.timeout_seconds
        self._group_timeout = recipe.agent.timeout_seconds + GRACE_SECONDS
        self._host_of: dict[str, int] = {}
        self._submitted_at: dict[str, float] = {}
        self._collectors: dict[tuple[str, int], asyncio.Task[list[Shard]]] = {}

    async def ready(self) -> None:
        await call_all(self._names, [host.ready.remote() for host in self._hosts], self._start_timeout)

    async def submit(self, table: str, tasks: Sequence[GroupTask]) -> None:
        """Start groups whose traces go to the run's table of that name."""
        loads = [0] * len(self._hosts)
        for host in self._host_of.values():
            loads[host] += 1
        by_host: dict[int, list[GroupTask]] = {}
        for task in tasks:
            host = min(range(len(loads)), key=loads.__getitem__)
            loads[host] += 1
            self._host_of[task.group_id] = host
            self._submitted_at[task.group_id] = time.monotonic()
            by_host.setdefault(host, []).append(task)
        for host, chosen in by_host.items():
            await call(self._names[host], self._hosts[host].submit.remote(table, chosen), CALL_SECONDS)

    async def collect(self, table: str) -> list[Shard]:
        """Shards that finished since the last call, from whichever host has some first.

        Raises WorkerError when a host died, or is silent about a group well past the agents' deadline: then its loop is
        stuck, for example in an async method that blocks.
        """
        for index, host in enumerate(self._hosts):
            if (table, index) not in self._collectors:
                waiting = call(self._names[index], host.collect.remote(table))
                self._collectors[table, index] = asyncio.create_task(waiting)
        mine = {key: task for key, task in self._collectors.items() if key[0] == table}
        done: set[Any] = set()
        while not done:
            self._check_deadlines()
            done, _ = await asyncio.wait(mine.values(), timeout=CHECK_SECONDS, return_when=asyncio.FIRST_COMPLETED)
        shards: list[Shard] = []
        for key, task in mine.items():
            if task.done():
                del self._collectors[key]
                shards += task.result()
        for shard in shards:
            for group_id in shard.group_ids:
                self._forget(group_id)
        return shards

    def _check_deadlines(self) -> None:
        for group_id, host in self._host_of.items():
            seconds = time.monotonic() - self._submitted_at[group_id]
            if seconds > self._group_timeout:
                raise WorkerError(
                    f"{self._names[host]}: no word of group {group_id} for {seconds:.0f} s, past the deadline "
                    "agent.timeout_seconds; does an async method of the agent block?"
                )

    async def cancel(self, group_ids: Sequence[str]) -> None:
        """Stop groups and abort their requests; nothing of them reaches the store."""
        by_host: dict[int, list[str]] = {}
        for group_id in group_ids:
            if (host := self._forget(group_id)) is not None:
                by_host.setdefault(host, []).append(group_id)
        for host, chosen in by_host.items():
            await call(self._names[host], self._hosts[host].cancel.remote(chosen), CALL_SECONDS)

    def _forget(self, group_id: str) -> int | None:
        self._submitted_at.pop(group_id, None)
        return self._host_of.pop(group_id, None)

    def close(self) -> None:
        for task in self._collectors.values():
            task.cancel()
        for host in self._hosts:
            kill(host)
