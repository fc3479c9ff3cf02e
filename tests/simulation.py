"""A virtual-time simulation of rollout and training around the real `Window`. No sleeping: seconds are train-times.

    python -m tests.simulation        the table of modes and numbers of groups in flight

Engine: a group has a log-normal amount of work and samples its tokens evenly over it; beyond `engine_groups` at once
all of them slow down in proportion, and during a refit they stand still. A token has the version that is live when it
is sampled. Trainer: one train-time a batch, then a refit; it masks, or drops, by the rule of the bound.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import math
import random
import selectors
from collections import Counter
from collections.abc import Coroutine, Iterable
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from schemas.recipe import WindowConfig
from schemas.types import Status, StoredGroup, StoredSegment
from stages.window import Window

TOKENS = 1000  # sampled by a group in one train-time at full speed


class _JumpingSelector(selectors.SelectSelector):
    """Where an event loop would sleep until its next timer, the clock jumps there."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0

    def select(self, timeout: float | None = None) -> list:
        if timeout is None:
            raise RuntimeError(f"deadlock at {self.now:.3f}: every task waits and no timer is set")
        self.now += max(timeout, 0.0)
        return []


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._clock = _JumpingSelector()
        super().__init__(self._clock)

    def time(self) -> float:
        return self._clock.now


def run_virtual(main: Coroutine[Any, Any, Any]) -> Any:
    """Runs a coroutine in virtual time, from 0."""
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        return runner.run(main)


@dataclass(frozen=True)
class Setting:
    stale: Literal["mask", "wait", "drop"] = "mask"
    groups_in_flight: int | Literal["auto"] = "auto"
    batch_groups: int = 8
    max_policy_lag: int = 3
    straggler_wait: float = 1000.0
    mean: float = 1.6
    """Mean work of a group, in train-times."""
    sigma: float = 1.0
    """Spread of the logarithm of the work."""
    engine_groups: float = math.inf
    """Groups that the engine runs at full speed."""
    refit: float = 0.0
    """Time in which the engine stands still after each batch."""
    batches: int = 400
    warmup: int = 100
    """Batches that the result leaves out."""
    groups: int | None = None
    """Groups admitted before the stream ends; unset never ends it."""
    stuck: frozenset[int] = frozenset()
    """Groups that never finish by themselves."""
    failed_share: float = 0.0
    """Groups that fail after half of their work."""
    filtered_share: float = 0.0
    """Taken groups that filtering drops although they are not stale."""
    resumed: int = 0
    """Groups that an earlier attempt finished at version 0."""
    first_version: int = 0
    seed: int = 0

    @property
    def window(self) -> WindowConfig:
        return WindowConfig(
            max_policy_lag=self.max_policy_lag,
            stale=self.stale,
            groups_in_flight=self.groups_in_flight,
            straggler_wait_seconds=self.straggler_wait,
        )


@dataclass
class Result:
    seconds: float = 0.0
    groups: int = 0
    waited: float = 0.0
    tokens: float = 0.0
    """Of the trained groups, masked or not; in train-times of work, like the others here."""
    masked: float = 0.0
    max_lag: int = 0
    """Largest lag of a token that was trained, so not masked."""
    oldest_lag: int = 0
    """Largest lag of a token in a batch, masked or not."""
    max_held_up: float = 0.0
    """Longest time of one batch in `take` while as many groups were finished as it still needed."""
    over_capacity: int = -(10**9)
    """Largest excess of places held over capacity, right after an admission."""
    work_dropped: float = 0.0
    outcomes: Counter = field(default_factory=Counter)
    """Groups by what became of them: published, stale, filtered, failed, aborted, tail, or left at the end."""
    by_group: Counter = field(default_factory=Counter)
    """How often each sequence was released or left over: once."""
    admitted: int = 0
    batches: list[dict[str, float]] = field(default_factory=list)
    """Metrics of the window, by batch."""
    batch_times: list[float] = field(default_factory=list)

    @property
    def throughput(self) -> float:
        """Groups trained per train-time."""
        return self.groups / self.seconds

    @property
    def useful(self) -> float:
        """The same without what was masked of them."""
        return self.throughput * (1 - self.masked_share)

    @property
    def masked_share(self) -> float:
        return self.masked / max(self.tokens, 1e-9)

    @property
    def idle_share(self) -> float:
        return self.waited / self.seconds

    @property
    def dropped_share(self) -> float:
        return self.outcomes["stale"] / max(self.groups + self.outcomes["stale"], 1)

    @property
    def places(self) -> float:
        return sum(batch["window/places"] for batch in self.batches) / max(len(self.batches), 1)


