"""The window between rollout and training: how many groups may be out, and in which order they are trained.

    rollout: admit -> generate, store -> finish | fail         train: take -> release | publish
               ^                                                               |
               +------------------ the place is free again --------------------+

Consumes: finished groups (`finish`, `resume`), in any order. Produces: groups to train (`take`), stragglers to abort.
Waits for: a free place (`admit`), the next group (`take`), a late one (`straggler`); every other method unblocks them.
Drops: nothing itself; with `wait` it names the stragglers that the rollout side must abort.

A group holds one place from `admit` until the weights trained on it are live, or until it was dropped or failed.
Everything runs on one asyncio loop; only the methods marked async wait.
"""

from __future__ import annotations

import asyncio
import contextlib
import math

from schemas.recipe import WindowConfig
from schemas.types import StoredGroup


class Window:
    """Admission, capacity and order of one run. L is `max_policy_lag`, B is `batch_groups`.

    `mask` and `drop`: completion order, `groups_in_flight` places. A group that never ends keeps its place and stalls
    nothing while B others are left. The action mask (`mask`) or filtering (`drop`) keeps tokens past the bound out.

    `wait`: the order in which places were taken, at most (L + 1) x B of them, so that no token passes the bound:
      1. a group admitted at version v finds at most (L + 1) x B - 1 others out, since places are held until `publish`;
      2. every batch takes the B first in line, so at most L batches (v to v + L - 1) go before the one with this group;
      3. its batch starts at version v + L at the latest, and none of its tokens is older than v.
    A straggler keeps its place until `fail`, which only makes 1. stricter. If it finishes before the abort reaches it,
    it is first in line again, and the mask covers what is then past the bound. With L = 0 a batch needs all that is
    out, so nothing counts as late.
    """

    def __init__(self, config: WindowConfig, batch_groups: int, version: int = 0) -> None:
        self.version = version
        """Policy version of the trainer: what is taken now is trained at this version."""
        self._config = config
        self._batch_groups = batch_groups
        self._in_order = config.stale == "wait"
        self._auto: AutoPlaces | None = None
        most = (config.max_policy_lag + 1) * batch_groups
        if config.groups_in_flight != "auto":
            self._places = min(config.groups_in_flight, most) if self._in_order else config.groups_in_flight
        elif self._in_order:
            self._places = most
        else:
            self._auto = AutoPlaces(batch_groups, config.max_policy_lag)
        self._running: set[int] = set()
        self._finished: dict[int, StoredGroup] = {}  # in completion order
        self._taken: dict[int, StoredGroup] = {}
        self._line: dict[int, None] = {}  # running and finished, in the order in which they took their places
        self._late: dict[int, bool] = {}  # running stragglers; true once told to the rollout side
        self._ended = self._closed = False
        self._changed = asyncio.Event()
        self._metrics: dict[str, float] = {}
        self._batch_started: float | None = None
        self._start_counting()

    def _start_counting(self) -> None:
        self._waited_seconds = 0.0
        self._patience_seconds = self._config.straggler_wait_seconds
        self._left_waiting = self._num_late = 0

    @property
    def capacity(self) -> int:
        """Places there are. `auto` changes it at `publish`; a place held beyond it is not taken away."""
        return self._auto.places if self._auto else self._places

    @property
    def places_held(self) -> int:
        """Groups that are running, finished or taken."""
        return len(self._running) + len(self._finished) + len(self._taken)

    @property
    def has_place(self) -> bool:
        """Whether `admit` would return at once."""
        return self.places_held < self.capacity

    async def admit(self, sequence: int) -> bool:
        """Waits for a free place and takes it. False, and no place, once the window was ended or closed."""
        while not (self._ended or self._closed):
            self._expect("admit", sequence, "not out")
            if self.has_place:
                self._running.add(sequence)
                self._line[sequence] = None
                return True
            await self._change()
        return False

    def finish(self, group: StoredGroup) -> None:
        """The traces of a running group are committed: it can be trained."""
        self._expect("finish", group.sequence, "running")
        self._running.remove(group.sequence)
        self._late.pop(group.sequence, None)
        self._finished[group.sequence] = group
        self._changed.set()

    def resume(self, group: StoredGroup) -> None:
        """Offers a group that an earlier attempt of the run finished. It takes a place, even beyond capacity."""
        self._expect("resume", group.sequence, "not out")
        self._line[group.sequence] = None
        self._finished[group.sequence] = group
        self._changed.set()

    def fail(self, sequence: int) -> None:
        """A running group failed or was aborted: its place is free."""
        self._expect("fail", sequence, "running")
        self._running.remove(sequence)
        del self._line[sequence]
        self._late.pop(sequence, None)
        self._changed.set()

    async def straggler(self) -> int | None:
        """Sequence of the next running group to abort; None once closed, or ended with nothing running.

        The rollout side cancels that group and calls `fail`, or `finish` if its traces were committed by then.
        """
        while not self._closed and (self._running or not self._ended):
            for sequence, is_told in self._late.items():
                if not is_told:
                    self._late[sequence] = True
                    return sequence
            await self._change()
        return None

    def end(self) -> None:
        """No group will be admitted any more; what is out may still finish and be taken."""
        self._ended = True
        self._changed.set()

    async def take(self) -> StoredGroup | None:
        """Next group of the current batch; None once closed, or ended with nothing running or finished."""
        if self._num_needed == 0:
            raise ValueError(f"window.take: the batch has its {self._batch_groups} groups; publish or release first")
        if self._batch_started is None:
            self._batch_started = self._now()
        while not self._closed and (self._running or self._finished or not self._ended):
            if (sequence := self._next()) is not None:
                group = self._taken[sequence] = self._finished.pop(sequence)
                del self._line[sequence]
                self._left_waiting = len(self._finished)
                return group
            is_held_up = self._in_order and len(self._finished) >= self._num_needed
            started = self._now()
            try:
                await self._change(self._patience_seconds if is_held_up else None)
            finally:
                seconds = self._now() - started
                self._waited_seconds += seconds
                self._patience_seconds -= seconds if is_held_up else 0.0
        return None

    def release(self, group: StoredGroup) -> None:
        """A taken group was dropped: its place is free, and the batch needs another group."""
        self._expect("release", group.sequence, "taken")
        del self._taken[group.sequence]
        self._changed.set()

    def publish(self, version: int) -> None:
        """Weights trained on the taken groups are live as `version`: the places of those groups are free."""
        if version != self.version + 1:
            raise ValueError(f"window.publish: found version {version}; allowed: {self.version + 1}, the next one")
        self._metrics = {
            "window/places": float(self.capacity),
            "window/in_flight": float(len(self._running)),
            "window/finished_waiting": float(self._left_waiting),
            "window/aborted": float(self._num_late),
            "window/waited_seconds": self._waited_seconds,
        }
        now = self._now()
        if self._auto and self._batch_started is not None:
            self._auto.update(sum(map(self._useful_tokens, self._taken.values())), now - self._batch_started)
        self.version = version
        self._taken.clear()
        self._batch_started = now
        self._start_counting()
        self._changed.set()

    def close(self) -> None:
        """Everyone who waits wakes up, and nothing more is admitted or taken."""
        self._closed = True
        self._changed.set()

    def metrics(self) -> dict[str, float]:
        """Of the last published batch: places, groups running at its end, finished groups that it left waiting,
        stragglers that it passed, and seconds that it waited in `take`. Empty before the first."""
        return dict(self._metrics)

    def _useful_tokens(self, group: StoredGroup) -> float:
        """Tokens of a taken group within the bound, if each of its rollouts spread them evenly over its versions."""
        oldest = self.version - self._config.max_policy_lag
        shares = (
            (
                s.num_sampled,
                (s.newest_version - max(s.oldest_version, oldest) + 1) / (s.newest_version - s.oldest_version + 1),
            )
            for s in group.trainable
        )
        return sum(tokens * max(share, 0.0) for tokens, share in shares)

    @property
    def _num_needed(self) -> int:
        return self._batch_groups - len(self._taken)

    def _next(self) -> int | None:
        """Sequence that can be taken now. With `wait`, a batch whose patience is used up passes its stragglers."""
        if not self._in_order:
            return next(iter(self._finished), None)
        if self._patience_seconds < 1e-6 and len(self._finished) >= self._num_needed:
            self._pass_stragglers()
        for sequence in self._line:
            if sequence not in self._late:
                return sequence if sequence in self._finished else None
        return None

    def _pass_stragglers(self) -> None:
        """What runs ahead of the finished groups that the batch still needs is late."""
        num_needed = self._num_needed
        for sequence in self._line:
            if sequence in self._finished:
                num_needed -= 1
            elif sequence not in self._late:
                self._late[sequence] = False
                self._num_late += 1
                self._changed.set()
            if num_needed == 0:
                break

    async def _change(self, seconds: float | None = None) -> None:
        """Waits until anything changed, at most `seconds`. No other await may lie between a check and this call."""
        self._changed.clear()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._changed.wait()

    def _expect(self, call: str, sequence: int, allowed: str) -> None:
        states = (("running", self._running), ("finished", self._finished), ("taken", self._taken))
        state = next((state for state, groups in states if sequence in groups), "not out")
        if state != allowed:
            raise ValueError(f"window.{call}: group {sequence} is {state}; allowed: one that is {allowed}")

    def _now(self) -> float:
        return asyncio.get_running_loop().time()


