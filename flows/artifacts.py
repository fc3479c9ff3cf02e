"""What a run shows as pictures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


def draw_reward_curve(lines: Sequence[Mapping[str, Any]], evaluations: Mapping[int, float], path: Path) -> None:
    """Training reward by step, its running mean over ten batches, and the held-out evaluations, as a PNG."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    lines = [line for line in lines if "rollout/reward_mean" in line]
    steps = [line["step"] for line in lines]
    rewards = [line["rollout/reward_mean"] for line in lines]
    means = [sum(part) / len(part) for i in range(len(rewards)) if (part := rewards[max(0, i - 9) : i + 1])]
    figure = Figure(figsize=(7, 4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    axes.plot(steps, rewards, color="#9ecae1", linewidth=1, label="training, by batch")
    axes.plot(steps, means, color="#08519c", linewidth=2, label="training, mean of 10 batches")
    axes.plot(list(evaluations), list(evaluations.values()), "o--", color="#d94801", label="held out")
    axes.set(xlabel="batch step", ylabel="reward", ylim=(0, 1))
    axes.grid(alpha=0.3)
    axes.legend(loc="upper left")
    figure.savefig(path, dpi=120)
