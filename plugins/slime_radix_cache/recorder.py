"""A stream on its way into the cache."""

from __future__ import annotations

from typing import Any

from slime_radix_cache.joining import sampled_ids
from slime_radix_cache.open_streams import OpenStreams
from slime_radix_cache.streams import GenerationStream
from slime_radix_cache.tally import Tally
from slime_radix_cache.turns import Growing, Turn, Turns

__all__ = ["StreamRecorder"]


class StreamRecorder:
    """A tap that records the sequences of one streamed ``/generate``; ``turns[i]`` is the prompt of sequence ``i``.

    It comes from ``worker``.
    """

    def __init__(
        self, turns: list[Turn], recorder: Turns, tally: Tally, streams: OpenStreams, worker: str
    ) -> None:
        self._turns = turns
        self._tally = tally
        self._streams = streams
        self._worker = worker
        self._responses = [Growing(recorder, turn) for turn in turns]
        self._stream = GenerationStream(self._record, self.failed)
        self.session = turns[0].session
        streams.opened(self)

    def feed(self, chunk: bytes) -> None:
        """The next bytes of the reply."""
        self._stream.feed(chunk)

    def close(self, complete: bool) -> None:
        """The reply has ended, or was given up."""
        self._streams.closed(self)
        self._stream.record_all()
        self._stream.forget()

    def catch_up(self, prompt: bytes) -> None:
        """Record what was streamed until now, if a client that asks with ``prompt`` may have read it."""
        for turn in self._turns:
            if len(prompt) > len(turn.prompt) and prompt.startswith(turn.prompt):
                self._stream.record_all()
                return

    def record_all(self) -> None:
        """Record what was streamed until now."""
        self._stream.record_all()

    def so_far(self) -> dict[str, Any] | None:
        """What the client was told of the only sequence, as an unstreamed answer has it; None: nothing yet."""
        return self._stream.so_far()

    def keep(self, answer: dict[str, Any]) -> None:
        """Record an aborted answer that the client does not see: the beginning of what comes."""
        try:
            if sampled_ids(answer):
                self._record(0, answer)
        except Exception as error:
            self.failed(error)

    def begin_anew(self) -> None:
        """What was kept is a fact of its own: what comes was sampled anew."""
        self._responses[0].begin_anew()

    def _record(self, index: int, answer: Any) -> None:
        self._responses[index].record(answer)

    def failed(self, error: Exception) -> None:
        """Something of the stream was not understood."""
        self._tally.unrecorded("stream_not_understood", error, self._worker)
