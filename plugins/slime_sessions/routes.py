"""Routes on sessions: create a session, read its records, fetch its samples, delete it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import quote

import anyio.to_thread
import orjson
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from router_core.errors import BadRequest, PluginNotLoaded, SessionNotFound
from router_core.router import Router
from router_core.routes import JSON, json_object
from slime_rows.streamed import answer_with
from slime_sessions.created import CreatedSessions
from slime_sessions.names import check_name
from slime_sessions.records import accumulated, records_of
from slime_sessions.tree import committed, statuses_of

if TYPE_CHECKING:
    from slime_radix_cache.contracts import SessionTurns, Turn
    from slime_rows.body_pieces import Piece
    from slime_sessions.samples import Sample

__all__ = ["SessionRoutes"]

_T = TypeVar("_T")
_COMPONENT = "session_turns"
#: Keys of a sample's metadata that only the server writes (miles' _SERVER_OWNED_METADATA_KEYS).
_OWN_KEYS = frozenset(
    ("accumulated_token_ids", "tito_session_mismatch", "leaf", "experts_exact", "routed_experts_reason")
)
#: An answer for turns that sampled more tokens than this in total is written in a thread. Writing so many takes 1 ms.
_MANY_TOKENS = 16_384
#: An answer for more turns than this is written in a thread, too: the record of each turn repeats all tokens before it.
_MANY_TURNS = 8


@dataclass(frozen=True, slots=True)
class SamplesRequest:
    """A request for samples.

    ``max_seq_len``: the maximum number of tokens in a sample. ``retries``: see ``leaves`` in ``tree.py``.
    """

    max_seq_len: int | None = None
    metadata: dict[str, Any] | None = None
    retries: bool = False

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> SamplesRequest:
        """Check the body. Raises BadRequest."""
        longest = document.get("max_seq_len")
        if longest is not None and (type(longest) is not int or longest < 1):
            raise BadRequest(f'"max_seq_len" must be an integer above 0, or null, got {longest!r:.80}')
        metadata = document.get("metadata")
        if metadata is not None and not isinstance(metadata, dict):
            raise BadRequest(f'"metadata" must be an object, or null, got {type(metadata).__name__}')
        try:
            orjson.dumps([[[metadata]]])  # nested as deep as in the answer
        except orjson.JSONEncodeError as error:  # orjson writes fewer levels than it reads
            raise BadRequest(f'"metadata" cannot be written as JSON: {error}') from None
        retries = document.get("include_retries")
        if retries is not None and not isinstance(retries, bool):
            raise BadRequest(f'"include_retries" must be true or false, got {retries!r:.80}')
        return cls(longest, metadata, bool(retries))


class SessionRoutes:
    """The routes on sessions."""

    def __init__(self, router: Router, created: CreatedSessions) -> None:
        self._router = router
        self._created = created

    def all(self) -> list[Route]:
        """Return the routes."""
        return [
            Route("/sessions", self._create, methods=["POST"]),
            Route("/sessions/{session:path}/samples", self._samples, methods=["POST"]),
            Route("/sessions/{session:path}", self._one, methods=["GET", "DELETE"]),
        ]

    async def _create(self, request: Request) -> Response:
        document = await json_object(request)
        name = document.get("session_id")
        if name is not None:
            if not isinstance(name, str):
                raise BadRequest(f'"session_id" must be a string, got {type(name).__name__}')
            check_name(name, 'wanted "session_id"')
        if document.get("sampling_params"):  # rllm's gateway writes them into each request
            raise BadRequest('"sampling_params" of a session have no effect: send them with each request')
        session = self._created.create(name)
        return JSON({"session_id": session})

    async def _one(self, request: Request) -> Response:
        """Show or delete a session. Both methods share a route, so that a 405 names both."""
        return await (self._delete if request.method == "DELETE" else self._show)(request)

    async def _show(self, request: Request) -> Response:
        session, source, turns = await self._find(request)
        complete = not source.has_lost(session)
        texts = [source.text(turn) for turn in turns]

        def write() -> bytes:
            metadata = {
                "accumulated_token_ids": accumulated(source, turns),
                "max_trim_tokens": 0,
                "complete": complete,
            }
            return orjson.dumps(
                {"session_id": session, "records": records_of(source, turns, texts), "metadata": metadata},
                option=orjson.OPT_SERIALIZE_NUMPY,
            )

        return Response(await _written(turns, write), media_type="application/json")

    async def _samples(self, request: Request) -> Response:
        wanted = SamplesRequest.from_json(await json_object(request))
        session, source, turns = await self._find(request)
        is_lossy = source.has_lost(session)

        def made() -> tuple[list[Sample], dict[str, Any]]:
            from slime_sessions.samples import InexactSession, samples_of  # numpy is heavy

            if is_lossy:
                raise InexactSession(
                    f"something of session {session!r} is lost, or could not be recorded as exact: a sample would"
                    f" be missing or too short (GET /trajectories/{quote(session)} has what is kept)"
                )
            metadata: dict[str, Any] = {
                "accumulated_token_ids": accumulated(source, turns),
                "max_trim_tokens": 0,
                "complete": True,
                **({"agent": agent} if wanted.metadata is not None else {}),
            }
            return samples_of(source, session, turns, wanted.max_seq_len, retries=wanted.retries), metadata

        agent = wanted.metadata or {}
        samples, metadata = await _written(turns, made)

        def encode() -> Iterator[Piece]:
            from slime_sessions.wire import encode  # numpy is heavy

            empty = _empty_reason(turns) if not samples else None
            shown = {key: value for key, value in agent.items() if key not in _OWN_KEYS}
            return encode(samples, metadata, empty, reward=agent.get("reward"), agent=shown)

        client = request.client.host if request.client is not None else None
        return await answer_with(
            [rows for sample in samples for rows in sample.rows],
            encode,
            "application/octet-stream",
            lambda work: self._router.threads.run(work, client),
            lambda: self._router.long_work.pause(client),
            is_long=_is_long(turns),
        )

    async def _delete(self, request: Request) -> Response:
        session: str = request.path_params["session"]
        source: SessionTurns | None = self._router.components.find(_COMPONENT)
        if source is not None:
            await source.load(session)
        if session not in self._created and not (source is not None and source.turns(session)):
            raise _not_found(session)
        self._created.delete(session)
        if source is not None:
            source.forget(session)
        return Response(status_code=204)

    async def _find(self, request: Request) -> tuple[str, SessionTurns, Sequence[Turn]]:
        """Return the session's name, the component that has its turns, and the turns.

        Raises SessionNotFound, PluginNotLoaded.
        """
        session: str = request.path_params["session"]
        source: SessionTurns | None = self._router.components.find(_COMPONENT)
        if source is None:
            raise PluginNotLoaded("nothing is recorded without --plugin radix_cache")
        await source.load(session)
        turns = source.turns(session)
        if session in self._created.deleted or (not turns and session not in self._created):
            raise _not_found(session)
        return session, source, turns


def _not_found(session: str) -> SessionNotFound:
    return SessionNotFound(f"no session {session!r:.200}: deleted, or neither created nor recorded")


def _empty_reason(turns: Sequence[Turn]) -> str:
    """Return why ``turns`` make no samples. The reason ``still_running`` is ours, the others are miles'."""
    if committed(turns, statuses_of(turns)):
        return "all_truncated"
    return "no_records" if not turns else "still_running"


async def _written(turns: Sequence[Turn], write: Callable[[], _T]) -> _T:
    """Call ``write``, in a thread when ``turns`` are many or long. Returns its result."""
    return await anyio.to_thread.run_sync(write) if _is_long(turns) else write()


def _is_long(turns: Sequence[Turn]) -> bool:
    return sum(turn.tokens for turn in turns) > _MANY_TOKENS or len(turns) > _MANY_TURNS
