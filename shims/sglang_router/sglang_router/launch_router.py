"""Starts slime-router where the SGLang gateway is started: by a function, or as ``python -m``."""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Sequence

from sglang_router.router_args import RouterArgs

__all__ = ["RouterArgs", "launch_router", "main"]


def launch_router(args: RouterArgs | argparse.Namespace) -> None:
    """Serve until SIGTERM or SIGINT. Blocks; call it in the main thread of a process of its own.

    Raises SystemExit when the router cannot start; one line on stderr says why.
    """
    if not isinstance(args, RouterArgs):
        args = RouterArgs.from_cli_args(args)
    if args.log_level in ("debug", "info", "warn", "error"):
        # A forked process has its trainer's log handlers, and the router leaves those, and their level, alone.
        logging.getLogger().setLevel(args.log_level.upper())
    _serve(args.command_line())


def main(arguments: Sequence[str] | None = None) -> None:
    """``python -m sglang_router.launch_router``: a line of the gateway's, with any flag of slime-router."""
    _serve([*RouterArgs().command_line(), *(sys.argv[1:] if arguments is None else arguments)])


def _serve(words: list[str]) -> None:
    # Here, since each process of a trainer imports this module for RouterArgs: httpx, uvicorn and all the rest.
    from router_core.cli import main as slime_router

    code = slime_router(words)
    if code:
        raise SystemExit(code)


if __name__ == "__main__":
    main()
