"""One sequence of a chat answer: its text so far, and the members that a client gets about it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from slime_openai.parsing.deltas import Delta, finish_reason, message
from slime_openai.parsing.parser import Parser
from slime_openai.requests.chat_request import ChatRequest
from slime_openai.requests.messages import Message
from slime_openai.responses.logprobs import Logprobs
from slime_openai.responses.openai_schema import about_output, delta, message_of, reason_of, root_version
from slime_openai.responses.outputs import Output

__all__ = ["Choice"]


class Choice:
    """Reads one sequence. ``record`` is called once with the result, however the sequence ends.

    ``inexact_reason``: returns the reason why an ended sequence is not exact, or None. ``history``: members about the
    prompt's origin.

    Token ids and logprobs are sent as soon as the engine gives them. The text of these tokens may be held back until a
    character is complete, and while it may begin a stop string or a tag.
    """

    def __init__(
        self,
        index: int,
        request: ChatRequest,
        parser: Parser,
        logprobs: Logprobs,
        record: Callable[[Output, Message], None],
        inexact_reason: Callable[[], str | None],
        history: dict[str, Any],
    ) -> None:
        self.output = Output()
        self.ended = False
        self._history = history
        self._index = index
        self._request = request
        self._parser = parser
        self._logprobs = logprobs
        self._record = record
        self._inexact_reason = inexact_reason
        self._deltas: list[Delta] = []
        #: How many of the first deltas are merged so far, and the message that they make.
        self._merged = 0, Message("assistant", "")
        self._begun = False
        self._ids_given = self._logprobs_given = 0

    @property
    def wants_text_only(self) -> bool:
        """See StreamedChoice."""
        request = self._request
        return self.output.cumulative and not request.logprobs and not request.return_token_ids

    def about(self) -> dict[str, Any]:
        """See StreamedChoice."""
        return self._history | root_version(self.output, self._request)

    def take(self, answer: dict[str, Any]) -> list[Delta]:
        """Return the deltas that ``answer`` adds. ``answer``: one event of the engine's stream, or its whole answer."""
        text = self.output.take(answer)
        deltas = self._parser.feed(text) if text else []
        reason = self.output.reason
        if reason is not None:
            matched = reason.get("matched")
            deltas += self._parser.finish(matched if isinstance(matched, str) else None)
        self._deltas += deltas
        if reason is not None:
            self.end()
        return deltas

    def end(self) -> None:
        """End the sequence. A second call does nothing."""
        if not self.ended:
            self.ended = True
            self._record(self.output, self.message())

    def message(self) -> Message:
        """Return the message so far."""
        if self._merged[0] < len(self._deltas):
            self._merged = len(self._deltas), message(self._deltas)
        return self._merged[1]

    def whole(self) -> dict[str, Any]:
        """Return the choice of an answer that is not streamed."""
        message = message_of(self.message(), self._request)
        choice = {"index": self._index, "message": message, "logprobs": self._new_logprobs()}
        return choice | self._new_ids() | self._ending()

    def more(self, text: str, event: bytes | memoryview) -> list[dict[str, Any]]:
        """See StreamedChoice."""
        self.output.take_text(text, event)
        deltas = self._parser.feed(text) if text else []
        self._deltas += deltas
        return [self._chunk(delta(each)) | {"finish_reason": None} for each in deltas]

    def chunks(self, answer: dict[str, Any]) -> list[dict[str, Any]]:
        """See StreamedChoice."""
        pieces = [delta(each) for each in self.take(answer)]
        if not self._begun:
            self._begun = True
            pieces.insert(0, {"role": "assistant", "content": ""})
        logprobs, ids = self._new_logprobs(), self._new_ids()
        if (logprobs is not None or ids) and not pieces and not self.ended:
            pieces.append({"content": ""})
        chunks: list[dict[str, Any]] = [self._chunk(each) | {"finish_reason": None} for each in pieces]
        if self.ended:
            chunks.append(self._chunk({}) | self._ending())
        if chunks:
            chunks[-1] |= {"logprobs": logprobs, **ids}
        return chunks

    def _chunk(self, piece: dict[str, Any]) -> dict[str, Any]:
        return {"index": self._index, "delta": piece, "logprobs": None}

    def _new_ids(self) -> dict[str, Any]:
        """Return new ``token_ids``, if the client wants them. If none are new, only the last chunk has the key."""
        if not self._request.return_token_ids:
            return {}
        start, ids = self._ids_given, self.output.ids
        if start == len(ids) and not self.ended:
            return {}
        self._ids_given = len(ids)
        return {"token_ids": ids[start:]}

    def _new_logprobs(self) -> dict[str, Any] | None:
        """Return the new logprobs; None if the client wants none, or if earlier calls returned all that there are."""
        request, output = self._request, self.output
        start = self._logprobs_given
        if not request.logprobs and not request.return_token_ids:
            return None
        if start == len(output.logprobs) and start:
            return None
        self._logprobs_given = len(output.logprobs)
        chosen, top = output.logprobs[start:], output.top_logprobs[start:]
        entries = self._logprobs.entries(chosen, top, request.top_logprobs, as_ids=request.tokens_as_ids)
        return {"content": entries, "refusal": None}

    def _ending(self) -> dict[str, Any]:
        """Return the finish reason, and the members that a trainer asked for."""
        request = self._request
        ending = reason_of(self.output, request)
        ending["finish_reason"] = finish_reason(ending["finish_reason"], called=self._parser.called)
        return ending | about_output(self.output, request, self._inexact_reason)
