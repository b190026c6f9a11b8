"""Counts the turns of each session, shows them at GET /turns and in headers, and limits them to --max-turns."""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Sequence

from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import BaseRoute, Route

from router_core import BadRequest, Exchange, SettingsError, hookimpl


@hookimpl
def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--max-turns", type=int, default=0, metavar="N", help="turns that a session may have; 0: no limit"
    )


def make_plugin(options: argparse.Namespace) -> Turns:
    if options.max_turns < 0:
        raise SettingsError(f"--max-turns: wanted 0 or more, got {options.max_turns}")
    return Turns(options.max_turns)


class Turns:
    """The turns of the sessions of one router. One event loop uses them, so they need no lock."""

    def __init__(self, max_turns: int) -> None:
        self.max_turns = max_turns
        self.turns: Counter[str] = Counter()

    @hookimpl
    async def pre_request(self, exchange: Exchange) -> None:
        session = exchange.session
        if session is None or exchange.request.path != "/generate":
            return
        if 0 < self.max_turns <= self.turns[session]:
            raise BadRequest(f"session {session!r} has had its {self.max_turns} turns (--max-turns)")
        self.turns[session] += 1
        turn = b"%d" % self.turns[session]
        exchange.notes["turns"] = turn
        exchange.request.headers.append((b"x-turn", turn))

    @hookimpl
    async def post_response(self, exchange: Exchange) -> None:
        turn = exchange.notes.get("turns")
        if turn is not None and exchange.reply is not None:
            exchange.reply.headers.append((b"x-turn", turn))

    @hookimpl
    def routes(self) -> Sequence[BaseRoute]:
        return [Route("/turns", self.show, methods=["GET"])]

    async def show(self, _: Request) -> JSONResponse:
        return JSONResponse({"turns": dict(self.turns), "max_turns": self.max_turns})
