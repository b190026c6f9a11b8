"""Plots of the runs: the reward, and the difference of trainer and rollout."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from examples.grpo_tiny.runs import Step

__all__ = ["plot"]


def plot(runs: Mapping[str, Sequence[Step]], path: Path) -> None:
    """Write the plots of ``runs`` to ``path``. Raises ModuleNotFoundError without matplotlib."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure: Any
    figure, (rewards, differences) = pyplot.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
    for name, steps in runs.items():
        (line,) = rewards.plot([step.reward for step in steps], label=name)
        colour = line.get_color()
        differences.plot([step.mean_difference for step in steps], color=colour, label=name)
        differences.plot([step.max_difference for step in steps], color=colour, linestyle=":", linewidth=1)
    rewards.set(title="reward", xlabel="step", ylim=(0, 1))
    differences.set(
        title="|trainer logprob − rollout logprob|: mean, and largest (dotted)",
        xlabel="step",
        yscale="log",
    )
    rewards.legend(fontsize=8)
    for axes in (rewards, differences):
        axes.grid(alpha=0.3)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
