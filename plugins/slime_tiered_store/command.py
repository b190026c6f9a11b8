"""The command ``slime-router store``, which verifies directories of ``--store-ssd``."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from router_core.errors import SettingsError, StartupError
from slime_start.commands import CommandParser
from slime_tiered_store.tiers.ssd.verify import verify_directory

__all__ = ["main"]


def _parser() -> CommandParser:
    parser = CommandParser(
        failure=SettingsError,
        prog="slime-router store",
        description="Look after the directories of --store-ssd.",
        epilog="verify prints one line of JSON for each directory, and repairs nothing. "
        "Exit code 0: all blocks and notes are intact; 1: some are not; 2: a directory could not be verified.",
    )
    parser.add_argument(
        "action", choices=["verify"], help="verify: read every block and all notes, and compare the checksums"
    )
    parser.add_argument(
        "directories", nargs="+", type=Path, metavar="DIR", help="directory that no router uses now"
    )
    return parser


def main(argv: list[str]) -> int:
    """Run the command. Return 0 when all is intact, 1 when some blocks or notes are not, and 2 for another failure."""
    code = 0
    try:
        for path in _parser().parse_args(argv).directories:
            try:
                report = verify_directory(path)
            except (OSError, ValueError) as error:
                told = error.strerror if isinstance(error, OSError) else error
                raise StartupError(f"{path} cannot be verified: {told}") from None
            sys.stdout.write(json.dumps(report.as_dict()) + "\n")
            code = code if report.is_intact else 1
    except StartupError as error:
        sys.stderr.write(f"slime-router store: {error}\n")
        return 2
    return code
