"""Turns: conversion of a prompt to tokens, and recording of the answer."""

from __future__ import annotations

import logging
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from typing import Any

from slime_radix_cache.capture.given_prompts import GivenPrompts
from slime_radix_cache.capture.open_streams import OpenStreams
from slime_radix_cache.capture.replies import NOTHING_SAMPLED, Unusable, read_output
from slime_radix_cache.capture.row_recorder import RowRecorder
from slime_radix_cache.demotion.cold_trajectories import ColdTrajectories
from slime_radix_cache.index.segment_store import Sampled
from slime_radix_cache.index.segments import Context, Giver, Response, context_ids, read_context
from slime_radix_cache.index.sessions import Running
from slime_radix_cache.index.text_index import text_of
from slime_radix_cache.index.text_node import Node
from slime_radix_cache.index.trajectories import Trajectories
from slime_radix_cache.tally import Tally
from slime_radix_cache.tokens.encoding import Encoder
from slime_radix_cache.tokens.spelling import Spelling
from slime_sglang import CONTRADICTION, contradiction

logger = logging.getLogger(__name__)

__all__ = ["PromptTurn", "Turns"]

#: The replacement character, which a decoder writes for bytes that are not a whole character.
_BROKEN = "\ufffd".encode()


@dataclass(slots=True)
class PromptTurn:
    """A ``prompt`` in UTF-8, and the recording of its answer.

    ``context``: a recorded context, pinned in memory, or None. ``node``: the node at which the context's text ends, if
    known. ``position``: the number of bytes that the context covers in a text prompt; all bytes in a prompt of ids.
    ``rest``: packed ids after the context. ``ids``: packed ids of context and rest. ``giver``: set if the prompt was
    given as ids, by the client or by a plugin. ``adapter``: the LoRA adapter of the answer. ``doubt``: why the record
    of the answer will not be exact, or None. ``rid``: the engine's id of the request, if known. ``response``: the
    response that was recorded last. ``row_start``: the first token whose row the engine is to send. ``held``: records
    of the answer, which stay in memory until the turn ends. ``lost``: the text that was last marked as lost.
    """

    prompt: bytes
    context: Context
    session: str | None
    position: int
    rest: bytes = b""
    node: Node | None = None
    ids: bytes = b""
    giver: Giver | None = None
    adapter: str | None = None
    doubt: str | None = None
    rid: str | None = None
    running: Running | None = None
    response: Response | None = None
    client: str | None = None
    row_start: int = 0
    held: list[Response] = field(default_factory=list)
    lost: bytes | None = None

    def sequences(self, number: int) -> list[PromptTurn]:
        """Return this turn, and copies of it for ``number - 1`` more sequences of the same prompt."""
        return [self, *[replace(self) for _ in range(number - 1)]]

    @property
    def tokens(self) -> int:
        """The number of ids that the engine gets."""
        return len(self.ids) // 4


