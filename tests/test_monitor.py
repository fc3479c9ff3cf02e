"""The accounting of the driver's time, with a clock that tests move by hand."""

from __future__ import annotations

from pathlib import Path

import pytest

from flows.monitor import Monitor
from storage.metrics import read_metrics
from storage.runs import RunFolder


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return RunFolder(str(tmp_path))


def batch(monitor: Monitor, clock: Clock, step: int) -> None:
    """10 s: 4 waiting, 3 training of which 1 storing, 2 refit, 1 that no stage accounts for."""
    for part, seconds in (("waiting", 4), ("train", 3), ("refit", 2)):
        with monitor.measure(part):
            clock.now += seconds
    monitor.record({"train/store_seconds": 1.0, "train/tokens": 50.0}, "train")
    clock.now += 1
    monitor.end_step(step, {"window/places": 3.0})


def test_shares_are_parts_of_the_loop_up_to_its_last_batch_without_evaluations(folder: RunFolder) -> None:
    clock = Clock()
    monitor = Monitor(folder, 10, clock)
    with monitor.measure("refit"):  # before the loop: start-up
        clock.now += 50
    monitor.start_loop(0)
    batch(monitor, clock, 0)
    with monitor.measure(None):  # an evaluation between two batches
        clock.now += 30
    batch(monitor, clock, 1)
    expected = {"waiting": 0.4, "score": 0, "train": 0.2, "refit": 0.2, "store": 0.1, "orchestration": 0.1}
    assert monitor.shares() == pytest.approx(expected)
    assert monitor.seconds_per_step() == pytest.approx(10)
    with monitor.measure("store"):  # the last checkpoint
        clock.now += 20
    with monitor.measure(None):  # the last evaluation
        clock.now += 20
    assert monitor.shares() == pytest.approx(expected)
    assert sum(monitor.shares().values()) == pytest.approx(1)


def test_metrics_of_an_evaluation_and_of_a_replay_join_the_line_of_their_own_step(folder: RunFolder) -> None:
    clock = Clock()
    monitor = Monitor(folder, 10, clock)
    monitor.start_loop(0)
    monitor.write(0, {"evaluate/reward_mean": 0.25})
    batch(monitor, clock, 0)
    monitor.write(1, {"evaluate/reward_mean": 0.5})
    monitor.write_replayed(0, {"train/loss": 1.5})
    first, second = read_metrics(folder)
    assert (first["step"], first["evaluate/reward_mean"], first["window/places"]) == (0, 0.25, 3.0)
    assert (first["step/seconds"], first["step/tokens_per_second"], first["replayed/train/loss"]) == (10.0, 5.0, 1.5)
    assert (second["step"], second["evaluate/reward_mean"]) == (1, 0.5)


def test_the_seconds_of_a_batch_leave_out_the_evaluation_before_it(folder: RunFolder) -> None:
    clock = Clock()
    monitor = Monitor(folder, 10, clock)
    monitor.start_loop(0)
    with monitor.measure(None):
        clock.now += 30
    batch(monitor, clock, 0)
    assert read_metrics(folder)[0]["step/seconds"] == 10


def test_batches_that_updated_nothing_are_counted(folder: RunFolder) -> None:
    clock = Clock()
    monitor = Monitor(folder, 10, clock)
    monitor.start_loop(0)
    for step, updated in enumerate((1.0, 0.0, 1.0, 0.0)):
        monitor.record({"train/updated": updated}, "train")
        batch(monitor, clock, step)
    assert (monitor.steps, monitor.steps_without_update) == (4, 2)
