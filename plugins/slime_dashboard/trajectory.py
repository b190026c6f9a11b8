"""The data of the trajectory viewer: one session, the tokens of a branch, and their text tokenised again.

A branch is a turn together with all turns that it continues.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from starlette.requests import Request
from starlette.responses import Response

from router_core.errors import BadRequest, HTTPError, PluginNotLoaded
from router_core.router import Router
from router_core.routes import JSON, ControlRoute
from slime_dashboard.trajectory_pieces import Pieces
from slime_dashboard.trajectory_retokenised import compared
from slime_dashboard.trajectory_view import branch_of, page_of, tree_of

if TYPE_CHECKING:
    from slime_radix_cache.contracts import SessionTurns, TextEncoder, Turn

__all__ = ["TrajectoryData"]

#: Largest number of tokens that one request returns.
_PAGE_TOKENS = 4096
#: Largest number of turns in the tree, which has the newest turns of the session.
_MOST_TURNS = 500
#: Largest number of tokens in a branch whose text is tokenised again: about half a second of work.
_MOST_COMPARED = 1 << 18
#: Largest number of places with different tokens that are listed, and of tokens that are listed for each place.
_MOST_PLACES = 2000
_MOST_LISTED = 256


class TurnNotFound(HTTPError):
    """A session has no such turn."""

    status, type, code = 404, "not_found_error", "TURN_NOT_FOUND"


class TrajectoryData:
    """Answers requests for the data of one session."""

    def __init__(self, router: Router) -> None:
        self._router = router
        self._pieces: Pieces | None = None

    def routes(self, path: str) -> list[ControlRoute]:
        """Return the routes, all at or below ``path``/trajectory."""
        path = f"{path}/trajectory"
        return [
            ControlRoute(path, self._session, methods=["GET"]),
            ControlRoute(f"{path}/tokens", self._tokens, methods=["GET"]),
            ControlRoute(f"{path}/retokenised", self._retokenised, methods=["GET"]),
        ]

    async def _session(self, request: Request) -> Response:
        session, source, turns = await self._find(request)
        turn = _turn(request, turns)
        is_complete = not source.has_lost(session)

        def read() -> dict[str, Any]:
            branch = branch_of(source, turn, source.context(turn, turns))
            tree = tree_of(source, turns, _MOST_TURNS)
            return {"session": session, "complete": is_complete, **tree, "branch": branch}

        return await self._answer(request, read)

    async def _tokens(self, request: Request) -> Response:
        _, source, turns = await self._find(request)
        turn = _turn(request, turns)
        start = _number(request, "start", 0)
        end = start + min(_number(request, "limit", _PAGE_TOKENS), _PAGE_TOKENS)

        def read() -> dict[str, Any]:
            pieces = self._read_pieces(source)
            return page_of(source.context(turn, turns), start, end, pieces.of if pieces is not None else None)

        return await self._answer(request, read)

    async def _retokenised(self, request: Request) -> Response:
        _, source, turns = await self._find(request)
        turn = _turn(request, turns)
        client, threads = _address(request), self._router.threads
        encoder: TextEncoder | None = self._router.components.find("encoder")
        if encoder is None:
            return _not_compared("no plugin offers a tokenizer")
        record = (await threads.run(lambda: source.context(turn, turns), client)).record
        if len(record.tokens) > _MOST_COMPARED:
            return _not_compared(f"the branch has more than {_MOST_COMPARED:,} tokens")

        def spelt() -> tuple[list[int], str, Pieces | None]:
            ids = record.tokens.tolist()
            return ids, source.spell(ids), self._read_pieces(source)

        ids, text, pieces = await threads.run(spelt, client)
        try:
            again = array("i", await encoder.encode(text, begins=True, client=client))
        except BadRequest as error:
            return _not_compared(str(error))
        if pieces is None:
            return _not_compared("the bytes of the tokens are not known")
        # In steps on the event loop: a thread would hold the interpreter's lock for longer than a step takes.
        found = await self._router.long_work.run(compared(ids, again, pieces.of), client)
        if found is None:
            return _not_compared("the bytes of a token are not known, or the new tokens spell another text")

        def read() -> dict[str, Any]:
            return {
                "compared": True,
                "tokens": len(ids),
                "again": found.again,
                "changed": found.changed,
                "changed_trained": sum(
                    int(record.loss_mask[one.start : one.end].sum()) for one in found.places
                ),
                "place_count": len(found.places),
                "places": [
                    {
                        "start": one.start,
                        "end": one.end,
                        "again_count": len(one.again),
                        "recorded": _spelt(ids[one.start : one.end], pieces),
                        "again": _spelt(one.again, pieces),
                    }
                    for one in found.places[:_MOST_PLACES]
                ],
            }

        return await self._answer(request, read)

    async def _answer(self, request: Request, read: Callable[[], dict[str, Any]]) -> Response:
        return _answer_of(await self._router.threads.run(read, _address(request)))

    def _read_pieces(self, source: SessionTurns) -> Pieces | None:
        """Return the pieces of the tokenizer's tokens; None without a tokenizer. The first call makes them."""
        if self._pieces is None:
            tokenizer = self._router.components.find("tokenizer")
            if tokenizer is not None:
                self._pieces = Pieces(source.spell, tokenizer)
        return self._pieces

    async def _find(self, request: Request) -> tuple[str, SessionTurns, Sequence[Turn]]:
        """Return the session's name, the source of recorded sessions, and the session's turns. Raises HTTPError."""
        session = request.query_params.get("session")
        if not session:
            raise BadRequest("name a session: ?session=NAME")
        source: SessionTurns | None = self._router.components.find("session_turns")
        if source is None:
            raise PluginNotLoaded("nothing is recorded without --plugin radix_cache")
        await source.load(session)
        return session, source, source.expect(session)


def _turn(request: Request, turns: Sequence[Turn]) -> Turn:
    """Return the turn that the request names, else the last turn. Raises HTTPError."""
    number = _number(request, "turn", len(turns) - 1)
    if number >= len(turns):
        raise TurnNotFound(f"wanted a turn from 0 to {len(turns) - 1}, got {number}")
    return turns[number]


def _spelt(ids: Sequence[int], pieces: Pieces) -> list[dict[str, Any]]:
    """Return the first of ``ids``, at most 256, each with its text, or with its bytes if they are not UTF-8."""
    shown = [(one, pieces.of(one)) for one in ids[:_MOST_LISTED]]
    return [
        {
            "id": one,
            "text": piece.text,
            "bytes": piece.raw.hex() if piece.text is None and piece.raw else None,
        }
        for one, piece in shown
    ]


def _not_compared(why: str) -> Response:
    return _answer_of({"compared": False, "why": why})


def _answer_of(document: dict[str, Any]) -> Response:
    return JSON(document, headers={"cache-control": "no-store"})


def _number(request: Request, name: str, default: int) -> int:
    value = request.query_params.get(name)
    if value is None:
        return default
    if not (value.isascii() and value.isdigit() and len(value) < 10):
        raise BadRequest(f"{name}: wanted a number, got {value[:80]!r}")
    return int(value)


def _address(request: Request) -> str | None:
    return request.client.host if request.client is not None else None