class AutoPlaces:
    """How many groups `auto` keeps out: a search for the number that trains the most tokens within the bound a second.

    It starts at B x (1 + log2(L + 1)), near the best number in most simulated settings: too few places idle the trainer
    or the engines, and since a group is out for places / B versions on average (Little's law), too many put tokens past
    the bound. Then it measures that number, tries one that is larger by the factor STEP, then a smaller one, keeps what
    trained more by the share MARGIN, and goes on in that direction. When neither did, it rests.

    Each number is measured over GROUPS groups, since their lengths differ, and over MIN_BATCHES batches at least. What
    was admitted under the number before is left out. On policy (L = 0) a group that is out during a refit loses all
    that it sampled before, so there the search starts at a batch and a spare sixteenth.
    """

    STEP = 1.15
    MARGIN = 0.02
    GROUPS = 256
    MIN_BATCHES = 8
    REST = 12
    """Measurements without a trial after two that failed."""

    def __init__(self, batch_groups: int, max_policy_lag: int) -> None:
        self._batch_groups = batch_groups
        self._most = 1.5 * (max_policy_lag + 1) * batch_groups
        self._best = batch_groups * (1 + math.log2(max_policy_lag + 1) if max_policy_lag else 1 + 1 / 16)
        self._places = self._best
        self._best_speed = 0.0
        self._direction = 1
        self._failures = self._rest = 0
        self._start()

    def _start(self) -> None:
        self._tokens = self._seconds = 0.0
        self._batches = -math.ceil(self._places / self._batch_groups)  # settling

    @property
    def places(self) -> int:
        return round(self._places)

    def update(self, tokens: float, seconds: float) -> None:
        """One batch trained `tokens` within the bound and took `seconds`."""
        self._batches += 1
        if self._batches <= 0:
            return
        self._tokens += tokens
        self._seconds += seconds
        if self._batches >= max(self.MIN_BATCHES, self.GROUPS / self._batch_groups):
            self._judge(self._tokens / max(self._seconds, 1e-9))
            self._start()

    def _judge(self, speed: float) -> None:
        if self._places == self._best:
            self._best_speed = (self._best_speed + speed) / 2 if self._best_speed else speed
        elif speed > (1 + self.MARGIN) * self._best_speed:
            self._best, self._best_speed, self._failures = self._places, speed, 0
        else:
            self._turn()
        self._places = self._next()

    def _next(self) -> float:
        """What to measure next: a trial, or the best number again."""
        if self._rest > 0:
            self._rest -= 1
            return self._best
        trial = self._best * self.STEP**self._direction
        if self._batch_groups <= trial <= self._most:
            return trial
        self._turn()
        return self._best

    def _turn(self) -> None:
        self._direction, self._failures = -self._direction, self._failures + 1
        if self._failures == 2:
            self._failures, self._rest = 0, self.REST
