"""Rollout: the one long-lived stage. It keeps prompt groups in flight for as long as the window admits them.

consumes   group tasks from the prompt stream
produces   finished groups, committed to the trace store before they are offered to the window
waits for  a place in the window; a shard from an agent host
writes     to the end, also when cancelled: once the stage is over, another process may hold the run
drops      stragglers that the window gave up: their requests are aborted, the outcome is counted
ends       when the window is closed, or when the prompts are used up and nothing is out any more
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

from schemas.protocols import Agents, GroupSink
from schemas.types import GroupTask, Outcome
from stages.workers.threads import to_its_end
from storage.batches import Outcomes
from storage.traces import Traces


async def rollout(
    tasks: Iterator[GroupTask], window: GroupSink, agents: Agents, traces: Traces, outcomes: Outcomes
) -> None:
    """Run until the window closes or the tasks end. A failure of any part ends all of it and is raised."""
    in_flight: dict[int, GroupTask] = {}
    collecting = asyncio.create_task(_collect(in_flight, window, agents, traces))
    aborting = asyncio.create_task(_abort_stragglers(in_flight, window, agents, outcomes))
    admitting = asyncio.create_task(_admit(tasks, in_flight, window, agents, traces.name))
    parts = (admitting, collecting, aborting)
    try:
        await asyncio.wait(parts, return_when=asyncio.FIRST_COMPLETED)
        for part in parts:
            if part.done():
                part.result()
    finally:
        for part in parts:
            part.cancel()
        await asyncio.gather(*parts, return_exceptions=True)
    await agents.cancel([task.group_id for task in in_flight.values()])  # after a failure they are closed instead


async def _admit(
    tasks: Iterator[GroupTask], in_flight: dict[int, GroupTask], window: GroupSink, agents: Agents, table: str
) -> None:
    admitted: list[GroupTask] = []
    for task in tasks:
        if admitted and not window.has_place:  # what was admitted in one go is submitted in one call
            await agents.submit(table, admitted)
            admitted = []
        if not await window.admit(task.sequence):
            return
        in_flight[task.sequence] = task
        admitted.append(task)
    await agents.submit(table, admitted)
    window.end()
    await asyncio.Event().wait()  # it is `window.straggler` that tells when nothing is out any more


async def _collect(in_flight: dict[int, GroupTask], window: GroupSink, agents: Agents, traces: Traces) -> None:
    while True:
        shards = await agents.collect(traces.name)
        for group in await to_its_end(traces.commit, shards):
            if in_flight.pop(group.sequence, None) is not None:
                window.finish(group)


async def _abort_stragglers(
    in_flight: dict[int, GroupTask], window: GroupSink, agents: Agents, outcomes: Outcomes
) -> None:
    while (sequence := await window.straggler()) is not None:
        task = in_flight.pop(sequence, None)
        if task is None:
            continue  # it finished in the same moment
        await agents.cancel([task.group_id])
        outcome = Outcome(task.sequence, task.group_id, "dropped", "straggler")
        await to_its_end(outcomes.record, [outcome], window.version)
        window.fail(task.sequence)
