"""AgentWorker: hosts user agents in a Ray actor, runs groups, and writes their traces where they ran.

driver                         agent host                              engine
submit([groups]) -------->     one task per rollout  ---- requests --->
collect() <---------------     shards of finished groups: fragments written, not yet committed
"""

from __future__ import annotations

import asyncio
import json
import random
import uuid
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any

from schemas.errors import WorkerError
from schemas.recipe import RLRecipe, SamplingConfig
from schemas.types import GenerateRequest, Generation, GroupTask, ParseOptions, Shard
from stages.agents.attempt import Attempt
from stages.agents.chat import ChatAgent
from stages.agents.contract import load_agent
from stages.agents.loop import Rollout, run_env
from stages.agents.rendering import ChatRenderer
from stages.agents.segment import Segment
from stages.capture.marks import Marks
from stages.capture.recorder import Recorder
from stages.capture.rollout import ChatRollout, run_chat
from stages.capture.segments import CapturedSegment
from stages.capture.server import CaptureServer
from storage.traces import Traces

MAX_BLOCKING_AGENTS = 2048
COALESCE_SECONDS = 0.02
"""Groups that finish within this time share a fragment: fewer files, fewer commits."""


class AgentWorker:
    def __init__(self, recipe: RLRecipe, run_uri: str, run_attempt: int, name: str, engines: Sequence[Any]) -> None:
        self._config = recipe.agent
        self._parses_calls = recipe.engine.tool_parser is not None
        agent = load_agent(recipe.agent.entry)
        self._make_agent: Callable[..., Any] = partial(agent, **recipe.agent.args)
        if agent.__init__ is object.__init__ and not recipe.agent.args:  # nothing that could block: no thread needed
            self._make_agent = _async(agent)
        self._server = CaptureServer() if issubclass(agent, ChatAgent) else None
        self._renderer = ChatRenderer(recipe.model.path, recipe.model.trust_remote_code)
        self._run_uri = run_uri
        self._run_attempt = run_attempt
        self._marks = Marks(self._renderer)
        # A single-turn group waits for its last rollout anyway, so its rollouts may share one request.
        self._engines = [EngineClient(name, engine, merge=self._config.max_turns == 1) for engine in engines]
        self._threads = ThreadPoolExecutor(MAX_BLOCKING_AGENTS, thread_name_prefix="agent")
        self._groups: dict[str, asyncio.Task[None]] = {}
        self._outputs: dict[str, TableOutput] = {}

    async def ready(self) -> None:
        if self._server is not None:
            await self._server.start()

    async def submit(self, table: str, tasks: Sequence[GroupTask]) -> None:
        """Start groups; their traces go to the run's table of that name."""
        output = self._output(table)
        for task in tasks:
            self._groups[task.group_id] = asyncio.create_task(self._run_group(task, output))

    async def collect(self, table: str) -> list[Shard]:
        """Shards of the groups that finished since the last call, at least one group."""
        return [await self._output(table).next_shard()]

    async def cancel(self, group_ids: Sequence[str]) -> None:
        """Stop groups and abort their requests; nothing of them reaches the store."""
        tasks = [self._groups.pop(group_id) for group_id in group_ids if group_id in self._groups]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _output(self, table: str) -> TableOutput:
        if table not in self._outputs:
            self._outputs[table] = TableOutput(Traces(self._run_uri, table))
        return self._outputs[table]

    async def _run_group(self, task: GroupTask, output: TableOutput) -> None:
        engine = min(self._engines, key=lambda client: client.num_groups)
        engine.num_groups += 1
        try:
            seed = random.Random(f"{task.seed}-{output.table}-{task.sequence}").getrandbits(48)
            rollouts = await asyncio.gather(*(self._run(task, seed, engine) for _ in range(task.group_size)))
            rows = [row for index, rollout in enumerate(rollouts) for row in _rows(task, index, rollout)]
            output.add([row | {"run_attempt": self._run_attempt} for row in rows])
        except Exception as failure:  # not the agent's doing: the driver must not wait for this group
            output.fail(failure)
        except asyncio.CancelledError:
            if self._groups.get(task.group_id) is asyncio.current_task():  # nobody asked for it, so nobody would know
                output.fail(WorkerError(f"group {task.group_id}: its rollouts were cancelled from within"))
            raise
        finally:
            engine.num_groups -= 1
            self._groups.pop(task.group_id, None)

    async def _run(self, task: GroupTask, seed: int, engine: EngineClient) -> Rollout | ChatRollout:
        config, threads = self._config, self._threads
        if self._server is None:
            return await run_env(self._make_agent, task, seed, engine.generate, self._renderer, config, threads)
        recorder = Recorder(engine.generate, self._renderer, self._marks, config, task.sampling, self._parses_calls)
        return await run_chat(self._make_agent, task, seed, self._server, recorder, config, threads)


def _async(agent: Callable[[], Any]) -> Callable[[], Awaitable[Any]]:
    async def make_agent() -> Any:
        return agent()

    return make_agent


