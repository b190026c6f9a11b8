"""The flags that the benchmarks share."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from benchmarks import history
from benchmarks.peers import Peer

__all__ = ["VOCABULARY", "Options", "add_directory", "flags", "parse", "present", "read"]

#: The most tokens that the vocabulary of the test data may have.
VOCABULARY = 16_000
_TINY_SECONDS, _TINY_REQUESTS, _TINY_VOCABULARY = 0.2, 200, 2_000
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Options:
    """The shared flags. ``tiny``: only try the script; the figures mean nothing."""

    rounds: int
    seconds: float
    json: Path | None
    history: Path | None
    only: tuple[str, ...]
    gateway_python: str
    tiny: bool

    def pick(self, full: _T, *, tiny: _T) -> _T:
        """Return ``full``, or in a tiny run ``tiny``."""
        return tiny if self.tiny else full

    @property
    def most_requests(self) -> int | None:
        """The number of answers after which a load sends no more requests; None: only its time limits the load."""
        return self.pick(None, tiny=_TINY_REQUESTS)

    @property
    def vocabulary(self) -> int:
        """The most tokens that the vocabulary of the test data may have."""
        return self.pick(VOCABULARY, tiny=_TINY_VOCABULARY)

    def tokenizer(self, directory: Path) -> tuple[str, ...]:
        """Return a router's flags for the tokenizer in ``directory``. In a tiny run, transformers is not imported."""
        quick = ("--middleware-paths", "benchmarks.quick_tokenizer", "--quick-tokenizer", str(directory))
        return self.pick(("--hf-checkpoint", str(directory)), tiny=quick)

    def wants(self, name: str) -> bool:
        """Return True if ``--only`` is absent, or if one of its values is a part of ``name``."""
        return not self.only or any(part in name for part in self.only)


def flags(description: str, *, rounds: int = 5, seconds: float = 4.0) -> argparse.ArgumentParser:
    """Return a parser of the shared flags. A script may add its own flags. :func:`read` takes the parser's result."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument(
        "--rounds",
        type=int,
        default=rounds,
        help="number of rounds, engines, clients or seeds: see benchmarks/README.md (default %(default)s)",
    )
    parser.add_argument(
        "--seconds", type=float, default=seconds, help="length of one measurement (default %(default)s)"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every sample to FILE")
    parser.add_argument(
        "--history",
        type=Path,
        nargs="?",
        const=history.DEFAULT,
        metavar="FILE",
        help="append commit, machine and ratios as one line of JSON to FILE (without FILE: to %(const)s)",
    )
    parser.add_argument(
        "--only",
        action="append",
        default=[],
        metavar="NAME",
        help="measure only the peers, rows or tables whose name contains NAME; may be repeated",
    )
    parser.add_argument(
        "--gateway-python",
        default=os.environ.get("GATEWAY_PYTHON", sys.executable),
        metavar="PYTHON",
        help="interpreter that has sglang-router==0.3.2 (default: $GATEWAY_PYTHON, else that of this script)",
    )
    parser.add_argument(
        "--tiny",
        action="store_true",
        help="try the script in seconds: one short round, few requests, no proxy but the router",
    )
    return parser


def add_directory(parser: argparse.ArgumentParser) -> None:
    """Add ``--directory``, the directory in which a script makes its temporary directory.

    The default is None: the system's directory for temporary files.
    """
    parser.add_argument(
        "--directory",
        type=Path,
        metavar="DIR",
        help="files go below DIR, and are removed at the end (default: the system's temporary directory)",
    )


def read(given: argparse.Namespace) -> Options:
    """Return the shared flags. ``--tiny`` overrides ``--rounds`` and ``--seconds``.

    Exits with code 2 if ``--rounds`` is below 1.
    """
    if given.rounds < 1:
        print("--rounds must be at least 1", file=sys.stderr)
        raise SystemExit(2)
    rounds, seconds = (1, _TINY_SECONDS) if given.tiny else (given.rounds, given.seconds)
    return Options(
        rounds, seconds, given.json, given.history, tuple(given.only), given.gateway_python, given.tiny
    )


def parse(description: str, *, rounds: int = 5, seconds: float = 4.0) -> Options:
    """Parse the command line; ``rounds`` and ``seconds`` are the defaults."""
    return read(flags(description, rounds=rounds, seconds=seconds).parse_args())


def present(peers: Sequence[Peer], options: Options, *, ignore_only: bool = False) -> list[Peer]:
    """Return the peers that are wanted and can be run. Prints which peers cannot be run, and how to install them.

    ``ignore_only``: ``--only`` leaves out no peer.
    """
    there = []
    for peer in peers:
        if (options.tiny and not peer.is_tiny) or not (ignore_only or options.wants(peer.name)):
            continue
        if reason := peer.missing():
            print(f"left out: {peer.name}: {reason}", file=sys.stderr)
        else:
            there.append(peer)
    return there
