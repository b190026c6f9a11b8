"""Parsing of one answer: from the engine's text to the deltas for OpenAI's clients."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from slime_openai.parsing.deltas import Delta, Writer, new_call_id
from slime_openai.parsing.reasoning import ReasoningFormat
from slime_openai.parsing.source import Reading, Source
from slime_openai.parsing.stops import StopStrings
from slime_openai.parsing.tool_calls import FORCED_CALLS, CallFormat, json_array
from slime_openai.requests.tools import Tools

__all__ = ["Parser"]


class Parser:
    """Reads one answer. The deltas add up to the same message, however the text is cut into pieces.

    ``reasoning``: the format of thoughts; ``starts_inside``: the prompt ended within thoughts. ``calls``: the format of
    calls to ``tools``. Without a format, thoughts or calls are content. Without ``parallel``, the text of every call
    but the first is content.
    ``stop``: strings that end the answer; no part of them is shown. Without ``stream_reasoning``, thoughts come in one
    piece. ``new_id``: makes the ids of calls; by default, those of the format ``calls``.
    """

    def __init__(
        self,
        *,
        reasoning: ReasoningFormat | None = None,
        starts_inside: bool = False,
        calls: CallFormat | None = None,
        tools: Tools = Tools(),  # noqa: B008 -- it is frozen
        parallel: bool = True,
        stop: Sequence[str] = (),
        stream_reasoning: bool = True,
        new_id: Callable[[], str] | None = None,
    ) -> None:
        schemas = {}
        if calls is not None:
            functions = [tool["function"] for tool in tools.shown]
            schemas = {each["name"]: each.get("parameters") or {} for each in functions}
        self._writer = Writer(
            {name: schemas[name] for name in schemas.keys() & tools.callable},
            new_id or (calls.new_id if calls else new_call_id),
            parallel=parallel,
            stream_reasoning=stream_reasoning,
        )
        self._stops = StopStrings(stop)
        self._source = Source()
        self._reading = self._read(reasoning, starts_inside, calls)

    @property
    def called(self) -> bool:
        """True when the answer has a tool call."""
        return self._writer.calls > 0

    def feed(self, text: str) -> list[Delta]:
        """Return the deltas that ``text``, the next piece of the answer, makes certain."""
        text = self._stops.feed(text)
        if text:
            self._read_on(text)
        return self._writer.drain()

    def finish(self, matched: str | None = None) -> list[Delta]:
        """End the answer, and return the last deltas. ``matched``: the stop string that the engine ended at."""
        text = self._stops.finish(matched)
        self._source.ended = True
        self._read_on(text)
        return self._writer.finish()

    def _read_on(self, text: str) -> None:
        self._source.push(text)
        next(self._reading, None)

    def _read(
        self, reasoning: ReasoningFormat | None, starts_inside: bool, calls: CallFormat | None
    ) -> Reading[None]:
        source, writer = self._source, self._writer
        if reasoning is not None:
            if calls is FORCED_CALLS and (yield from source.attempt(json_array.beginning(source))):
                # The grammar allowed no thoughts, even if the prompt opened them.
                source.back()
                starts_inside = False
            yield from reasoning.read(source, writer, inside=starts_inside, calls=bool(writer.tools))
        if calls is not None and writer.tools:
            yield from calls.read(source, writer)
        else:
            yield from source.pass_on(writer.content)
