"""The flags the benchmarks share."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.peers import Peer

__all__ = ["Options", "parse", "present"]


@dataclass(frozen=True, slots=True)
class Options:
    rounds: int
    seconds: float
    json: Path | None
    only: tuple[str, ...]
    gateway_python: str


def parse(description: str, *, rounds: int = 5) -> Options:
    """The command line; ``rounds``: how many, unless it says so."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument(
        "--rounds",
        type=int,
        default=rounds,
        help="rounds; the peers alternate within each (default %(default)s)",
    )
    parser.add_argument("--seconds", type=float, default=4.0, help="length of one measurement (default 4)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every sample to FILE")
    parser.add_argument(
        "--only",
        action="append",
        default=[],
        metavar="NAME",
        help="measure only the peers whose name contains NAME; may be repeated",
    )
    parser.add_argument(
        "--gateway-python",
        default=os.environ.get("GATEWAY_PYTHON", sys.executable),
        metavar="PYTHON",
        help="interpreter that has sglang-router==0.3.2 (default: $GATEWAY_PYTHON, else this one)",
    )
    given = parser.parse_args()
    if given.rounds < 1:
        parser.error("--rounds must be at least 1")
    return Options(given.rounds, given.seconds, given.json, tuple(given.only), given.gateway_python)


def present(peers: Sequence[Peer], only: Sequence[str]) -> list[Peer]:
    """The peers that are wanted and can be run; says which cannot, and how to get them."""
    wanted = [peer for peer in peers if not only or any(name in peer.name for name in only)]
    there = []
    for peer in wanted:
        if reason := peer.missing():
            print(f"left out: {peer.name}: {reason}", file=sys.stderr)
        else:
            there.append(peer)
    return there
