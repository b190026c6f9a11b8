"""One prompt on its way to an engine, and its answer on its way into the cache."""

from __future__ import annotations

import logging
from array import array
from dataclasses import dataclass
from typing import Any

from slime_radix_cache.encoding import Encoder
from slime_radix_cache.joining import sampled_ids
from slime_radix_cache.open_streams import OpenStreams
from slime_radix_cache.replies import Unusable, read_output
from slime_radix_cache.segments import Context, Response, context_ids, links
from slime_radix_cache.spelling import Spelling
from slime_radix_cache.tally import Tally
from slime_radix_cache.trajectories import Sampled, Trajectories

logger = logging.getLogger(__name__)

__all__ = ["Growing", "Turn", "Turns"]


@dataclass(slots=True)
class Turn:
    """A prompt, in UTF-8: ``context`` is known and pinned, and has the first ``position`` bytes.

    ``rest`` are the packed ids behind it, ``tokens`` counts both. ``rid``: what the engine calls it, if known.
    """

    prompt: bytes
    context: Context
    session: str | None
    position: int
    rest: bytes = b""
    tokens: int = 0
    rid: str | None = None

    @property
    def ids(self) -> bytes:
        """What the engine gets, packed."""
        return context_ids(self.context) + self.rest


class Turns:
    """Begins turns and records how they ended."""

    def __init__(
        self,
        trajectories: Trajectories,
        encoder: Encoder,
        spelling: Spelling,
        tally: Tally,
        streams: OpenStreams,
        *,
        verbose: bool,
    ) -> None:
        self._trajectories = trajectories
        self._encoder = encoder
        self._spelling = spelling
        self._tally = tally
        self._streams = streams
        self._verbose = verbose

    def begin(self, prompt: str | bytes, session: str | None) -> Turn:
        """A turn for a text, or for packed ids; its context is pinned until :meth:`end`."""
        given = b"" if isinstance(prompt, str) else prompt
        text = (
            prompt.encode() if isinstance(prompt, str) else self._spelling.text_of(array("i", given)).encode()
        )
        self._streams.catch_up(text, session)
        if given:
            context = self._trajectories.find_given(given, session)
            turn = Turn(text, context, session, len(text), given[len(context_ids(context)) :])
        else:
            match = self._trajectories.find_to_continue(text, session)
            turn = Turn(text, match.context, session, match.position)
        self._trajectories.pin(turn.context)
        return turn

    async def encode(self, turn: Turn) -> None:
        """Tokenise what is not known."""
        known = list(links(turn.context))
        reused = sum(length for _, length in known)
        if turn.position < len(turn.prompt):
            text = turn.prompt[turn.position :].decode()
            turn.rest = await self._encoder.encode(text, begins=turn.context is None)
        turn.tokens = reused + len(turn.rest) // 4
        number = 1 + sum(isinstance(segment, Response) for segment, _ in known)
        self._tally.turn(number, reused, turn.tokens - reused)

    def end(self, turn: Turn) -> None:
        """The turn is over, however it went; to be called once."""
        self._trajectories.unpin(turn.context)

    def record(self, turn: Turn, answer: Any) -> Response | None:
        """Keep ``answer``, one object of the engine's; None, and counted, when there is nothing to be kept."""
        try:
            output = read_output(answer)
            if output.prompt_tokens not in (None, turn.tokens):
                raise Unusable("engine_consumed_other_tokens")
            if turn.rid is not None and output.rid not in (None, turn.rid):
                raise Unusable("answer_to_another_request")
        except Unusable as reason:
            self._tally.unrecorded(reason.kind)
            return None
        ids = array("i", output.ids)
        spelt = self._spelling.tail(ids, output.text)
        for doubt in (*output.doubts, *(() if spelt is not None else ("text_is_not_of_these_tokens",))):
            self._tally.unrecorded(doubt)
        visible, tail = spelt if spelt is not None else (len(ids), "")
        sampled = Sampled(
            output.ids, output.logprobs, output.text, visible, tail, output.versions, output.finish_reason
        )
        if self._verbose:
            logger.info(
                "session %s: %d tokens after %d, %s",
                turn.session,
                len(ids),
                turn.tokens,
                output.finish_reason,
            )
        return self._trajectories.record(turn.context, turn.rest, turn.prompt, sampled, turn.session)

    def take_back(self, part: Response) -> None:
        """Forget ``part``, the beginning of a response that is recorded whole, unless somebody went on from it."""
        self._trajectories.withdraw(part)


class Growing:
    """A response that is recorded in part, and again when more is known of it.

    The part is taken back then, unless somebody went on from it.
    """

    def __init__(self, recorder: Turns, turn: Turn) -> None:
        self._recorder = recorder
        self._turn = turn
        self._part: Response | None = None

    def record(self, answer: Any) -> None:
        """Keep ``answer``, unless as much is known."""
        part = self._part
        if part is not None and len(part) > len(sampled_ids(answer)):
            return
        response = self._recorder.record(self._turn, answer)
        if response is None:
            return
        if part is not None and part is not response:
            self._recorder.take_back(part)
        self._part = response

    def begin_anew(self) -> None:
        """What is recorded stands: what comes now is another response."""
        self._part = None
