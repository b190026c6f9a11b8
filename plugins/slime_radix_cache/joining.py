"""One response out of several attempts, each of which went on where the one before was aborted."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from router_core.types import Tokenizer
from slime_radix_cache.continuing import max_new_tokens
from slime_radix_cache.endings import Endings
from slime_radix_cache.seams import SeamlessText, StopAcross

__all__ = ["JoinedResponse", "is_aborted", "read_event", "sampled_ids"]

#: Lists in ``meta_info`` with an entry for each sampled token.
_PER_TOKEN = (
    "output_token_logprobs",
    "output_top_logprobs",
    "output_token_ids_logprobs",
)
_LENGTH = "output_token_logprobs_length"


def is_aborted(output: Any) -> bool:
    """True for an object of the engine's that says so, unless it finds fault with the request (a status of 4xx)."""
    meta = output.get("meta_info") if isinstance(output, dict) else None
    reason = meta.get("finish_reason") if isinstance(meta, dict) else None
    if not isinstance(reason, dict) or reason.get("type") != "abort":
        return False
    status = reason.get("status_code")
    return not (isinstance(status, int) and 400 <= status < 500)


def sampled_ids(output: dict[str, Any]) -> list[int]:
    """The ids that ``output`` names."""
    ids = output.get("output_ids")
    if ids is None:
        ids = [triple[1] for triple in output["meta_info"].get("output_token_logprobs") or ()]
    return list(ids)


class JoinedResponse:
    """What was sampled for ``body`` in all attempts; it says so as if it had been one.

    ``began`` is when the client asked, on the monotonic clock. ``asked`` says of an aborted answer that somebody wanted
    the abort; any other one whose last token ends the response is the end of it.
    """

    def __init__(
        self,
        body: dict[str, Any],
        tokenizer: Tokenizer,
        began: float,
        endings: Endings,
        asked: Callable[[dict[str, Any]], bool],
    ) -> None:
        self._limit = max_new_tokens(body)
        self._parameters = body.get("sampling_params") or {}
        self._tokenizer = tokenizer
        self._began = began
        self._endings = endings
        self._asked = asked
        self.ids: list[int] = []
        self.incremental = False
        self.stopped = False
        self._lists: dict[str, list[Any]] = {}
        self._spans: list[dict[str, Any]] = []
        self._first: dict[str, Any] = {}
        self._latest: dict[str, Any] = {}
        self._reason: dict[str, Any] | None = None
        self._text = ""

    def start_with(self, output: dict[str, Any]) -> None:
        """``output``, whole, is what the first attempt gave."""
        meta = output["meta_info"]
        self.ids = sampled_ids(output)
        self._text = output.get("text") or ""
        self._first = self._latest = output
        self._reason = self._ending(output, self.ids)
        if self._reason is None:
            self._reason = meta.get("finish_reason")
        else:
            self._text = self._endings.trimmed(self._text, self.ids, self._parameters, self._reason)
        self._spans = _spans(meta, 0, len(self.ids))
        self._lists = {name: list(meta[name]) for name in _PER_TOKEN if isinstance(meta.get(name), list)}
        self.begin()

    def begin(self) -> None:
        """Another attempt begins; what it samples comes after all that is here."""
        self._kept = len(self.ids)
        self._spans_kept = self._spans
        self._seamless = SeamlessText(self._tokenizer, self._parameters, self.ids, self._text)
        self._across = StopAcross(self._tokenizer, self._parameters, self.ids)

    @property
    def ended(self) -> bool:
        """True when a finish reason other than an abort has come."""
        return self._reason is not None and self._reason.get("type") != "abort"

    def take(self, output: dict[str, Any]) -> int:
        """Take in what the attempt says, all of it so far or what is new. Returns the number of new tokens."""
        meta = output["meta_info"]
        seen = len(self.ids) - self._kept
        ids = sampled_ids(output)
        count = meta.get("completion_tokens")
        repeats = seen > 0 and (
            len(ids) == count if count is not None else ids[:seen] == self.ids[self._kept :]
        )
        new = ids[seen:] if repeats else ids
        if seen > 0:
            self.incremental = not repeats
        if not self._kept:
            self._first = output
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
            reason = self._ending(output, [*self.ids, *new]) or reason
        self.ids += new
        for name in _PER_TOKEN:
            if isinstance(meta.get(name), list):
                kept = self._lists.setdefault(name, [])
                told = meta[name][seen:] if len(meta[name]) != len(ids) or repeats else meta[name]
                kept += told[: len(new)]
        self._spans = self._spans_kept + _spans(meta, self._kept, len(self.ids))
        self._latest, self._reason = output, self._whole(reason)
        self._text = self._seamless.add(new, self._reason)
        return len(new)

    def _ending(self, output: dict[str, Any], ids: Sequence[int]) -> dict[str, Any] | None:
        """Why ``ids`` are a whole response, though ``output`` says that it was aborted; None if they are not."""
        if not is_aborted(output) or self._asked(output):
            return None
        return self._endings.reason(ids, self._parameters, self._limit)

    def _whole(self, reason: dict[str, Any] | None) -> dict[str, Any] | None:
        if reason is not None and reason.get("type") == "length":
            return reason | {"length": self._limit if self._limit is not None else len(self.ids)}
        return reason

    def answer(self) -> dict[str, Any]:
        """All of it, as an engine would give it."""
        return self.event(0, 0)

    @property
    def text_length(self) -> int:
        """Characters to be seen so far."""
        return len(self._text)

    def event(self, tokens: int, characters: int) -> dict[str, Any]:
        """As :meth:`answer`, without the first ``tokens`` and ``characters``, which the client was told before."""
        first, latest = self._first, self._latest
        meta = {**latest["meta_info"], **first["meta_info"]}
        meta |= {"finish_reason": self._reason, "completion_tokens": len(self.ids)}
        meta.pop("weight_versions", None)
        spans = _merged(self._spans)
        if spans:
            meta["weight_version"] = spans[-1]["version"]
        if len(spans) > 1:
            meta["weight_versions"] = spans
        for name, values in self._lists.items():
            meta[name] = values[
                max(0, len(values) + tokens - len(self.ids)) :
            ]  # of some, a delta is all there is
        if _LENGTH in meta:
            meta[_LENGTH] = len(self.ids)
        if self._reason is not None:
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
    """Weight versions of the tokens ``start`` to ``end``, of an attempt that counts its own from 0."""
    if start == end:
        return []
    told = meta.get("weight_versions") or [
        {"version": meta.get("weight_version"), "start": 0, "end": end - start}
    ]
    moved = [{**span, "start": span["start"] + start, "end": min(span["end"] + start, end)} for span in told]
    return [span for span in moved if span["start"] < span["end"]]


def _merged(spans: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    merged: list[dict[str, Any]] = []
    for span in spans:
        if merged and merged[-1]["version"] == span["version"]:
            merged[-1] = merged[-1] | {"end": span["end"]}
        else:
            merged.append(span)
    return merged


def read_event(output: Any) -> dict[str, Any]:
    """``output``, if it is one object about one response. Raises ValueError."""
    if not isinstance(output, dict) or not isinstance(output.get("meta_info"), dict):
        raise ValueError("no answer about a generation")
    return output