class Engine:
    """Shares its speed among the groups that run. `done` is the work that a group running all the time would have."""

    def __init__(self, capacity: float, version: int) -> None:
        self._capacity = capacity
        self._loop = asyncio.get_running_loop()
        self._done = 0.0
        self._since = self._loop.time()
        self._is_paused = False
        self._ends: list[tuple[float, int, asyncio.Future[None]]] = []
        self._running: set[asyncio.Future[None]] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._count = itertools.count()
        self._live = [(0.0, version)]

    async def generate(self, work: float) -> list[tuple[int, float]]:
        """Spans of (version, work) that one group sampled."""
        self._advance()
        start = self._done
        future = self._loop.create_future()
        heapq.heappush(self._ends, (start + work, next(self._count), future))
        self._running.add(future)
        self._plan()
        try:
            await future
        finally:
            self._advance()
            self._running.discard(future)
            self._plan()
        return self._spans(start, start + work)

    def pause(self) -> None:
        self._advance()
        self._is_paused = True
        self._plan()

    def resume(self, version: int) -> None:
        self._advance()
        self._is_paused = False
        self._live.append((self._done, version))
        self._plan()

    @property
    def _speed(self) -> float:
        return 0.0 if self._is_paused else min(1.0, self._capacity / max(len(self._running), 1))

    def _advance(self) -> None:
        now = self._loop.time()
        self._done += (now - self._since) * self._speed
        self._since = now

    def _plan(self) -> None:
        if self._timer:
            self._timer.cancel()
        while self._ends and self._ends[0][2].cancelled():
            heapq.heappop(self._ends)
        if self._ends and self._speed and self._ends[0][0] < math.inf:
            seconds = max(0.0, self._ends[0][0] - self._done) / self._speed
            self._timer = self._loop.call_later(seconds, self._complete)

    def _complete(self) -> None:
        self._advance()
        _, _, future = heapq.heappop(self._ends)
        if not future.cancelled():
            self._running.discard(future)
            future.set_result(None)
        self._plan()

    def _spans(self, start: float, end: float) -> list[tuple[int, float]]:
        spans = []
        until = end
        for since, version in reversed(self._live):
            if since < until:
                spans.append((version, until - max(since, start)))
                until = max(since, start)
            if since <= start:
                break
        return spans[::-1]


def stored_group(sequence: int, spans: list[tuple[int, float]]) -> StoredGroup:
    """A finished group of one segment, from its (version, work) spans."""
    tokens = max(1, round(TOKENS * sum(work for _, work in spans)))
    segment = StoredSegment(
        row=sequence,
        rollout=0,
        segment=0,
        status=Status.OK,
        reward=1.0,
        score=1.0,
        num_tokens=tokens,
        num_sampled=tokens,
        oldest_version=spans[0][0],
        newest_version=spans[-1][0],
    )
    return StoredGroup(sequence, f"0000-{sequence:06d}-0", (segment,))


