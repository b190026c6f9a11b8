"""History of the router's figures beside the gateway's: one line of JSON for each run of a benchmark."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib.util import find_spec
from pathlib import Path
from statistics import median

__all__ = ["DEFAULT", "append"]

_ROOT = Path(__file__).resolve().parent.parent
DEFAULT = _ROOT / "benchmarks" / "history.jsonl"
#: The code that is measured. Changes elsewhere do not make a run ``dirty``.
_MEASURED = ("router_core", "plugins")
_RATES = ("requests_per_s", "chunks_per_s")


def append(
    path: Path,
    samples: Mapping[str, Mapping[str, Sequence[Mapping[str, float]]]],
    machine: Mapping[str, object],
    *,
    baseline: str,
) -> None:
    """Append a run to ``path``. Each scenario has a row for each peer with a measured rate or processor time.

    The ``baseline`` has no rows.
    """
    rows: list[dict[str, object]] = []
    for scenario, peers in samples.items():
        theirs = peers.get(baseline, ())
        for peer, ours in peers.items():
            rate = next((name for name in _RATES if name in ours[0]), "")
            cpu_us = _median([sample["cpu_us"] for sample in ours if "cpu_us" in sample])
            if peer == baseline or not (rate or cpu_us):
                continue
            pairs = zip(ours, theirs, strict=False)
            row = {
                "ratio": _median([one[rate] / other[rate] for one, other in pairs if other.get(rate)]),
                "cpu_us": cpu_us,
                "baseline_cpu_us": _median([sample["cpu_us"] for sample in theirs if "cpu_us" in sample]),
                "exact": _median([sample["exact"] for sample in ours if "exact" in sample]),
            }
            rows.append({"scenario": scenario, "peer": peer, **row})
    line = {
        "commit": _git("rev-parse", "--short=7", "HEAD"),
        "dirty": bool(_git("status", "--porcelain", "--", *_MEASURED)),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "compiled": _is_compiled(),
        "machine": machine,
        "benchmark": Path(sys.argv[0]).stem,
        "baseline": baseline,
        "rows": rows,
    }
    with path.open("a") as file:
        file.write(json.dumps(line) + "\n")


def _median(values: Sequence[float]) -> float | None:
    return round(median(values), 4) if values else None


def _is_compiled() -> bool:
    """Return True if ``router_core.proxy`` is compiled, by its file, since older commits have no function for this."""
    found = find_spec("router_core.proxy")
    return found is not None and not str(found.origin).endswith(".py")


def _git(*arguments: str) -> str:
    """Return the output of git in this source tree; an empty string outside a repository or without git."""
    try:
        done = subprocess.run(["git", *arguments], cwd=_ROOT, capture_output=True, text=True)
    except FileNotFoundError:
        return ""
    return done.stdout.strip()
