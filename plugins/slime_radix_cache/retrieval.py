"""``/retrieve_from_text`` and ``/cache_stats``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import orjson
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from router_core.errors import BadRequest
from slime_radix_cache.answer import inexact_reason, record_of
from slime_radix_cache.encoding import Encoder
from slime_radix_cache.open_streams import OpenStreams
from slime_radix_cache.tally import Tally
from slime_radix_cache.trajectories import Trajectories

__all__ = ["Question", "Retrieval"]

_SESSION_HEADERS = ("x-session-id", "x-smg-routing-key")


@dataclass(frozen=True, slots=True)
class Question:
    """What ``/retrieve_from_text`` is asked."""

    text: str
    session: str | None = None
    logprobs: bool = True

    @classmethod
    def from_json(cls, body: bytes, session: str | None) -> Question:
        """From the request's body; ``session`` is what its headers say. Raises BadRequest."""
        try:
            document = orjson.loads(body)
        except orjson.JSONDecodeError as error:
            raise BadRequest(f"the body is not JSON: {error}") from None
        if not isinstance(document, dict):
            raise BadRequest('wanted a JSON object with "text"')
        text = document.get("text")
        if not isinstance(text, str):
            raise BadRequest(f'"text" must be a string, got {_kind(text)}')
        named = document.get("session_id")
        if named is not None and not isinstance(named, str):
            raise BadRequest(f'"session_id" must be a string, got {_kind(named)}')
        logprobs = document.get("return_logp")
        return cls(text, named or session, logprobs is None or bool(logprobs))


def _kind(value: object) -> str:
    return "nothing" if value is None else type(value).__name__


class Retrieval:
    """Answers from text with exact tokens, or says that they are not."""

    def __init__(
        self, trajectories: Trajectories, encoder: Encoder, tally: Tally, streams: OpenStreams
    ) -> None:
        self._trajectories = trajectories
        self._encoder = encoder
        self._tally = tally
        self._streams = streams

    async def retrieve(self, question: Question) -> dict[str, Any]:
        """The answer as documented for ``/retrieve_from_text``; token by token values are numpy arrays.

        A pure read: it leaves no trace in the trajectories or their ages, but for what running streams have
        told their clients already.
        """
        text = question.text.encode()
        self._streams.catch_up(text, question.session)
        match = self._trajectories.find_to_read(text, question.session)
        rest = b""
        evicted = False
        if match.position < len(text):
            evicted = self._trajectories.was_evicted(text)
            remainder = text[match.position :].decode()
            rest = await self._encoder.encode(remainder, begins=match.context is None)
        record = record_of(match.context, rest)
        reason = inexact_reason(match, text, record, question.session, evicted=evicted)
        self._tally.answered(reason)
        length = len(record.tokens)
        answer = {
            "tokens": record.tokens,
            "response": question.text,
            "loss_mask": record.loss_mask,
            "token_length": length,
            "loss_mask_length": length,
            "generation_versions": record.versions,
            "exact": reason is None,
            "inexact_reason": reason,
            "matched_length": len(text[: match.position].decode()),
            "candidates": match.candidates,
        }
        if question.logprobs:
            answer["rollout_logp"] = record.logprobs
        return answer

    def routes(self, stats: Callable[[], dict[str, Any]]) -> list[Route]:
        """The plugin's routes."""

        async def retrieve_from_text(request: Request) -> Response:
            session = next(filter(None, map(request.headers.get, _SESSION_HEADERS)), None)
            return _json(await self.retrieve(Question.from_json(await request.body(), session)))

        async def cache_stats(_: Request) -> Response:
            return _json(stats())

        return [
            Route("/retrieve_from_text", retrieve_from_text, methods=["POST"]),
            Route("/cache_stats", cache_stats, methods=["GET"]),
        ]


def _json(value: dict[str, Any]) -> Response:
    return Response(orjson.dumps(value, option=orjson.OPT_SERIALIZE_NUMPY), media_type="application/json")