class Simulation:
    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self.window = Window(setting.window, setting.batch_groups, setting.first_version)
        self.result = Result()
        self.spans: dict[int, list[tuple[int, float]]] = {}
        self._random = random.Random(setting.seed)
        self._engine = Engine(setting.engine_groups, setting.first_version)
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._is_taking = False
        self._num_finished = self._num_needed = 0
        self._held_up = self._ticked = 0.0

    async def run(self) -> Result:
        for sequence in range(self.setting.resumed):
            self.spans[sequence] = [(0, 1.0)]
            self.window.resume(self._stored(sequence))
            self._num_finished += 1
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._admit(tasks))
            tasks.create_task(self._abort())
            await self._train()
            self.window.close()
            for task in self._tasks.values():
                task.cancel("left")
        return self.result

    async def _admit(self, tasks: asyncio.TaskGroup) -> None:
        end = math.inf if self.setting.groups is None else self.setting.resumed + self.setting.groups
        for sequence in itertools.count(self.setting.resumed):
            if sequence >= end:
                return self.window.end()
            if not await self.window.admit(sequence):
                return None
            self.result.admitted += 1
            held = self.setting.resumed + self.result.admitted - self.result.by_group.total()
            self.result.over_capacity = max(self.result.over_capacity, held - self.window.capacity)
            self._tasks[sequence] = tasks.create_task(self._attempt(sequence))

    async def _abort(self) -> None:
        while (sequence := await self.window.straggler()) is not None:
            self._tasks[sequence].cancel("aborted")

    async def _attempt(self, sequence: int) -> None:
        setting = self.setting
        work = random.Random(f"{setting.seed}-{sequence}").lognormvariate(
            math.log(setting.mean) - setting.sigma**2 / 2, setting.sigma
        )
        will_fail = self._random.random() < setting.failed_share
        try:
            if sequence in setting.stuck:
                work = math.inf
            self.spans[sequence] = await self._engine.generate(work / 2 if will_fail else work)
            if not will_fail:
                self._tick()
                self._num_finished += 1
                return self.window.finish(self._stored(sequence))
            self._count("failed", sequence)
        except asyncio.CancelledError as cancelled:
            self._count(cancelled.args[0], sequence)
        finally:
            del self._tasks[sequence]
        self.window.fail(sequence)

    def _stored(self, sequence: int) -> StoredGroup:
        return stored_group(sequence, self.spans[sequence])

    def _count(self, outcome: str, sequence: int) -> None:
        self.result.outcomes[outcome] += 1
        self.result.by_group[sequence] += 1

    async def _train(self) -> None:
        loop = asyncio.get_running_loop()
        measured_since = 0.0
        for number in range(self.setting.batches):
            if number == self.setting.warmup:
                measured_since = loop.time()
                kept = self.result
                self.result = Result(outcomes=Counter(), by_group=kept.by_group, admitted=kept.admitted)
            if (batch := await self._batch()) is None:
                break
            self.result.batch_times.append(loop.time())
            self._measure(batch)
            await asyncio.sleep(1.0)
            self._engine.pause()
            if self.setting.refit:
                await asyncio.sleep(self.setting.refit)
            self._engine.resume(self.window.version + 1)
            self.window.publish(self.window.version + 1)
            for group in batch:
                self._count("published", group.sequence)
            self.result.batches.append(self.window.metrics())
            self.result.waited += self.window.metrics()["window/waited_seconds"]
        self.result.seconds = loop.time() - measured_since

    async def _batch(self) -> list[StoredGroup] | None:
        """A full batch; a tail is released and counted."""
        batch: list[StoredGroup] = []
        self._held_up = 0.0
        while len(batch) < self.setting.batch_groups:
            self._tick()
            self._is_taking, self._num_needed = True, self.setting.batch_groups - len(batch)
            group = await self.window.take()
            self._tick()
            self._is_taking = False
            self._num_finished -= 1
            if group is None:
                for left in batch:
                    self.window.release(left)
                    self._count("tail", left.sequence)
                return None
            lag = self.window.version - group.oldest_version
            is_stale = self.setting.stale == "drop" and lag > self.setting.max_policy_lag
            if is_stale or self._random.random() < self.setting.filtered_share:
                self.window.release(group)
                self._count("stale" if is_stale else "filtered", group.sequence)
                self.result.work_dropped += sum(work for _, work in self.spans[group.sequence])
            else:
                batch.append(group)
        self.result.max_held_up = max(self.result.max_held_up, self._held_up)
        return batch

    def _tick(self) -> None:
        now = asyncio.get_running_loop().time()
        if self._is_taking and self._num_finished >= self._num_needed:
            self._held_up += now - self._ticked
        self._ticked = now

    def _measure(self, batch: list[StoredGroup]) -> None:
        result = self.result
        result.groups += len(batch)
        for group in batch:
            for version, work in self.spans[group.sequence]:
                lag = self.window.version - version
                result.tokens += work
                result.oldest_lag = max(result.oldest_lag, lag)
                if lag > self.setting.max_policy_lag:
                    result.masked += work
                else:
                    result.max_lag = max(result.max_lag, lag)


