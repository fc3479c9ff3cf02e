"""The rollout stage with the real window and a real store; agents are the edge: they write traces and say so."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager, suppress
from itertools import count
from json import JSONDecodeError
from pathlib import Path
from typing import Any

import pytest

from schemas.errors import WorkerError
from schemas.recipe import WindowConfig
from schemas.types import GroupTask, Shard, StoredGroup
from stages.rollout import rollout
from stages.window import Window
from storage.batches import Batches, Outcomes
from storage.ledger import Ledger, read_ledger
from storage.traces import Traces
from tests.builders import task, trace_row

SECONDS = 10.0


class FakeAgents:
    """Runs groups of two rollouts, each for a random moment, and writes their traces where the driver does not look.

    Groups in `stuck` never end by themselves; those in `late` have written their traces when their abort arrives.
    """

    def __init__(self, uri: str, *, stuck: Sequence[int] = (), late: Sequence[int] = ()) -> None:
        self._traces = Traces(uri)
        self._stuck, self._late = stuck, late
        self._shards: asyncio.Queue[Shard | Exception] = asyncio.Queue()
        self._random = random.Random(0)
        self.running: dict[str, asyncio.Task[None]] = {}
        self.submitted: list[int] = []
        self.cancelled: list[str] = []
        self.most_running = 0

    async def submit(self, table: str, tasks: Sequence[GroupTask]) -> None:
        assert table == "traces"
        for one in tasks:
            self.submitted.append(one.sequence)
            self.running[one.group_id] = asyncio.create_task(self._run(one))
        self.most_running = max(self.most_running, len(self.running))

    async def _run(self, task: GroupTask) -> None:
        if task.sequence in self._stuck:
            await asyncio.Event().wait()
        await asyncio.sleep(self._random.random() * 0.01)
        await self._write(task.sequence)
        del self.running[task.group_id]

    async def _write(self, sequence: int) -> None:
        rows = [trace_row(sequence, rollout) for rollout in range(2)]
        self._shards.put_nowait(await asyncio.to_thread(self._traces.write, rows))

    async def collect(self, table: str) -> list[Shard]:
        shards = [await self._shards.get()]
        while not self._shards.empty():
            shards.append(self._shards.get_nowait())
        for shard in shards:
            if isinstance(shard, Exception):
                raise shard
        return shards

    async def cancel(self, group_ids: Sequence[str]) -> None:
        self.cancelled += group_ids
        for group_id in group_ids:
            if (running := self.running.pop(group_id, None)) is not None:
                running.cancel()
                with suppress(asyncio.CancelledError):
                    await running
            if (sequence := int(group_id.split("-")[1])) in self._late:
                await self._write(sequence)

    def deliver(self, shard: Shard | Exception) -> None:
        self._shards.put_nowait(shard)


class Stage:
    """A rollout stage under way, with everything around it."""

    def __init__(self, uri: Path, config: WindowConfig, batch_groups: int, tasks: Iterable[GroupTask], **options: Any):
        self.window = Window(config, batch_groups)
        self.agents = FakeAgents(str(uri), **options)
        self.traces, self.batches, self.outcomes = Traces(str(uri)), Batches(str(uri)), Outcomes(str(uri))
        stage = rollout(iter(tasks), self.window, self.agents, self.traces, self.outcomes)
        self.running = asyncio.create_task(stage)

    async def take(self, count: int) -> list[StoredGroup | None]:
        return [await asyncio.wait_for(self.window.take(), SECONDS) for _ in range(count)]

    async def end(self) -> None:
        await asyncio.wait_for(self.running, SECONDS)

    def ledger(self) -> Ledger:
        return read_ledger(self.traces, self.batches, self.outcomes)


@asynccontextmanager
async def started(
    uri: Path,
    config: WindowConfig | None = None,
    batch_groups: int = 2,
    tasks: Iterable[GroupTask] | None = None,
    **options: Any,
) -> AsyncIterator[Stage]:
    stage = Stage(uri, config or mask(4), batch_groups, endless() if tasks is None else tasks, **options)
    try:
        yield stage
    finally:
        stage.running.cancel()
        await asyncio.gather(stage.running, return_exceptions=True)


def endless() -> Iterator[GroupTask]:
    return map(task, count())


def mask(places: int) -> WindowConfig:
    return WindowConfig(stale="mask", groups_in_flight=places)


def wait(seconds: float) -> WindowConfig:
    return WindowConfig(stale="wait", max_policy_lag=1, straggler_wait_seconds=seconds)


async def until(condition: Any) -> None:
    async with asyncio.timeout(SECONDS):
        while not condition():
            await asyncio.sleep(0.002)


async def test_a_group_is_in_the_store_before_it_is_offered(tmp_path: Path) -> None:
    async with started(tmp_path) as stage:
        for _ in range(3):
            for offered in await stage.take(2):
                assert offered in Traces(str(tmp_path)).groups()  # as another process would see it
            stage.window.publish(stage.window.version + 1)


async def test_never_more_groups_are_out_than_the_window_has_places(tmp_path: Path) -> None:
    async with started(tmp_path, mask(5)) as stage:
        await until(lambda: stage.window.places_held == 5)
        assert sorted(stage.agents.submitted) == [0, 1, 2, 3, 4]
        await stage.take(2)
        stage.window.publish(1)
        await until(lambda: len(stage.agents.submitted) == 7)
        assert stage.agents.most_running <= 5


async def test_nothing_is_lost_and_nothing_doubled(tmp_path: Path) -> None:
    taken: list[int] = []
    async with started(tmp_path, mask(12), batch_groups=8) as stage:
        for version in range(1, 16):
            taken += [group.sequence for group in await stage.take(8) if group is not None]
            stage.window.publish(version)
        stage.window.close()
        await stage.end()
    assert len(taken) == len(set(taken)) == 15 * 8
    ledger = stage.ledger()
    assert set(taken) <= ledger.finished  # stored; no batch was recorded here
    assert len(stage.traces.table.read(["rollout"])) == 2 * len(ledger.finished)
    sequences = [group.sequence for group in stage.traces.groups()]
    assert len(sequences) == len(set(sequences))
    # the others were out when the window closed: dispatched again by a resume
    aborted = {int(name.split("-")[1]) for name in stage.agents.cancelled}
    assert aborted | ledger.finished == set(stage.agents.submitted) == set(range(len(stage.agents.submitted)))
    assert set(ledger.lost) <= aborted


async def test_a_closed_window_ends_the_stage_and_what_is_in_flight(tmp_path: Path) -> None:
    async with started(tmp_path, mask(3), stuck=[0, 1, 2]) as stage:
        await until(lambda: len(stage.agents.running) == 3)
        stage.window.close()
        await stage.end()
        assert sorted(stage.agents.cancelled) == ["0000-000000-0", "0000-000001-0", "0000-000002-0"]
        assert stage.agents.running == {}


async def test_a_cancelled_stage_ends_at_once_without_asking_the_agents(tmp_path: Path) -> None:
    async with started(tmp_path, mask(3), stuck=[0, 1, 2]) as stage:
        await until(lambda: len(stage.agents.running) == 3)
        stage.running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await stage.end()
        assert stage.agents.cancelled == []  # their processes are closed instead


async def test_a_failure_of_the_agents_is_raised_at_once(tmp_path: Path) -> None:
    async with started(tmp_path, mask(3), stuck=[0, 1, 2]) as stage:
        await until(lambda: len(stage.agents.running) == 3)
        stage.agents.deliver(WorkerError("agent host0: its process died"))
        with pytest.raises(WorkerError, match="agent host0: its process died"):
            await stage.end()
        assert stage.agents.cancelled == []  # a host that is dead cannot be asked


async def test_a_failure_of_the_prompt_stream_is_raised(tmp_path: Path) -> None:
    def broken() -> Iterator[GroupTask]:
        yield task(0)
        raise OSError("the disk is gone")

    async with started(tmp_path, tasks=broken(), stuck=[0]) as stage:
        with pytest.raises(OSError, match="the disk is gone"):
            await stage.end()


async def test_a_shard_that_cannot_be_committed_ends_the_stage(tmp_path: Path) -> None:
    async with started(tmp_path, stuck=range(9)) as stage:
        stage.agents.deliver(Shard(('{"files": [{"path": ',), ()))
        with pytest.raises(JSONDecodeError):
            await stage.end()


async def test_a_straggler_is_aborted_and_counted_and_the_batch_goes_on(tmp_path: Path) -> None:
    async with started(tmp_path, wait(0.2), batch_groups=2, stuck=[1]) as stage:
        groups = await stage.take(2)
        assert [group.sequence for group in groups if group] == [0, 2]
        await until(lambda: stage.agents.cancelled == ["0000-000001-0"] and stage.ledger().dropped)
        assert stage.ledger().dropped == {1: "straggler"}
        await until(lambda: 4 in stage.agents.submitted)  # has its place


async def test_a_straggler_whose_traces_arrive_after_its_abort_is_dropped_and_not_trained(tmp_path: Path) -> None:
    async with started(tmp_path, wait(0.2), batch_groups=2, stuck=[1], late=[1]) as stage:
        await stage.take(2)
        stage.window.publish(1)
        groups = await stage.take(2)
        assert 1 not in [group.sequence for group in groups if group]
        await until(lambda: 1 in [group.sequence for group in stage.traces.groups()])
        ledger = stage.ledger()
        assert ledger.dropped == {1: "straggler"} and 1 not in ledger.finished


async def test_a_stream_that_ends_is_trained_to_its_last_group(tmp_path: Path) -> None:
    async with started(tmp_path, mask(4), batch_groups=2, tasks=map(task, range(5))) as stage:
        taken = []
        for version in (1, 2):
            taken += await stage.take(2)
            stage.window.publish(version)
        taken += await stage.take(2)  # the tail, and then nothing
        assert taken.pop() is None
        assert sorted(group.sequence for group in taken if group) == [0, 1, 2, 3, 4]
        await stage.end()
        assert stage.agents.cancelled == []
