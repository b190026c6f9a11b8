"""The sampled turns of a session, for plugins that make samples or records of them."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence, Set
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any

import orjson

from slime_radix_cache.capture.open_streams import OpenStreams
from slime_radix_cache.capture.row_recorder import RowRecorder
from slime_radix_cache.demotion.cold_trajectories import ColdTrajectories
from slime_radix_cache.index.segments import Response, Segment, links
from slime_radix_cache.index.text_index import prompt_end, text_of
from slime_radix_cache.index.trajectories import Trajectories
from slime_radix_cache.retrieval.answer import Record, reason_of_record, record_of
from slime_radix_cache.retrieval.branches import continued_in
from slime_radix_cache.retrieval.empty_sessions import nothing_kept

if TYPE_CHECKING:
    from slime_radix_cache.contracts import FoundRows

__all__ = ["SessionTurns", "Turn", "TurnContext"]


@dataclass(frozen=True, slots=True)
class Turn:
    """One response of a session. ``before``: the number of the kept turn that this turn continues, or None.

    Numbers are in the order in which responses came. ``prompt``: equal for responses to the same prompt.
    ``finish_reason``: from the engine; None if the end was not seen, or if the engine's value is not a JSON object.
    ``is_running``: the response is streamed now, and its end has not come yet.
    ``wholes``: some responses were recorded first in part, then with more tokens. This mapping leads from each partial
    record in the turns' contexts to the longest record of the response. All turns share it.
    """

    number: int
    before: int | None
    prompt: Hashable
    tokens: int
    finish_reason: dict[str, Any] | None
    is_running: bool
    response: Response
    wholes: Mapping[Segment, Response]


@dataclass(frozen=True, slots=True)
class TurnContext:
    """All tokens that an engine consumed and sampled up to the end of one turn.

    ``spans``: ``(number, start, end, is_whole)`` of each turn of the session in the context, in tokens. A turn is not
    whole if the client kept only a part of the response. ``sampled``: ``(key, start, end)`` of each response, also of
    other sessions. Equal keys mean the same response. ``inexact_reason``: None if the record is exact.
    """

    record: Record
    spans: tuple[tuple[int, int, int, bool], ...]
    sampled: tuple[tuple[Hashable, int, int], ...]
    inexact_reason: str | None


class SessionTurns:
    """The turns of each session; the component ``"session_turns"``. Reading changes nothing."""

    def __init__(
        self,
        trajectories: Trajectories,
        spell: Callable[[Sequence[int]], str],
        rows: RowRecorder,
        cold: ColdTrajectories,
        streams: OpenStreams,
    ) -> None:
        self._trajectories = trajectories
        self._streams = streams
        self._cold = cold
        self._rows = rows
        self.spell = spell

    async def load(self, session: str) -> None:
        """See :class:`slime_radix_cache.contracts.SessionTurns`."""
        await self._cold.load_session(session)

    def turns(self, session: str) -> list[Turn]:
        """Return the turns of ``session``, oldest first. O(their segments)."""
        responses = self._trajectories.responses_of(session)
        continued = continued_in(responses)
        wholes = self._wholes(responses, continued)
        numbers: dict[Response, int] = {}
        for response in dict.fromkeys(wholes.get(one, one) for one in responses):
            numbers[response] = len(numbers)
        return [
            Turn(
                number,
                self._before(response, numbers, wholes),
                (response.parent, response.kept),
                len(response),
                (reason := _reason_of(response)),
                reason is None and self._streams.are_sampling(response),
                response,
                wholes,
            )
            for response, number in numbers.items()
        ]

    def _wholes(self, responses: Sequence[Response], continued: Set[Segment]) -> dict[Segment, Response]:
        """Return the value of :attr:`Turn.wholes`."""
        longer = self._trajectories.longer
        own = (one for one in responses if not one.continuation_lost)
        recorded = (one for one in chain(own, continued) if isinstance(one, Response))
        return {part: longer.longest(part) for part in recorded if part in longer}

    def expect(self, session: str) -> list[Turn]:
        """See :class:`slime_radix_cache.contracts.SessionTurns`."""
        turns = self.turns(session)
        if not turns:
            raise nothing_kept(self._trajectories, session)
        return turns

    def _before(
        self, response: Response, numbers: dict[Response, int], wholes: dict[Segment, Response]
    ) -> int | None:
        context = (response.parent, response.kept) if response.parent is not None else None
        for segment, kept in links(context):
            if kept and isinstance(segment, Response):
                number = numbers.get(wholes.get(segment, segment))
                if number is not None:
                    return number
        return None

    def context(self, turn: Turn, turns: Sequence[Turn]) -> TurnContext:
        """Return the context of ``turn``, one of ``turns``. O(its tokens); safe in any thread."""
        turn_of = {one.response: one for one in turns}
        context = turn.response, len(turn.response)
        record = record_of(context, session=turn.response.session)
        spans: list[tuple[int, int, int, bool]] = []
        sampled: list[tuple[Hashable, int, int]] = []
        end = len(record.tokens)
        for segment, length in links(context):
            if isinstance(segment, Response) and length:
                whole = turn.wholes.get(segment, segment)
                own = turn_of.get(whole)
                sampled.append((whole, end - length, end))
                if own is not None:
                    spans.append((own.number, end - length, end, length == len(whole)))
            end -= length
        cut_short = turn.response.continuation_lost
        reason = "evicted" if cut_short else reason_of_record(context, has_logprobs=record.has_logprobs)
        return TurnContext(record, tuple(reversed(spans)), tuple(reversed(sampled)), reason)

    def rows(self, name: str, turn: Turn, tokens: int) -> FoundRows | str | None:
        """See :class:`slime_radix_cache.contracts.SessionTurns`.

        ``name``: the name of a field in ``meta_info``, such as ``routed_experts``.
        """
        if self._rows.store is None:
            return None
        return self._rows.find(name, (turn.response, len(turn.response)), tokens)

    def text(self, turn: Turn) -> str:
        """Return the response text of ``turn``. O(its length).

        Only the event loop's thread may call this, since that thread changes the index.
        """
        return text_of(turn.response.node, prompt_end(turn.response)).decode()

    def has_lost(self, session: str) -> bool:
        """See :class:`slime_radix_cache.contracts.SessionTurns`."""
        return self._trajectories.has_lost(session)

    def forget(self, session: str) -> None:
        """Evict the responses of ``session``. See :meth:`Trajectories.forget`."""
        self._cold.forget(session)


def _reason_of(response: Response) -> dict[str, Any] | None:
    reason = orjson.loads(response.finish_reason)
    return reason if isinstance(reason, dict) else None
