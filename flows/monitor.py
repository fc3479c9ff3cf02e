"""What a run tells about itself: where the driver's time went, a line of metrics a batch, progress in the terminal."""

from __future__ import annotations

import contextvars
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from storage.metrics import append_metrics
from storage.runs import RunFolder

SHARES = ("waiting", "score", "train", "refit", "store", "orchestration")
"""Parts of the critical path. Orchestration is what no stage accounts for: Prefect, the flow, the event loop."""


class Monitor:
    """Collects the metrics of the batch under way, and the driver's seconds by part from `start_loop` on."""

    def __init__(self, folder: RunFolder, max_steps: int, clock: Callable[[], float] = time.perf_counter) -> None:
        self._folder = folder
        self._metrics: dict[str, float] = {}
        self._seconds = dict.fromkeys(SHARES, 0.0)
        self._apart = 0.0
        self._clock = clock
        self._loop_started = self._step_started = clock()
        self._accounted = 0.0, dict(self._seconds)
        self.first_step_at: float | None = None
        self.steps = self.steps_without_update = 0
        self._progress = Progress(
            TextColumn("[bold]{task.description}"),
            BarColumn(bar_width=12),
            MofNCompleteColumn(),
            TextColumn("{task.fields[line]}"),
            TimeRemainingColumn(),
            console=Console(stderr=True),
            refresh_per_second=2,
        )
        self._bar = self._progress.add_task(folder.name, total=max_steps, line="starting")

    @contextmanager
    def showing(self) -> Iterator[None]:
        """Make this the monitor that stages report to, and show progress."""
        token = _current.set(self)
        with self._progress:
            try:
                yield
            finally:
                _current.reset(token)

    def start_loop(self, step: int) -> None:
        """Start-up is over; `step` batches are trained already."""
        self._loop_started = self._step_started = self._clock()
        self._seconds = dict.fromkeys(SHARES, 0.0)
        self._apart = 0.0
        self.steps, self.steps_without_update, self.first_step_at = 0, 0, None
        self._metrics.clear()
        self._progress.update(self._bar, completed=step, line="first batch")

    @contextmanager
    def measure(self, part: str | None) -> Iterator[None]:
        """Account the time inside to a part of the critical path; None is beside it (evaluation)."""
        start = self._clock()
        try:
            yield
        finally:
            seconds = self._clock() - start
            if part is None:
                self._apart += seconds
                self._step_started += seconds
            else:
                self._seconds[part] += seconds

    def record(self, metrics: Mapping[str, float], part: str) -> None:
        """Metrics of one stage; what it says it spent on storing moves from its part to `store`."""
        self._metrics |= metrics
        for name, value in metrics.items():
            if name.endswith("/store_seconds"):
                self._seconds[part] -= value
                self._seconds["store"] += value

    def end_step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write the line of batch `step`, trained from policy version `step`."""
        if self.first_step_at is None:
            self.first_step_at = time.time()
        self.steps += 1
        self.steps_without_update += self._metrics.get("train/updated") == 0
        seconds = self._clock() - self._step_started
        line = self._metrics | dict(metrics) | {"step/seconds": seconds}
        line["step/tokens_per_second"] = line.get("train/tokens", 0.0) / seconds
        self._metrics.clear()
        with self.measure("store"):
            self.write(step, line)
        self._progress.update(self._bar, completed=step + 1, line=_line(line))
        self._step_started = self._clock()
        self._accounted = self._step_started - self._loop_started - self._apart, dict(self._seconds)

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Add metrics to the line of `step`: of a batch, of an evaluation of that policy version."""
        line = {"step": step, "run_attempt": self._folder.attempt, "time": time.time()}
        append_metrics(self._folder, line | dict(metrics))

    def write_replayed(self, step: int, metrics: Mapping[str, float]) -> None:
        """What a resume found when it trained a stored batch again, beside what was written then."""
        self.write(step, {f"replayed/{name}": value for name, value in metrics.items()})

    def shares(self) -> dict[str, float]:
        """Share of each part in the wall time from the loop's start to the end of its last batch, evaluations left out;
        they sum to 1."""
        total, seconds = self._accounted
        known = {part: seconds[part] / total if total else 0.0 for part in SHARES[:-1]}
        return known | {SHARES[-1]: 1 - sum(known.values())}

    def seconds_per_step(self) -> float:
        return self._accounted[0] / max(self.steps, 1)


_current: contextvars.ContextVar[Monitor] = contextvars.ContextVar("monitor")


def current_monitor() -> Monitor:
    return _current.get()


def _line(line: Mapping[str, float]) -> str:
    """What fits beside the bar in 80 columns: the reward where there is one, else the loss."""
    first = ("reward", "rollout/reward_mean", ".3f") if "rollout/reward_mean" in line else ("loss", "train/loss", ".4f")
    shown = (first, ("lag", "train/lag_mean", ".2f"), ("tok/s", "step/tokens_per_second", ",.0f"))
    return "  ".join(f"{label} {line[name]:{form}}" for label, name, form in shown if name in line)
