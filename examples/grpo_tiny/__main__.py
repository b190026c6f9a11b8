"""Four GRPO runs through slime-router, and their plots. Both runs of a model begin with the same weights and seeds."""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import anyio

from examples.grpo_tiny.runs import RUNS, Run, Size, Step, train


def main() -> None:
    """Do the runs, print each step, and write ``results.json`` and, with matplotlib, ``grpo_tiny.png``."""
    parser = argparse.ArgumentParser(prog="python -m examples.grpo_tiny", description=__doc__)
    usual = Size()
    for name, what in (("steps", "of each run"), ("samples", "of each of the four conversations, in a step")):
        default = getattr(usual, name)
        parser.add_argument(
            f"--{name}", type=int, default=default, metavar="N", help=f"{name} {what} (%(default)s)"
        )
    parser.add_argument(
        "--seed", type=int, default=1, metavar="N", help="seed of weights and sampling (%(default)s)"
    )
    parser.add_argument("--only", default="", metavar="NAME", help="only the runs whose name contains NAME")
    parser.add_argument(
        "--out", type=Path, default=Path("grpo_tiny"), metavar="DIR", help="results go here (%(default)s)"
    )
    options = parser.parse_args()
    size = Size(steps=options.steps, samples=options.samples)
    results: dict[str, list[Step]] = {}
    for run in RUNS:
        if options.only in run.name:
            started = time.monotonic()
            results[run.name] = _trained(run, size, options.seed)
            print(f"{run.name}: {time.monotonic() - started:.0f} s", flush=True)
    options.out.mkdir(parents=True, exist_ok=True)
    document = {name: [asdict(step) for step in steps] for name, steps in results.items()}
    (options.out / "results.json").write_text(json.dumps(document, indent=1))
    try:
        from examples.grpo_tiny.plots import plot

        plot(results, options.out / "grpo_tiny.png")
    except ModuleNotFoundError as missing:
        print(f"no plots: {missing}; pip install matplotlib", file=sys.stderr)


def _trained(run: Run, size: Size, seed: int) -> list[Step]:
    with tempfile.TemporaryDirectory() as directory:
        return anyio.run(lambda: train(run, size, Path(directory), seed=seed, on_step=_shown(run.name)))


def _shown(name: str) -> Callable[[int, Step], None]:
    def show(number: int, step: Step) -> None:
        print(
            f"{name}: step {number}: reward {step.reward:.3f}, |trainer - rollout| mean {step.mean_difference:.5f}, "
            f"p99 {step.p99_difference:.4f}, max {step.max_difference:.4f}; "
            f"other tokens than were sampled in {step.other_tokens:.0%} of the samples",
            flush=True,
        )

    return show


if __name__ == "__main__":
    # Otherwise the libraries of the model show a progress bar for each file that they read or write.
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    main()
