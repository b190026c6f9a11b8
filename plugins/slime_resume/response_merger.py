"""Merges the attempts of one response. Each attempt continues where the attempt before it was aborted."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from router_core.types import Tokenizer
from slime_resume.continuation import max_new_tokens
from slime_resume.contracts import Spelling
from slime_resume.joined_arrays import JoinedArrays
from slime_resume.seams import SeamlessText, StopAcross
from slime_resume.stop_conditions import StopConditions
from slime_sglang import CONTRADICTION, PER_TOKEN, AnswerSoFar, contradiction, is_abort, is_aborted
from slime_sglang.answers import TOKEN_ARRAYS

__all__ = ["MergedResponse"]

_BROKEN = "\ufffd"
_BYTES_OF_CHARACTER = 4
#: Suffix of the field that has the length of a list with an entry per token.
_LENGTH = "_length"


class MergedResponse:
    """The response to ``body``, merged from all attempts.

    ``began``: when the request came, by ``time.monotonic``. ``asked`` returns True for an aborted answer whose abort a
    client requested. After any other abort the response has ended if its last token meets a stop condition.
    ``incremental``: True when the events are deltas, None while that is unknown.
    """

    def __init__(
        self,
        body: dict[str, Any],
        tokenizer: Tokenizer,
        began: float,
        stop_conditions: StopConditions,
        spelling: Spelling,
        asked: Callable[[dict[str, Any]], bool],
    ) -> None:
        self._sent = len(body["input_ids"])
        self._own_rid = body.get("rid")
        self._limit = max_new_tokens(body)
        self._parameters = body.get("sampling_params") or {}
        self._tokenizer = tokenizer
        self._began = began
        self._stop_conditions = stop_conditions
        self._spelling = spelling
        self._asked = asked
        self.ids: list[int] = []
        self.incremental: bool | None = None
        self.stopped = False
        self._prompt_tokens: int | None = None
        self._doubt: str | None = None
        self._lists: dict[str, list[Any]] = {}
        self._spans: list[dict[str, Any]] = []
        self._first: dict[str, Any] = {}
        self._latest: dict[str, Any] = {}
        self._reason: dict[str, Any] | None = None
        self._text = ""
        self._arrays = JoinedArrays(body)

    def start_with(self, output: dict[str, Any]) -> None:
        """Begin with the whole ``output`` of the first attempt: some tokens, and an abort."""
        self._kept, self._attempt, self._attempt_rid = 0, AnswerSoFar(), _name(self._own_rid)
        self._attempt.take(output)
        meta = output["meta_info"]
        self.ids = list(self._attempt.ids)
        self._arrays.see(meta, len(self.ids))
        self._text = self._attempt.text
        self._see_meta(output, meta)
        self._reason = self._ending(output, self.ids)
        if self._reason is None:
            self._reason = meta.get("finish_reason")
        else:
            self._text = self._stop_conditions.trimmed(self._text, self.ids, self._parameters, self._reason)
        self._spans = _spans(meta, 0, len(self.ids))
        self._lists = {name: list(meta[name]) for name in PER_TOKEN if isinstance(meta.get(name), list)}
        self.begin()

    def see_mode(self, told: AnswerSoFar) -> None:
        """Note whether the events in ``told`` are cumulative or incremental."""
        if told.cumulative or told.incremental:
            self.incremental = told.incremental

    def begin(self) -> None:
        """Begin another attempt; its tokens come after all tokens so far."""
        self._doubt = self.doubt()
        self._kept = len(self.ids)
        self._attempt, self._attempt_rid = AnswerSoFar(), self.rid or _name(self._own_rid)
        self._spans_kept = self._spans
        self._arrays.ask()
        self._seamless = SeamlessText(self._tokenizer, self._parameters, self.ids, self._text)
        self._across = StopAcross(self._tokenizer, self._parameters, self.ids)

    @property
    def rid(self) -> str | None:
        """The request id for the next attempt, or None to keep the request's own, if it has one."""
        return _name(self._first["meta_info"].get("id"))

    @property
    def row_start(self) -> int:
        """The first token whose routed experts the next attempt should return."""
        return self._arrays.next_start

    @property
    def ended(self) -> bool:
        """True when the response has a finish reason other than an abort."""
        return self._reason is not None and not is_aborted({"meta_info": {"finish_reason": self._reason}})

    @property
    def has_grown(self) -> bool:
        """True when the current attempt has added tokens, or the response has ended."""
        return len(self.ids) > self._kept or self.ended

    def take(self, output: dict[str, Any]) -> int:
        """Take an event of the attempt, cumulative or incremental. Return the number of new tokens."""
        attempt = self._attempt
        attempt.take(output)
        self.see_mode(attempt)
        meta = attempt.meta
        self._see_meta(output, meta)
        versions = {span["version"] for span in self._spans_kept}
        self._arrays.see(meta, self._kept + len(attempt.ids), self._kept, versions)
        new = attempt.ids[len(self.ids) - self._kept :]
        reason = meta.get("finish_reason")
        if not new and reason is None:
            return 0
        across = self._across.find(new)
        if across is not None and (self._limit is None or len(self.ids) + across[0] < self._limit):
            count, stop = across
            del new[count:]
            reason = {"type": "stop", "matched": stop}
            self.stopped = True
        else:
            reason = self._ending(output, [*self.ids, *new] if is_aborted(output) else ()) or reason
        before = len(self.ids) - self._kept
        self.ids += new
        for name in PER_TOKEN:
            if isinstance(meta.get(name), list):
                self._lists.setdefault(name, []).extend(meta[name][before : len(self.ids) - self._kept])
        self._spans = self._spans_kept + _spans(meta, self._kept, len(self.ids))
        self._reason = self._whole(reason)
        self._text = self._seamless.add(new, self._reason)
        return len(new)

    def _see_meta(self, output: dict[str, Any], meta: dict[str, Any]) -> None:
        """Remember an attempt's fields. The latest attempt adds to the response only fields that the first lacks."""
        self._latest = {**output, "meta_info": meta}
        if not self._kept:
            self._first = self._latest
        told = meta.get("prompt_tokens")
        if self._prompt_tokens is None and isinstance(told, int):
            self._prompt_tokens = told - self._kept

    def doubt(self) -> str | None:
        """Return the reason why the response's token ids cannot be trusted (a contradiction in an attempt), or None."""
        if self._doubt is None and self._attempt.begun:
            if self._attempt.rewritten:
                return CONTRADICTION
            answer = self._attempt.answer
            sent = self._sent + self._kept
            if contradiction(answer, prompt_tokens=sent, rid=self._attempt_rid) or not self._is_spelt():
                return CONTRADICTION
        return self._doubt

    def _is_spelt(self) -> bool:
        """Return True when the attempt's ids spell its text, except for a character that began before the attempt."""
        ids, text, reason = self._attempt.ids, self._attempt.text, self._attempt.finish_reason
        if not ids:  # right for an abort, or before the end of an attempt; else the tokens are lost
            meta = self._attempt.meta
            return not text and not meta.get("completion_tokens") and (reason is None or is_abort(meta))
        if self._spelling.tail(ids, text, reason) is not None:
            return True
        text = text.lstrip(_BROKEN)
        return any(
            self._spelling.tail(ids[skipped:], text, reason) is not None
            for skipped in range(1, min(_BYTES_OF_CHARACTER, len(ids) + 1) if self._kept else 1)
            if not self._spelling.text_of(ids[:skipped]).strip(_BROKEN)  # no whole character is skipped
        )

    def _ending(self, output: dict[str, Any], ids: Sequence[int]) -> dict[str, Any] | None:
        """Return the finish reason that ``ids`` meet, or None.

        Returns None, too, if ``output`` is no abort, or an abort that a client requested.
        """
        if not is_aborted(output) or self._asked(output):
            return None
        return self._stop_conditions.reason(ids, self._parameters, self._limit)

    def _whole(self, reason: dict[str, Any] | None) -> dict[str, Any] | None:
        if reason is not None and reason.get("type") == "length":
            return reason | {"length": self._limit if self._limit is not None else len(self.ids)}
        return reason

    def answer(self) -> dict[str, Any]:
        """Return the whole response, as an engine would."""
        return self.event(0, 0)

    @property
    def text_length(self) -> int:
        """Number of visible characters so far."""
        return len(self._text)

    def event(self, tokens: int, characters: int) -> dict[str, Any]:
        """Return :meth:`answer` without the first ``tokens`` and ``characters``, which the client has already."""
        first, latest = self._first, self._latest
        meta = {**latest["meta_info"], **first["meta_info"]}
        meta |= {"finish_reason": self._reason, "completion_tokens": len(self.ids)}
        if self._prompt_tokens is not None and "prompt_tokens" not in first["meta_info"]:
            meta["prompt_tokens"] = self._prompt_tokens  # an abort in the waiting queue lacks it
        meta.pop("weight_versions", None)
        spans = _merged(self._spans)
        if spans:
            meta["weight_version"] = spans[-1]["version"]
        if len(spans) > 1:
            meta["weight_versions"] = spans
        for name, values in self._lists.items():
            if len(values) == len(self.ids):
                meta[name] = values[tokens:]
            else:
                meta.pop(name, None)  # an attempt lacks it, so entries and tokens would not match
            if name + _LENGTH in meta:
                meta[name + _LENGTH] = len(values)
        for name in TOKEN_ARRAYS:
            meta.pop(name, None)
        if self._reason is not None:
            meta |= self._arrays.of(len(self.ids))
            meta["e2e_latency"] = time.monotonic() - self._began
        else:
            meta.pop("e2e_latency", None)
        return {
            **latest,
            **first,
            "text": self._text[characters:],
            "output_ids": self.ids[tokens:],
            "meta_info": meta,
        }


def _spans(meta: dict[str, Any], start: int, end: int) -> list[dict[str, Any]]:
    """Return the weight versions of tokens ``start`` to ``end``, which the attempt counts from 0."""
    if start == end:
        return []
    whole: list[dict[str, Any]] = [{"version": meta.get("weight_version"), "start": 0, "end": end - start}]
    try:
        moved = [
            {
                **span,
                "version": span["version"],
                "start": span["start"] + start,
                "end": min(span["end"] + start, end),
            }
            for span in meta.get("weight_versions") or whole
        ]
        return [span for span in moved if span["start"] < span["end"]]
    except (LookupError, TypeError):
        return [{"version": None, "start": start, "end": end}]  # :meth:`doubt` finds the contradiction


def _merged(spans: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    merged: list[dict[str, Any]] = []
    for span in spans:
        if merged and merged[-1]["version"] == span["version"]:
            merged[-1] = merged[-1] | {"end": span["end"]}
        else:
            merged.append(span)
    return merged


def _name(rid: Any) -> str | None:
    return rid if isinstance(rid, str) else None
