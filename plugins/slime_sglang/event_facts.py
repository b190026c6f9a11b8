"""Checks of what several events of a sequence say about the request, the weight versions and the logprobs.

A *span* is an item of ``weight_versions``: ``version`` sampled the tokens from ``start`` to ``end - 1``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from slime_sglang.answers import PER_TOKEN

__all__ = ["EventFacts", "abort_repeats", "is_end", "names_last_version", "versions_agree"]

#: Facts about the request, the same in each event of a sequence.
_OF_THE_REQUEST = ("id", "prompt_tokens")


class EventFacts:
    """The facts of the events so far. ``changed``: an event contradicted itself or an event before it.

    ``has_versions``: events named different weight versions.
    """

    __slots__ = (
        "_count",
        "_lists",
        "_request",
        "_run",
        "_runs",
        "_spans",
        "_version",
        "changed",
        "has_versions",
    )

    def __init__(self) -> None:
        self.changed = self.has_versions = False
        self._count = 0
        self._version: Any = None
        #: The start and the end of the tokens that ``_version`` sampled, as the events without spans say.
        self._run = (0, 0)
        #: Earlier versions, each with such a start and end.
        self._runs: list[tuple[Any, int, int]] = []
        #: The spans of the last event that had some.
        self._spans: list[Any] = []
        self._request: dict[str, Any] = {}
        self._lists: dict[str, list[Any]] = {}

    def copy(self) -> EventFacts:
        """Return an independent copy."""
        twin = EventFacts()
        twin.changed, twin.has_versions, twin._version = self.changed, self.has_versions, self._version
        twin._run, twin._runs, twin._spans, twin._count = (
            self._run,
            list(self._runs),
            self._spans,
            self._count,
        )
        twin._request, twin._lists = dict(self._request), dict(self._lists)
        return twin

    def see(self, meta: Mapping[str, Any], tokens: int, *, is_abort: bool) -> None:
        """Take the ``meta_info`` of an event. ``tokens``: the number of tokens so far, those of the event included.

        Call this only after the first token: before the first token, the weight version may still change.
        """
        for figure in _OF_THE_REQUEST:
            told = meta.get(figure)
            if told is not None and self._request.setdefault(figure, told) != told:
                self.changed = True  # an engine has mixed up its streams
        count = meta.get("completion_tokens")
        if type(count) is int and not is_abort:
            self.changed |= count < self._count
            self._count = count
        version, spans = meta.get("weight_version"), meta.get("weight_versions")
        if spans or self._spans:
            self._see_spans(spans, version, is_abort)
        if version is not None:
            if version != self._version:
                self._see_version(version, tokens, has_spans=bool(spans))
            self._version = version
            if not (spans or is_abort):
                self._run = (self._run[0], tokens)

    def _see_version(self, version: Any, tokens: int, *, has_spans: bool) -> None:
        if self._version is not None:
            self.has_versions = True
            self._runs.append((self._version, *self._run))
            self._run = (tokens, tokens)  # an older version may have sampled the tokens so far
        if not has_spans and any(version == known for known, _, _ in self._runs):
            self.changed = True  # the version is back: no version of the tokens in between fits all events

    def _see_spans(self, spans: Any, version: Any, is_abort: bool) -> None:
        if spans:
            if not self._spans:
                self.changed |= not _spans_fit([*self._runs, (self._version, *self._run)], spans)
            self.changed |= not (versions_agree(self._spans, spans) and names_last_version(version, spans))
            self._spans = spans if isinstance(spans, list) else []
        else:
            self.has_versions |= len(self._spans) > 1
            self.changed |= not is_abort  # an abort may lack any fact

    def see_lists(self, meta: Mapping[str, Any]) -> None:
        """Take the lists ``PER_TOKEN`` of an event that has all tokens so far. O(tokens)."""
        for name in PER_TOKEN:
            told = meta.get(name)
            if isinstance(told, list):
                known = self._lists.get(name)
                self.changed |= known is not None and told[: len(known)] != known
                self._lists[name] = told


def versions_agree(known: Sequence[Any], told: Any) -> bool:
    """Return True if the spans ``told`` give the tokens of the spans ``known`` the same versions.

    ``known``: the spans of an earlier event, which were checked in the same way. O(spans).
    """
    try:
        place = end = 0
        for span in told:
            start, end = end, span["end"]
            if span["start"] != start or not start <= end:
                return False
            while place < len(known) and known[place]["start"] < end:
                if known[place]["version"] != span["version"]:
                    return False
                if known[place]["end"] > end:
                    break  # the next span has the rest of these tokens
                place += 1
        return place == len(known)
    except (LookupError, TypeError):
        return False


def names_last_version(version: Any, spans: Any) -> bool:
    """Return True if ``version`` is the version of the last of ``spans``, as in SGLang's answers.

    Missing figures agree. If there is only one token, its span may have another version: that of the prefill worker,
    which sampled it.
    """
    if version is None or not spans:
        return True
    try:
        return bool(spans[-1]["version"] == version or spans[-1]["end"] == 1)
    except (LookupError, TypeError):
        return False


def _spans_fit(runs: Sequence[tuple[Any, int, int]], spans: Any) -> bool:
    """Return True if ``spans`` name no other version for a token than ``runs`` do.

    A run is (version, start, end). A null in ``spans`` fits any version.
    """
    try:
        return all(
            span["version"] in (version, None) or span["end"] <= start or end <= span["start"]
            for version, start, end in runs
            for span in spans
        )
    except (LookupError, TypeError):
        return False


def is_end(ids: list[int], known: list[int]) -> bool:
    """Return True if ``known`` ends with ``ids``, the ids of an abort, which may have the last id twice."""
    return ids == known[len(known) - len(ids) :] or (
        ids[-1:] == known[-1:] and ids[:-1] == known[len(known) - len(ids) + 1 :]
    )


def abort_repeats(
    known: Mapping[str, Any], told: Mapping[str, Any], tokens: int, *, may_be_delta: bool
) -> bool:
    """Return True if the lists ``PER_TOKEN`` of an abort agree with the entries of earlier tokens.

    ``known``: ``meta_info`` of the answer before the abort, which had ``tokens`` tokens. ``told``: ``meta_info`` of the
    abort. Its lists may have the entries of all tokens, or those of the new tokens and then those of all tokens. With
    ``may_be_delta``, they may also have only the entries of the new tokens.
    """
    count = told.get("completion_tokens")
    for name in PER_TOKEN:
        before, after = known.get(name), told.get(name)
        if not (isinstance(before, list) and isinstance(after, list) and type(count) is int) or not after:
            continue
        new, more = count - tokens, len(after) - count
        whole = after[more:] if more > 0 else after
        repeats = whole[: len(before)] == before
        if more > 0:
            repeats = repeats and more == new and whole[-new:] == after[:new]
        if not (repeats or (may_be_delta and len(after) == new)):
            return False
    return True
