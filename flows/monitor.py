"""What a run tells about itself: where the driver's time went, a line of metrics a batch, progress in the terminal."""

from __future__ import annotations

import contextvars
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from storage.metrics import append_metrics
from storage.runs import RunFolder

SHARES = ("waiting", "score", "train", "refit", "store", "orchestration")
"""Parts of the critical path. Orchestration is what no stage accounts for: Prefect, the flow, the event loop."""


class Monitor:
    """Collects the metrics of the batch under way, and the driver's seconds by part from `start_loop` on."""

    def __init__(self, folder: RunFolder, max_steps: int, console: Console | None = None) -> None:
        self._folder = folder
        self._metrics: dict[str, float] = {}
        self._seconds = dict.fromkeys(SHARES, 0.0)
        self._apart = 0.0
        self._loop_started: float | None = None
        self._step_started = time.perf_counter()
        self.first_step_at: float | None = None
        self.steps = 0
        self._progress = Progress(
            TextColumn("[bold]{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[line]}"),
            TimeRemainingColumn(),
            console=console or Console(stderr=True),
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
        now = time.perf_counter()
        self._loop_started = self._step_started = now
        self._seconds = dict.fromkeys(SHARES, 0.0)
        self._apart = 0.0
        self.steps, self.first_step_at = 0, None
        self._metrics.clear()
        self._progress.update(self._bar, completed=step, line="first batch")

    @contextmanager
    def measure(self, part: str | None) -> Iterator[None]:
        """Account the time inside to a part of the critical path; None is beside it (evaluation)."""
        start = time.perf_counter()
        try:
            yield
        finally:
            seconds = time.perf_counter() - start
            if part is None:
                self._apart += seconds
            else:
                self._seconds[part] += seconds

    def record(self, metrics: Mapping[str, float], part: str | None) -> None:
        """Metrics of one stage; what it says it spent on storing moves from its part to `store`."""
        self._metrics |= metrics
        for name, value in metrics.items():
            if name.endswith("/store_seconds") and part is not None:
                self._seconds[part] -= value
                self._seconds["store"] += value

    def end_step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write the line of batch `step`."""
        now = time.perf_counter()
        if self.first_step_at is None:
            self.first_step_at = time.time()
        self.steps += 1
        seconds = now - self._step_started
        self._step_started = now
        line: dict[str, Any] = {"step": step, "run_attempt": self._folder.attempt, "time": time.time()}
        line |= self._metrics | dict(metrics) | {"step/seconds": seconds}
        line["step/tokens_per_second"] = line.get("train/tokens", 0.0) / seconds
        self._metrics.clear()
        with self.measure("store"):
            append_metrics(self._folder, line)
        self._progress.update(self._bar, completed=step, line=_line(line))

    def shares(self) -> dict[str, float]:
        """Share of each part in the loop's wall time without evaluation; they sum to 1."""
        if self._loop_started is None:
            return dict.fromkeys(SHARES, 0.0)
        total = max(self._step_started - self._loop_started - self._apart, 1e-9)
        known = {part: seconds for part, seconds in self._seconds.items() if part != "orchestration"}
        return {part: seconds / total for part, seconds in known.items()} | {
            "orchestration": 1 - sum(known.values()) / total
        }

    def seconds_per_step(self) -> float:
        if self._loop_started is None or not self.steps:
            return 0.0
        return (self._step_started - self._loop_started - self._apart) / self.steps


_current: contextvars.ContextVar[Monitor] = contextvars.ContextVar("monitor")


def current_monitor() -> Monitor:
    return _current.get()


def _line(line: Mapping[str, float]) -> str:
    parts = []
    for label, name, form in (
        ("reward", "rollout/reward_mean", ".3f"),
        ("loss", "train/loss", ".4f"),
        ("lag", "train/lag_mean", ".2f"),
        ("tok/s", "step/tokens_per_second", ",.0f"),
        ("s/step", "step/seconds", ".2f"),
    ):
        if name in line:
            parts.append(f"{label} {line[name]:{form}}")
    return "  ".join(parts)