class EngineClient:
    """This host's end of one engine: one call at a time each way, with all that has come up since the last.

    Results are given out one by one, each with a round of the event loop, so that the first agent has its next request
    at the engine before the last one has read its answer. Otherwise the engine would idle while all of them think.
    """

    def __init__(self, name: str, engine: Any, merge: bool) -> None:
        self._name = f"{name}-{uuid.uuid4().hex[:8]}"  # an earlier host of that name may have left requests behind
        self._engine = engine
        self._merge = merge
        self.num_groups = 0
        self._waiting: dict[str, asyncio.Future[Generation]] = {}
        self._unsent: list[GenerateRequest] = []
        self._count = 0
        self._collector: asyncio.Task[None] | None = None
        self._submitter: asyncio.Task[None] | None = None

    async def generate(
        self, token_ids: list[int], sampling: SamplingConfig, parse: ParseOptions | None = None
    ) -> Generation:
        """Sample one turn, parsed if asked for. A cancelled caller aborts its request."""
        loop = asyncio.get_running_loop()
        self._count += 1
        request_id = f"{self._name}-{self._count}"
        future = self._waiting[request_id] = loop.create_future()
        self._unsent.append(GenerateRequest((request_id,), tuple(token_ids), sampling, parse))
        if self._submitter is None:
            self._submitter = loop.create_task(self._submit())
        if self._collector is None:
            self._collector = loop.create_task(self._collect())
        try:
            return await future
        except asyncio.CancelledError:
            unsent = [request for request in self._unsent if request.request_ids == (request_id,)]
            for request in unsent:
                self._unsent.remove(request)
            if not unsent:
                self._engine.abort.remote([request_id])
            raise
        finally:
            self._waiting.pop(request_id, None)

    async def _submit(self) -> None:
        try:
            while self._unsent:
                requests, self._unsent = self._unsent, []
                await self._engine.submit.remote(self._name, _merged(requests) if self._merge else requests)
        except Exception as failure:
            self._fail(failure)
        finally:
            self._submitter = None

    async def _collect(self) -> None:
        try:
            while True:
                for generation in await self._engine.collect.remote(self._name):
                    future = self._waiting.get(generation.request_id)
                    if future is not None and not future.done():
                        future.set_result(generation)
                        await asyncio.sleep(0)
        except Exception as failure:
            self._fail(failure)
        finally:
            self._collector = None

    def _fail(self, failure: Exception) -> None:
        error = WorkerError(f"engine of {self._name}: {' '.join(str(failure).split())[:400]}")
        self._unsent = []
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(error)


def _merged(requests: Sequence[GenerateRequest]) -> list[GenerateRequest]:
    """Requests for the same tokens with the same sampling as one request with several samples."""
    merged: dict[tuple[Any, ...], GenerateRequest] = {}
    for request in requests:
        if request.sampling.temperature == 0:  # vLLM takes one sample at a time of what has no chance in it
            merged[request.request_ids] = request
            continue
        key = (tuple(request.token_ids), request.sampling.model_dump_json(), repr(request.parse))
        ids = merged[key].request_ids if key in merged else ()
        merged[key] = replace(request, request_ids=(*ids, *request.request_ids))
    return list(merged.values())


class TableOutput:
    """Finished groups of one table: rows gather while the last fragment is being written."""

    def __init__(self, traces: Traces) -> None:
        self.table = traces.name
        self._traces = traces
        self._rows: list[dict[str, Any]] = []
        self._arrived = asyncio.Event()
        self._failure: Exception | None = None

    def add(self, rows: list[dict[str, Any]]) -> None:
        self._rows += rows
        self._arrived.set()

    def fail(self, failure: Exception) -> None:
        self._failure = failure
        self._arrived.set()

    async def next_shard(self) -> Shard:
        await self._arrived.wait()
        await asyncio.sleep(COALESCE_SECONDS)
        if self._failure is not None:
            raise self._failure
        self._arrived.clear()
        rows, self._rows = self._rows, []
        return await asyncio.to_thread(self._traces.write, rows)


def _rows(task: GroupTask, index: int, rollout: Rollout | ChatRollout) -> list[dict[str, Any]]:
    """A row for each segment; an attempt without any has one without tokens, so that its outcome is counted."""
    segments: Sequence[Segment] = rollout.segments or [CapturedSegment(opened="new", messages=task.prompt.messages)]
    return [_row(task, index, number, segment, rollout) for number, segment in enumerate(segments)]


def _row(task: GroupTask, index: int, number: int, segment: Any, rollout: Attempt) -> dict[str, Any]:
    versions = [span["version"] for span in segment.spans]
    return {
        "sequence": task.sequence,
        "group_id": task.group_id,
        "rollout": index,
        "segment": number,
        "opened": getattr(segment, "opened", "new"),
        "status": str(rollout.status),
        "error": rollout.error,
        "token_ids": segment.token_ids,
        "logprobs": segment.logprobs,
        "spans": segment.spans,
        "num_tokens": len(segment.token_ids),
        "num_sampled": sum(span["end"] - span["start"] for span in segment.spans),
        "oldest_version": min(versions, default=-1),
        "newest_version": max(versions, default=-1),
        "turns": segment.turns,
        "reward": rollout.reward,
        "reward_components": json.dumps(rollout.reward_components),
        "score": rollout.score,
        "messages": json.dumps(segment.messages, default=str),
        "tools": json.dumps(segment.tools),
        "label": json.dumps(task.prompt.label, default=str),
        "info": json.dumps(rollout.info, default=str),
        "image_hashes": [],
        "seed": rollout.seed,
        "started_at": rollout.started_at,
        "seconds": rollout.seconds,
    }
