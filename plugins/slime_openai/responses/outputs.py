"""The engine's output, one sampled sequence at a time, and the part of it that each event adds."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import orjson

from router_core.errors import HTTPError, WorkerBroke
from router_core.exchange import Exchange
from slime_sglang import AnswerSoFar
from slime_sglang.bodies import answer_in
from slime_sglang.documents import document_in

__all__ = ["EngineRefused", "Output", "Triple", "answers_of", "error_message", "understood"]

logger = logging.getLogger(__name__)

#: ``[logprob, token id, text or None]``
Triple = Sequence[Any]


class understood:
    """Raise WorkerBroke when the block, which reads an engine's answer, fails because the answer is malformed."""

    def __enter__(self) -> None: ...

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, AttributeError | LookupError | OverflowError | TypeError | ValueError):
            logger.warning("an engine's answer was not understood", exc_info=error)
            raise WorkerBroke("the engine's answer was not understood", answered=True) from error


class EngineRefused(HTTPError):
    """An error answer of the engine, with the engine's message."""

    type, code = "engine_error", "ENGINE_ERROR"

    def __init__(self, status: int, body: bytes) -> None:
        super().__init__(error_message(body) or f"The engine answered {status}.")
        self.status = status


class Output:
    """One sequence so far: its events, merged into the form of an answer that is not streamed.

    ``logprobs``: a triple for each token; ``top_logprobs``: a list of triples for each token.
    """

    def __init__(self) -> None:
        self._so_far = AnswerSoFar()

    @property
    def cumulative(self) -> bool:
        """True when an event has repeated the events before it."""
        return self._so_far.cumulative

    @property
    def text(self) -> str:
        """All text so far."""
        return self._so_far.text

    @property
    def ids(self) -> list[int]:
        """The ids of all tokens so far."""
        return self._so_far.ids

    @property
    def meta(self) -> dict[str, Any]:
        """``meta_info`` of all tokens so far."""
        return self._so_far.meta

    @property
    def logprobs(self) -> list[Triple]:
        """The logprobs of all tokens so far; empty when the engine gave none."""
        return self.meta.get("output_token_logprobs") or []

    @property
    def top_logprobs(self) -> list[Sequence[Triple] | None]:
        """The alternatives to all tokens so far; empty when the engine gave none."""
        return self.meta.get("output_top_logprobs") or []

    @property
    def reason(self) -> dict[str, Any] | None:
        """The engine's ``finish_reason``; None until the sequence ends."""
        reason = self._so_far.finish_reason
        return reason if isinstance(reason, dict) else None

    def take(self, answer: dict[str, Any]) -> str:
        """Take in a whole answer, or an event of any shape; return the text that is new. Raises ValueError."""
        return self._so_far.take(answer)

    def take_text(self, text: str, event: bytes | memoryview) -> None:
        """Take in the new ``text`` of a cumulative ``event``, and leave the other members of the event unparsed."""
        self._so_far.hold(event, text)


def answers_of(exchange: Exchange, body: bytes, count: int) -> list[dict[str, Any]]:
    """Return the ``count`` sequences of ``body``, the whole answer to ``exchange``. Callers must not change them.

    Raises WorkerBroke for any other body.
    """
    try:
        document = answer_in(exchange, body)
    except orjson.JSONDecodeError as error:
        raise WorkerBroke(f"the engine's answer is not JSON: {error}", answered=True) from None
    answers = document if isinstance(document, list) else [document]
    if len(answers) != count or not all(isinstance(each, dict) and "meta_info" in each for each in answers):
        raise WorkerBroke(f"the engine's answer is not the {count} sequences asked for", answered=True)
    return answers


def error_message(body: bytes) -> str | None:
    """Return the error message in ``body``, in the form of OpenAI, SGLang or FastAPI; None if there is none."""
    document = document_in(body)
    if document is None:
        return None
    error = document.get("error") or document.get("detail") or document
    message = error.get("message") if isinstance(error, dict) else error
    return message if isinstance(message, str) and message else None