def simulate(setting: Setting) -> Result:
    async def main() -> Result:
        return await Simulation(setting).run()

    return run_virtual(main())


def compare_auto(base: Setting, numbers: Iterable[float]) -> tuple[float, float, Result]:
    """Useful throughput of `auto` over that of the best of some fixed numbers (in batches), that number, and `auto`."""
    auto = simulate(base)
    fixed = {k: simulate(replace(base, groups_in_flight=round(k * base.batch_groups))).useful for k in numbers}
    best = max(fixed, key=fixed.__getitem__)
    return auto.useful / fixed[best], best, auto


def table(base: Setting) -> list[dict[str, Any]]:
    """One row for each mode and number of groups in flight."""
    batch = base.batch_groups
    most = (base.max_policy_lag + 1) * batch
    modes: list[dict[str, Any]] = [
        {"stale": "wait", "straggler_wait": patience, "groups_in_flight": most} for patience in (1000.0, 1.0, 0.25)
    ]
    numbers = [batch, 2 * batch, 5 * batch // 2, 3 * batch, 7 * batch // 2, 4 * batch, 5 * batch, 7 * batch, "auto"]
    modes += [{"stale": stale, "groups_in_flight": number} for stale in ("mask", "drop") for number in numbers]
    return [row(replace(base, **mode)) for mode in modes]


def row(setting: Setting) -> dict[str, Any]:
    """What one setting gives. Works are means in train-times: of what was trained, and of what was dropped as stale."""
    result = simulate(setting)
    return {
        "stale": setting.stale,
        "groups_in_flight": setting.groups_in_flight,
        "patience": f"{setting.straggler_wait:g}" if setting.stale == "wait" else "-",
        "places": round(result.places, 1),
        "throughput": round(result.throughput, 2),
        "useful": round(result.useful, 2),
        "idle": round(result.idle_share, 3),
        "masked": round(result.masked_share, 3),
        "max_lag": result.max_lag,
        "oldest_lag": result.oldest_lag,
        "dropped": round(result.dropped_share, 3),
        "trained_work": round(result.tokens / max(result.groups, 1), 2),
        "dropped_work": round(result.work_dropped / max(result.outcomes["stale"], 1), 2),
        "aborted": result.outcomes["aborted"],
    }


COLUMNS = {
    "stale": "{:<5}",
    "groups_in_flight": "{!s:>16}",
    "patience": "{!s:>8}",
    "places": "{:>6.1f}",
    "throughput": "{:>10.2f}",
    "useful": "{:>6.2f}",
    "idle": "{:>5.0%}",
    "masked": "{:>6.0%}",
    "max_lag": "{:>7}",
    "oldest_lag": "{:>10}",
    "dropped": "{:>7.0%}",
    "trained_work": "{:>12.2f}",
    "dropped_work": "{:>12.2f}",
    "aborted": "{:>7}",
}


def print_table(rows: list[dict[str, Any]]) -> None:
    cells = [{name: form.format(row[name]) for name, form in COLUMNS.items()} for row in rows]
    print("  ".join(name.rjust(len(cells[0][name])) for name in COLUMNS))
    for row in cells:
        print("  ".join(row.values()))


if __name__ == "__main__":
    print("8 groups a batch, L = 3, work of mean 1.6 train-times and sigma 1; t is one train-time")
    print_table(table(Setting()))
