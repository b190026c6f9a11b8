"""What an engine answers, one sampled sequence at a time, and what of it is new with each event."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import orjson

from router_core.errors import HTTPError, WorkerBroke

__all__ = ["EngineRefused", "Output", "Triple", "answers_of", "understood", "words_of"]

logger = logging.getLogger(__name__)

#: ``[logprob, token id, text or None]``
Triple = Sequence[Any]


@contextmanager
def understood() -> Iterator[None]:
    """An engine's answer is read in here: one that is none becomes WorkerBroke."""
    try:
        yield
    except (AttributeError, LookupError, OverflowError, TypeError, ValueError) as error:
        logger.warning("an engine's answer was not understood", exc_info=error)
        raise WorkerBroke("the engine's answer was not understood", answered=True) from error


class EngineRefused(HTTPError):
    """The engine answered with an error, in words of its own."""

    type, code = "engine_error", "ENGINE_ERROR"

    def __init__(self, status: int, body: bytes) -> None:
        super().__init__(words_of(body) or f"The engine answered {status}.")
        self.status = status


class Output:
    """One sequence, as far as it is known.

    ``ids``, ``logprobs`` (triples) and ``top_logprobs`` (triples for each token) are those of all tokens so far;
    ``meta`` is the last ``meta_info``. ``cumulative``: its events were seen to repeat what came before.
    """

    def __init__(self) -> None:
        self.cumulative = False
        self.text = ""
        self.ids: list[int] = []
        self.logprobs: list[Triple] = []
        self.top_logprobs: list[Sequence[Triple] | None] = []
        self.meta: dict[str, Any] = {}

    @property
    def reason(self) -> dict[str, Any] | None:
        """The engine's ``finish_reason``; None while it goes on."""
        reason = self.meta.get("finish_reason")
        return reason if isinstance(reason, dict) else None

    def take(self, answer: dict[str, Any]) -> str:
        """Take in a whole answer, a cumulative event or a delta; returns the text that is new.

        Which of them it is shows in the counter: that is always of all tokens.
        """
        meta = answer["meta_info"]
        ids: list[int] = answer.get("output_ids") or []
        logprobs = meta.get("output_token_logprobs") or []
        top = meta.get("output_top_logprobs") or []
        count = meta.get("completion_tokens", len(ids))
        text = answer.get("text") or ""
        if len(ids or logprobs) == count:
            self.cumulative = 0 < len(self.ids) < count
            new, self.text = text[len(self.text) :], text
            self.ids, self.logprobs, self.top_logprobs = ids, logprobs, top
        else:
            new = text
            self.text += text
            self.ids = self.ids + ids
            whole = len(logprobs) == count  # some servers send them cumulative beside deltas
            self.logprobs = logprobs if whole else [*self.logprobs, *logprobs]
            self.top_logprobs = top if whole else [*self.top_logprobs, *top]
        if not self.ids and self.logprobs:
            self.ids = [triple[1] for triple in self.logprobs]
        self.meta = meta
        return new


def answers_of(body: bytes, count: int) -> list[dict[str, Any]]:
    """The ``count`` sequences of a whole answer. Raises WorkerBroke when it is something else."""
    try:
        document = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise WorkerBroke(f"the engine's answer is not JSON: {error}", answered=True) from None
    answers = document if isinstance(document, list) else [document]
    if len(answers) != count or not all(isinstance(each, dict) and "meta_info" in each for each in answers):
        raise WorkerBroke(f"the engine's answer is not the {count} sequences asked for", answered=True)
    return answers


def words_of(body: bytes) -> str | None:
    """What the error in ``body`` says: nested as OpenAI's, flat as SGLang's, or FastAPI's; None for anything else."""
    try:
        document = orjson.loads(body)
    except orjson.JSONDecodeError:
        return None
    if not isinstance(document, dict):
        return None
    error = document.get("error") or document.get("detail") or document
    message = error.get("message") if isinstance(error, dict) else error
    return message if isinstance(message, str) and message else None
