"""The routes that retrieve tokens by text, by messages and by session; and ``/cache_stats``."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from io import BytesIO
from typing import Any

import orjson
from starlette.requests import Request as HTTPRequest
from starlette.responses import Response as HTTPResponse
from starlette.routing import Route

from router_core.errors import SessionNotFound
from router_core.exchange import SessionSource, client_of, session_of
from router_core.request import Request
from slime_fairness.turns import FairThreads, FairTurns
from slime_radix_cache.capture.given_prompts import GivenPrompts
from slime_radix_cache.capture.open_streams import OpenStreams
from slime_radix_cache.capture.row_recorder import RowRecorder
from slime_radix_cache.demotion.cold_trajectories import ColdTrajectories
from slime_radix_cache.index.segments import Response
from slime_radix_cache.index.text_search import Match
from slime_radix_cache.index.trajectories import Trajectories
from slime_radix_cache.retrieval.answer import Answer, Lost, about_record, inexact_reason, record_of
from slime_radix_cache.retrieval.branches import Branch, answer_of, branches
from slime_radix_cache.retrieval.empty_sessions import nothing_kept
from slime_radix_cache.retrieval.formats import JSON, Format, format_for
from slime_radix_cache.retrieval.question import Conversation, Question, read_object, rows_asked
from slime_radix_cache.retrieval.templates import ChatTemplate
from slime_radix_cache.retrieval.token_rows import WantedRows, find_rows
from slime_radix_cache.tally import Tally
from slime_radix_cache.tokens.encoding import Encoder
from slime_rows.body_pieces import Piece, joined
from slime_rows.streamed import answer_with

__all__ = ["Retrieval"]

#: Answers with more tokens than this are encoded in a thread. To encode so many takes about 1 ms.
_MANY_TOKENS = 16_384


class Retrieval:
    """Retrieves tokens, and the reason if they are not exact. The component ``"trajectories"``.

    A retrieval changes neither the trajectories nor their ages, with three exceptions. Tokens that running streams have
    passed on so far are recorded before the search. A prompt that a client gave as ids may be compared with the
    tokenizer, and the result is noted. And with a store, demoted trajectories are promoted.
    """

    def __init__(
        self,
        trajectories: Trajectories,
        encoder: Encoder,
        template: ChatTemplate,
        tally: Tally,
        streams: OpenStreams,
        spell: Callable[[Sequence[int]], str],
        given_prompts: GivenPrompts,
        session_sources: Iterable[SessionSource] = (),
        *,
        cold: ColdTrajectories,
        rows: RowRecorder,
        long_work: FairTurns,
        threads: FairThreads,
    ) -> None:
        self._trajectories = trajectories
        self._encoder = encoder
        self._template = template
        self._tally = tally
        self._streams = streams
        self._spell = spell
        self._given_prompts = given_prompts
        self._session_sources = session_sources
        self._cold = cold
        self._rows = rows
        self._long_work = long_work
        self._threads = threads

    async def retrieve(self, question: Question, client: str | None = None) -> Answer:
        """Return the answer that is documented for ``/retrieve_from_text``. ``client``: see ``slime_fairness.turns``.

        Raises BadRequest if the text is too long, and StoreFailed.
        """
        self._encoder.check_text(question.text)
        text = await self._encoder.in_utf8(question.text, client)
        await self._cold.load_text(text, question.session)
        self._streams.catch_up(text, question.session)
        kept = self._trajectories
        match = kept.find_to_read(text, question.session)
        while match.unknown:
            await self._given_prompts.find_out_all(match.unknown, kept, client)
            await self._cold.load_text(text, question.session)
            match = kept.find_to_read(text, question.session)
        candidates = kept.candidates(text, match)  # now, since the next await lets segments be demoted
        rest = b""
        matched = len(question.text)
        if match.position < len(text):
            remainder = text[match.position :].decode() if match.position else question.text
            matched -= len(remainder)
            rest = await self._encoder.encode(remainder, begins=match.context is None, client=client)
        record = record_of(match.context, rest, None if match.is_asked else question.session)
        reason = self._encoder.refused or inexact_reason(
            match, text, record, lambda: self._lost(text, question.session)
        )
        self._tally.answered(reason)
        about = {
            "response": question.text,
            **about_record(record, reason, matched, candidates),
            "finish_reason": _finish_reason(match, text),
        }
        rows = find_rows(self._rows, match.context, len(record.tokens), reason, question.rows.names)
        return Answer(record, about, question.logprobs, rows, question.rows.form)

    def _with_rows(self, answer: Answer, branch: Branch, wanted: WantedRows) -> Answer:
        context = branch.leaf, len(branch.leaf)
        reason = answer.about["inexact_reason"]
        rows = find_rows(self._rows, context, branch.tokens, reason, wanted.names)
        return replace(answer, rows=rows, row_form=wanted.form)

    def _lost(self, text: bytes, session: str | None) -> Lost:
        kept = self._trajectories
        return Lost(session is not None and kept.has_lost(session), kept.is_lost(text))

    async def retrieve_messages(self, request: Request, client: str | None = None) -> Answer:
        """Return the answer for the text of the messages in the body of ``request``. Raises BadRequest."""
        document = read_object(request, "messages")
        conversation = Conversation.from_document(document)
        question = Question.about("", document, self._session_of(request))
        size = len(request.body)
        text = await self._template.text_of(conversation, size, client)
        if not conversation.add_generation_prompt and text[-1:].isspace():
            space = await self._template.closing_space(conversation, size, client)
            text = await self._without_unseen(space, text, question.session)
        return await self.retrieve(replace(question, text=text), client)

    async def _without_unseen(self, space: str, text: str, session: str | None) -> str:
        """Return ``text`` without the part of the template's closing ``space`` that no engine consumed."""
        whole = text.encode()
        await self._cold.load_text(whole, session)
        self._streams.catch_up(whole, session)
        position = self._trajectories.find_to_read(whole, session).position
        return whole[:position].decode() if space.endswith(whole[position:].decode()) else text

    def session(self, session: str) -> tuple[dict[str, Any], list[Branch]]:
        """Return facts about ``session``, and its leaves. Raises SessionNotFound."""
        self._streams.catch_up_session(session)
        responses = self._trajectories.responses_of(session)
        if not responses:
            raise nothing_kept(self._trajectories, session)
        about = {"session_id": session, "complete": not self._trajectories.has_lost(session)}
        kept = self._trajectories
        return about, branches(responses, kept.candidates, kept.longer_of(session))

    async def _read(self, request: HTTPRequest) -> tuple[Request, str | None]:
        """Return ``request`` in the router's own type, with its body parsed, and its client. Raises BadRequest."""
        body = BytesIO()  # getvalue() makes no copy
        async for piece in request.stream():
            body.write(piece)
        scope = request.scope
        asked = Request(request.method, scope["raw_path"], scope["headers"], body.getvalue())
        client = client_of(asked, _address(request))
        if asked.is_long_work:
            await self._long_work.run(asked.reading(), client)
        asked.json()  # parse it once, before session sources search its bytes for a key
        return asked, client

    async def _one(self, request: HTTPRequest, answer: Answer, client: str | None) -> HTTPResponse:
        format = format_for(request.headers.get("accept", ""))
        return await self._written(format, [answer], lambda: format.one(answer), client)

    async def _written(
        self,
        format: Format,
        answers: Sequence[Answer],
        encode: Callable[[], Iterator[Piece]],
        client: str | None,
    ) -> HTTPResponse:
        return await answer_with(
            [rows for answer in answers for rows in answer.rows],
            encode,
            format.media_type,
            lambda work: self._threads.run(work, client),
            lambda: self._long_work.pause(client),
            is_long=sum(len(answer.record.tokens) for answer in answers) > _MANY_TOKENS,
        )

    async def _whole(
        self, format: Format, write: Callable[[], bytes], client: str | None, *, is_long: bool
    ) -> HTTPResponse:
        body = await self._threads.run(write, client) if is_long else write()
        return HTTPResponse(body, media_type=format.media_type)

    def _session_of(self, request: Request) -> str | None:
        return session_of(request, self._session_sources)

    def routes(self, stats: Callable[[], dict[str, Any]]) -> list[Route]:
        """Return the plugin's routes."""

        async def retrieve_from_text(request: HTTPRequest) -> HTTPResponse:
            asked, client = await self._read(request)
            question = Question.from_json(asked, self._session_of(asked))
            return await self._one(request, await self.retrieve(question, client), client)

        async def retrieve_from_messages_template(request: HTTPRequest) -> HTTPResponse:
            asked, client = await self._read(request)
            return await self._one(request, await self.retrieve_messages(asked, client), client)

        async def trajectories(request: HTTPRequest) -> HTTPResponse:
            rows = rows_asked(request.query_params)
            session = request.path_params["session"]
            self._streams.catch_up_session(session)
            await self._cold.load_session(session)
            about, leaves = self.session(session)
            format = format_for(request.headers.get("accept", ""))

            def made() -> list[Answer]:
                return [answer_of(leaf, self._spell) for leaf in leaves]

            client, is_long = _address(request), sum(leaf.tokens for leaf in leaves) > _MANY_TOKENS
            if not rows.names:
                return await self._whole(
                    format, lambda: joined(format.many(about, made())), client, is_long=is_long
                )
            answers = await self._threads.run(made, client)
            answers = [self._with_rows(*one, rows) for one in zip(answers, leaves, strict=True)]
            return await self._written(format, answers, lambda: format.many(about, answers), client)

        async def no_session(_: HTTPRequest) -> HTTPResponse:
            raise SessionNotFound("wanted the name of a session: GET /trajectories/SESSION")

        async def cache_stats(_: HTTPRequest) -> HTTPResponse:
            return HTTPResponse(orjson.dumps(stats()), media_type=JSON.media_type)

        return [
            Route("/retrieve_from_text", retrieve_from_text, methods=["POST"]),
            Route("/retrieve_from_messages_template", retrieve_from_messages_template, methods=["POST"]),
            Route("/trajectories", no_session, methods=["GET"]),
            Route("/trajectories/{session:path}", trajectories, methods=["GET"]),
            Route("/cache_stats", cache_stats, methods=["GET"]),
        ]


def _address(request: HTTPRequest) -> str | None:
    client = request.scope.get("client")
    return client[0] if client else None


def _finish_reason(match: Match, text: bytes) -> Any:
    """Return the finish reason of the response at the end of ``text``; None unless a whole response is there."""
    if match.context is None or match.position < len(text):
        return None
    last, length = match.context
    return orjson.loads(last.finish_reason) if isinstance(last, Response) and length == len(last) else None
