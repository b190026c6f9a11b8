"""Recording of a streamed answer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from slime_radix_cache.capture.growing_response import GrowingResponse
from slime_radix_cache.capture.open_streams import OpenStreams
from slime_radix_cache.capture.streams import GenerationStream
from slime_radix_cache.capture.turns import PromptTurn, Turns
from slime_radix_cache.index.segments import Response
from slime_radix_cache.tally import Tally
from slime_sglang import CONTRADICTION, AnswerSoFar, sampled_ids
from slime_sglang.event_readers import Growth, Reading

__all__ = ["StreamRecorder"]


class StreamRecorder:
    """A tap that records the sequences of one streamed ``/generate`` answer of ``worker``.

    ``turns[i]``: the prompt of sequence ``i``. ``doubt`` returns why the answer so far is not exact, or None.
    """

    def __init__(
        self, turns: list[PromptTurn], recorder: Turns, tally: Tally, streams: OpenStreams, worker: str
    ) -> None:
        self._turns = turns
        self._recorder = recorder
        self._tally = tally
        self._streams = streams
        self._worker = worker
        self._responses = [GrowingResponse(recorder, turn) for turn in turns]
        self._stream = GenerationStream(
            self._record, self.failed, keeps_arrays=recorder.rows.store is not None
        )
        self._failed = False
        self.session = turns[0].session
        self.doubt: Callable[[], str | None] = _no_doubt
        streams.opened(self)

    @property
    def feed(self) -> Callable[[bytes], None]:
        """The function that takes the next bytes of the reply. It is the stream's own method, which saves a call."""
        return self._stream.feed

    @property
    def growth(self) -> Callable[[bytes], Growth | None]:
        """See EventReader."""
        return self._stream.growth

    @property
    def reading(self) -> Callable[[int, bytes], Reading]:
        """See EventReader."""
        return self._stream.reading

    def close(self, complete: bool) -> None:
        """Record the rest, and end the recording. ``complete``: the body of the reply came to its end.

        In a complete stream without errors, a sequence without any event counts as lost.
        """
        self._streams.closed(self)
        self._stream.record_all()
        if complete and not self._stream.failed and not self._failed:
            for index, turn in enumerate(self._turns):
                if not self._stream.has_begun(index):
                    self._tally.unrecorded("sequence_missing")
                    self._recorder.lose([turn])
        self._stream.forget()
        self.doubt = _no_doubt

    def catch_up(self, prompt: bytes) -> None:
        """See RunningStream."""
        for turn in self._turns:
            if len(prompt) > len(turn.prompt) and prompt.startswith(turn.prompt):
                self._stream.record_all()
                return

    def record_all(self) -> None:
        """See RunningStream."""
        self._stream.record_all()

    def is_sampling(self, response: Response) -> bool:
        """See RunningStream."""
        return any(each.is_now(response) for each in self._responses)

    def so_far(self) -> AnswerSoFar:
        """Return a copy of the answer so far. Only for a stream of one sequence."""
        return self._stream.so_far()

    def keep(self, answer: dict[str, Any]) -> None:
        """Record an aborted ``answer`` that the client does not see; the next attempt may continue it."""
        try:
            if sampled_ids(answer):
                self._record(0, answer)
        except Exception as error:
            self.failed(error)

    def begin_anew(self) -> None:
        """Let the recorded response stay unchanged: the next attempt samples another response."""
        self._responses[0].begin_anew()
        self.doubt = _no_doubt

    def _record(self, index: int, answer: Any, took_back: bool = False) -> None:
        if not (type(index) is int and 0 <= index < len(self._responses)):
            raise ValueError(f"wanted one of {len(self._responses)} sequences, got number {index!r}")
        # Tokens may be missing: an event that was not understood may have had some.
        doubt = CONTRADICTION if self._failed or took_back else self.doubt()
        self._responses[index].record(answer, doubt, is_whole=False)

    def failed(self, error: Exception) -> None:
        """Count an event that was not understood.

        At the first such event, mark all sequences as lost. Sequences that are recorded already are recorded once more,
        now as not exact.
        """
        had_failed, self._failed = self._failed, True
        self._tally.unrecorded("stream_not_understood", error, self._worker)
        if not had_failed:
            self._recorder.lose([turn for turn in self._turns if turn.lost is None])
            self._stream.record_again()


def _no_doubt() -> None:
    return None
