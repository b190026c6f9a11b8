"""Entry points of the SGLang gateway that start slime-router: a function, and ``python -m``."""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Sequence

from sglang_router.router_args import RouterArgs

__all__ = ["RouterArgs", "launch_router", "main"]


def launch_router(args: RouterArgs | argparse.Namespace) -> None:
    """Serve until SIGTERM, SIGINT or SIGHUP. Blocks; call it in the main thread of a process of its own.

    Raises SystemExit when the router cannot start; one line on stderr says why.
    """
    if not isinstance(args, RouterArgs):
        args = RouterArgs.from_cli_args(args)
    if args.log_level in ("debug", "info", "warn", "error"):
        # A forked process has its trainer's log handlers, which the router does not change. So set the level here.
        logging.getLogger().setLevel(args.log_level.upper())
    _serve(args.command_line())


def main(arguments: Sequence[str] | None = None) -> None:
    """Run ``python -m sglang_router.launch_router``, which takes the gateway's flags and those of slime-router."""
    _serve([*RouterArgs().command_line(), *(sys.argv[1:] if arguments is None else arguments)])


def _serve(words: list[str]) -> None:
    # Imported here: each process of a trainer imports this module for RouterArgs, without need of httpx and uvicorn.
    from router_core.cli import main as slime_router

    code = slime_router(words)
    if code:
        raise SystemExit(code)


if __name__ == "__main__":
    main()