class Turns:
    """Begins turns, and records their answers. ``rows``: records the rows of tokens."""

    def __init__(
        self,
        trajectories: Trajectories,
        encoder: Encoder,
        spelling: Spelling,
        given_prompts: GivenPrompts,
        tally: Tally,
        streams: OpenStreams,
        cold: ColdTrajectories,
        *,
        verbose: bool,
    ) -> None:
        self._trajectories = trajectories
        self._cold = cold
        self._encoder = encoder
        self._spelling = spelling
        self._given_prompts = given_prompts
        self._tally = tally
        self._streams = streams
        self._verbose = verbose
        self.rows = RowRecorder(trajectories)

    async def begin(
        self,
        prompt: str | bytes,
        session: str | None,
        *,
        adapter: str | None = None,
        doubt: str | None = None,
        client: str | None = None,
    ) -> PromptTurn:
        """Return a turn for a text, or for packed ids. Its context is pinned until :meth:`end`.

        ``client``: see :mod:`slime_fairness.turns`.
        """
        if isinstance(prompt, bytes):
            turn = await self._given(prompt, session, client)
        else:
            turn = await self._asked(prompt, session, client)
        turn.client = client
        turn.adapter, turn.doubt = adapter, doubt
        self._trajectories.pin(turn.context)
        if session is not None:
            turn.running = Running(session, _whole_characters(turn.prompt), turn.context, turn.ids or None)
            self._trajectories.begin(turn.running)
        return turn

    async def _given(self, ids: bytes, session: str | None, client: str | None) -> PromptTurn:
        await self._cold.load_ids(ids, session, asks=True)
        known, number = self._trajectories.decoded(ids)
        text = text_of(known.end) if known is not None else b""
        text += (await self._encoder.text_of(self._spelling, ids[4 * number :], client)).encode()
        await self._cold.load_given(ids, text, session)
        self._streams.catch_up(text, session)
        context = self._trajectories.find_given(ids, session, text)
        is_known = known is not None and context == (known, len(known))
        rest = ids[4 * number if is_known else len(context_ids(context)) :]
        node = known.end if known is not None and is_known else None
        giver = Giver((session,) if session is not None else ())
        return PromptTurn(text, context, session, len(text), rest, node, ids, giver)

    async def _asked(self, prompt: str, session: str | None, client: str | None) -> PromptTurn:
        self._encoder.check_text(prompt)
        text = await self._encoder.in_utf8(prompt, client)
        await self._cold.load_text(text, session, asks=True)
        self._streams.catch_up(text, session)
        match = self._trajectories.find_to_continue(text, session)
        while match.unknown:
            await self._given_prompts.find_out_all(match.unknown, self._trajectories, client)
            await self._cold.load_text(text, session, asks=True)
            match = self._trajectories.find_to_continue(text, session)
        return PromptTurn(text, match.context, session, match.position, node=match.node)

    async def encode(self, turn: PromptTurn, prompt: str | bytes, *, is_tokenised: bool = False) -> None:
        """Tokenise the part of a text ``prompt`` after the context of ``turn``, and count the tokens of the turn.

        ``is_tokenised``: packed ids in ``prompt`` come from a plugin, not from the client. Raises PromptTooLong.
        """
        known, responses = read_context(turn.context)
        if turn.position < len(turn.prompt):
            text = (
                prompt
                if isinstance(prompt, str) and not turn.position
                else turn.prompt[turn.position :].decode()
            )
            turn.rest = await self._encoder.encode(text, begins=turn.context is None, client=turn.client)
        turn.ids = turn.ids or known + turn.rest
        self._encoder.check_length(turn.tokens)
        if turn.running is not None:
            turn.running.ids = turn.ids
        new = len(turn.rest) // 4
        given = new if isinstance(prompt, bytes) and not is_tokenised else 0
        self._tally.turn(1 + responses, len(known) // 4, new - given, given)

    def end(self, turn: PromptTurn) -> None:
        """Unpin the context of ``turn``, however the turn ended. Call this once."""
        for response in turn.held:
            self._trajectories.unpin((response, len(response)))
        turn.held.clear()
        self._trajectories.unpin(turn.context)
        if turn.running is not None:
            # A response is found by its prompt's text. No text leads to a prompt that ends in an incomplete character.
            is_found = turn.response is not None and turn.running.prompt == turn.prompt
            self._trajectories.end(turn.running, is_recorded=is_found)
        self._cold.check()

    def lose(self, turns: Sequence[PromptTurn], answers: Sequence[Any] = ()) -> None:
        """Mark the answers to ``turns`` as lost. ``answers``: the known ones; any surplus belongs to the last turn.

        A growing response that cannot be recorded is lost again with each longer text. The same text is marked once.
        """
        for turn, answer in zip_longest(turns, answers):
            turn = turn if turn is not None else replace(turns[-1], lost=None)
            text = answer.get("text") if isinstance(answer, dict) else None
            sampled = text.encode("utf-8", "replace") if isinstance(text, str) else b""
            turn.response = None
            if turn.lost != (lost := turn.prompt + sampled):
                turn.lost = lost
                self._trajectories.lose(turn.session, lost)

    def fail(
        self, turns: Sequence[PromptTurn], error: Exception, worker: str | None, answers: Sequence[Any] = ()
    ) -> None:
        """Count a reply as not understood, and mark the ``answers`` to its ``turns`` as lost. See :meth:`lose`."""
        self._tally.unrecorded("answer_not_understood", error, worker)
        for turn in turns:
            turn.lost = None  # this is another answer than the one that was lost before
        self.lose(turns, answers)

    def record(
        self,
        turn: PromptTurn,
        answer: Any,
        doubt: str | None = None,
        *,
        is_whole: bool = True,
        instead_of: Response | None = None,
    ) -> Response | None:
        """Record ``answer``, one object of the engine's JSON. If it cannot be recorded, count it and return None.

        ``doubt``: why the answer is not exact, from a check of its events or attempts, or None. ``is_whole``: no more
        tokens follow. ``instead_of``: the recorded beginning of this answer. It is removed if nothing continues it.
        """
        try:
            output = read_output(answer)
        except Unusable as error:
            self._tally.unrecorded(error.kind)
            turn.response = None
            if error.kind != NOTHING_SAMPLED:
                self.lose([turn], [answer])
            return None
        ids = array("i", output.ids)
        reason = output.reason if output.reason is not None or not is_whole else {}
        spelt = self._spelling.tail(ids, output.text, reason)
        figure = contradiction(answer, prompt_tokens=turn.tokens, rid=turn.rid, columns=output.columns)
        if figure is None and spelt is None:
            figure = "text"
        if figure is None and doubt == CONTRADICTION:
            figure = "attempt"
        if figure is not None:
            self._tally.contradicted(figure)
            doubt = CONTRADICTION
        visible, tail = spelt if spelt is not None else (len(ids), "")
        sampled = Sampled(
            output.ids,
            output.logprobs,
            output.text,
            visible,
            tail,
            output.versions,
            output.finish_reason,
            doubt or turn.doubt,
            turn.adapter,
            turn.giver is not None and self._spelling.is_decoding(ids, output.text + tail),
        )
        if self._verbose:
            logger.info(
                "session %s: %d tokens after a prompt of %d tokens, finish reason %s",
                turn.session,
                len(ids),
                turn.tokens,
                output.finish_reason,
            )
        if instead_of in turn.held:
            turn.held.remove(instead_of)
            self._trajectories.unpin((instead_of, len(instead_of)))
        turn.response = self._trajectories.record(
            turn.context,
            turn.rest,
            turn.prompt,
            sampled,
            turn.session,
            turn.giver,
            turn.response,
            instead_of,
            turn.node,
        )
        self._hold(turn, turn.response, instead_of)
        self._tally.sampled(len(ids) - (len(instead_of) if instead_of is not None else 0))
        self.rows.record(turn.response, answer.get("meta_info") or {}, turn.row_start)
        return turn.response

    def _hold(self, turn: PromptTurn, *responses: Response | None) -> None:
        """Keep ``responses`` in memory until ``turn`` ends: longer records may replace them. No-op without a store."""
        for response in responses if self._cold.is_on else ():
            if response is not None and response not in turn.held and response in response.node.ends:
                turn.held.append(response)
                self._trajectories.pin((response, len(response)))


def _whole_characters(prompt: bytes) -> bytes:
    """Return ``prompt`` without an incomplete character at its end: ids from a client may end inside a character."""
    if not prompt.endswith(_BROKEN):
        return prompt
    return prompt.decode().rstrip(_BROKEN.decode()).encode()
