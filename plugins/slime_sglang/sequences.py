"""Assembly of the events of one sampled sequence into the answer that an unstreamed request would have got.

SGLang streams cumulative events (each has all text and ids so far) or, with ``--incremental-streaming-output``, deltas
beside cumulative counters. Aborts have shapes of their own (SGLang's ``TokenizerManager._handle_abort_req``):

- Abort in the waiting queue, of a request that may have sampled before: the event lacks ``prompt_tokens``. Its text,
  logprobs and ``completion_tokens`` cover all tokens so far. In an incremental stream, and in older versions in any
  stream, ``output_ids`` is only the *last* id.
- If deltas were still unread when such an abort came, SGLang joins both in one event (``_coalesce_streaming_chunks``).
  Text, ``output_ids`` and lists of logprobs are the deltas followed by the abort's value. Other fields are the abort's.
- Any abort in older versions: only ``id`` and ``finish_reason``.
"""

from __future__ import annotations

from typing import Any

import orjson

from slime_sglang.answers import (
    PER_TOKEN,
    News,
    extended,
    ids_in,
    ids_of,
    is_abort,
    with_missing,
    without_queued,
)
from slime_sglang.event_facts import EventFacts, abort_repeats, is_end

__all__ = ["AnswerSoFar", "whole_answer"]


def whole_answer(event: dict[str, Any]) -> dict[str, Any]:
    """Return ``event``, the first of its sequence, as an unstreamed answer. Raises ValueError."""
    so_far = AnswerSoFar()
    so_far.take(event)
    return so_far.answer


class AnswerSoFar:
    """The answer so far, assembled from the events of one sequence.

    Inconsistent figures stay as the engine gave them, so that :func:`slime_sglang.contradiction` finds them.
    ``cumulative``: an event repeated the events before it. ``incremental``: an event had only new tokens.
    ``rewritten``: an event contradicted itself, or changed a statement of an earlier event.
    """

    def __init__(self) -> None:
        self.cumulative = False
        self.incremental = False
        self.rewritten = False
        self.text = ""
        self._ids: list[int] = []
        self._event: dict[str, Any] | None = None
        #: The lists ``PER_TOKEN`` with all entries; None while the last event has all entries itself.
        self._lists: dict[str, Any] | None = None
        self._names_ids = self._has_text = False
        self._held: bytes | memoryview | None = None
        self._text_is_told = False
        self._is_shared = True
        #: True when some event did not have all tokens so far.
        self._has_deltas = False
        self._facts = EventFacts()

    @property
    def begun(self) -> bool:
        """True when an event has come."""
        return self._event is not None

    @property
    def finish_reason(self) -> Any:
        """The finish reason of the last event that was parsed. An event in :meth:`hold` is not parsed yet."""
        return self._event["meta_info"].get("finish_reason") if self._event is not None else None

    @property
    def ids(self) -> list[int]:
        """All ids so far, valid until the next event. Do not change them."""
        self._catch_up()
        return self._ids

    @property
    def meta(self) -> dict[str, Any]:
        """``meta_info`` of the answer, valid until the next event; empty before the first one. Do not change it.

        If events named several versions, and ``weight_versions`` does not say which tokens each version sampled,
        ``weight_version`` is left out.
        """
        self._catch_up()
        if self._event is None:
            return {}
        meta: dict[str, Any] = self._event["meta_info"]
        if self._facts.has_versions and not meta.get("weight_versions"):
            meta = {name: value for name, value in meta.items() if name != "weight_version"}
        return meta if self._lists is None else {**meta, **self._lists}

    @property
    def answer(self) -> dict[str, Any]:
        """The answer, as an unstreamed request would get it. Later events leave it as it is."""
        meta = self.meta
        if self._event is None:
            raise LookupError("no event has come")
        self._is_shared = True
        answer = {**self._event, "meta_info": meta}
        if self._names_ids:
            answer["output_ids"] = self._ids
        if self._has_text:
            answer["text"] = self.text
        return answer

    def copy(self) -> AnswerSoFar:
        """Return an independent copy."""
        self._catch_up()
        twin = AnswerSoFar()
        vars(twin).update(vars(self))
        self._is_shared = twin._is_shared = True
        twin._facts = self._facts.copy()
        return twin

    def hold(self, event: bytes | memoryview, text: str | None = None) -> None:
        """Keep an unparsed ``event`` that repeats all earlier events. ``text``: its new text, if the caller read it.

        The event is parsed only when its fields are needed, or when the next event may not repeat it: parsing each
        event would take quadratic time.
        """
        self._held = event
        self._text_is_told = text is not None
        self.text += text or ""

    def take(self, event: dict[str, Any], *, repeats: bool = False) -> str:
        """Take a parsed event, or a whole answer. Return the text that is new. Raises ValueError.

        ``repeats``: the event surely repeats all earlier events. A delta takes time O(new tokens).
        """
        meta = event.get("meta_info")
        if not isinstance(meta, dict):
            raise ValueError("wanted an object with meta_info")
        text = event.get("text")
        if not (text is None or isinstance(text, str)):
            raise ValueError(f"wanted a text, got {type(text).__name__}")
        ids, count = ids_in(event, meta), meta.get("completion_tokens")
        if self._names_ids and event.get("output_ids") is None:
            ids = None  # this engine has all new ids in output_ids; if they are missing, the logprobs may be old
        if self._is_next_delta(ids, count) and not is_abort(meta):
            return self._take_delta(event, meta, ids or [], text)
        if not (repeats or self._text_is_told) or ids is None or len(ids) != count:
            self._catch_up()
        self._held = None
        aborted = is_abort(meta)
        news = self._read_abort(ids or [], meta, text) if aborted else self._read(ids, meta, text)
        if aborted and self._event is not None:
            is_delta = not (news.has_all or self.cumulative)
            if self._ids and not abort_repeats(self.meta, meta, len(self._ids), may_be_delta=is_delta):
                self.rewritten = True
            grown = len(news.ids) > (len(self._ids) if news.has_all else 0)
            event = with_missing(self.answer, event, grown=grown)
        if self._ids and ids is not None:
            self._see_mode(ids, news, aborted)
        if not aborted:
            if news.has_all or not self._ids:
                self._facts.see_lists(meta)
            elif ids is None and not self.incremental:
                self._facts.see_lists({name: told for name, told in meta.items() if told})
        self._names_ids |= event.get("output_ids") is not None
        if news.has_all:
            self._ids, self._lists, self._is_shared = news.ids, None, True
        else:
            self._append(meta, news)
        self._event = event
        if self._ids:  # before the first token, the version may still change
            self._facts.see(event["meta_info"], len(self._ids), is_abort=aborted)
        self.rewritten |= self._facts.changed or (aborted and not is_end(ids or [], self._ids))
        return self._read_text(text, news, aborted, is_last=meta.get("finish_reason") is not None)

    def _is_next_delta(self, ids: list[int] | None, count: Any) -> bool:
        known = len(self._ids)
        return (
            self.incremental
            and bool(ids and known)
            and known + len(ids or ()) == count
            and self._held is None
        )

    def _take_delta(
        self, event: dict[str, Any], meta: dict[str, Any], ids: list[int], text: str | None
    ) -> str:
        """Take the usual event of an incremental stream: the fast path of ``take``, with half of its work."""
        self._append(meta, News(ids, has_all=False, is_full=False))
        self._event = event
        self._facts.see(meta, len(self._ids), is_abort=False)
        self.rewritten |= self._facts.changed
        self._names_ids |= "output_ids" in event
        if text is None:
            return ""
        self._has_text = True
        self.text += text
        return text

    def _see_mode(self, ids: list[int], news: News, aborted: bool) -> None:
        """Note whether the event repeats earlier events or only adds tokens. An abort that fits both shows nothing."""
        if news.has_all:
            self.cumulative |= not aborted or (news.ids is ids and len(ids) > 1)
        elif news.ids:
            self.incremental |= not aborted or not news.is_full
        self._has_deltas |= not (news.has_all or aborted)
        self.rewritten |= self.cumulative and self._has_deltas

    def _catch_up(self) -> None:
        held, self._held = self._held, None
        if held is None:
            return
        told = self.text
        self.take(orjson.loads(held))
        if self._text_is_told:
            self.text = told

    # The counter ``completion_tokens`` decides if it can, since it counts all tokens so far, in deltas too.

    def _read(self, ids: list[int] | None, meta: dict[str, Any], text: str | None) -> News:
        known, count = self._ids, meta.get("completion_tokens")
        if ids is None:  # from older engines, which were cumulative, or an event without output_ids
            repeats = text is not None and not self.incremental and text.startswith(self.text)
            return News([], has_all=False, is_full=repeats)
        begins = ids[: len(known)] == known
        if begins and len(ids) == count:
            return News(ids, has_all=True, is_full=True)
        if len(known) + len(ids) == count and not (begins and self._repeats_logprobs(ids, meta)):
            return News(ids, has_all=False, is_full=False)
        # The counter is missing, or wrong.
        is_longer = len(ids) > len(known) or self.cumulative or (count is None and not self.incremental)
        has_all = begins and is_longer
        return News(ids, has_all=has_all, is_full=has_all or self.cumulative)

    def _repeats_logprobs(self, ids: list[int], meta: dict[str, Any]) -> bool:
        """Return True when an event has a logprob for each of ``ids``, beginning with those of all earlier tokens."""
        known, told = self.meta.get("output_token_logprobs"), meta.get("output_token_logprobs")
        if not (isinstance(known, list) and isinstance(told, list) and known):
            return False
        return len(told) == len(ids) and len(known) == len(self._ids) and told[: len(known)] == known

    def _read_abort(self, ids: list[int], meta: dict[str, Any], text: str | None) -> News:
        known, count = self._ids, meta.get("completion_tokens")
        begins = ids[: len(known)] == known
        is_again = len(known) + len(ids) - 1 == count and ids[-1:] == (ids[-2:-1] or known[-1:])
        # The event has all text if the sequence was in the waiting queue, or the stream is cumulative.
        was_waiting = "prompt_tokens" not in meta and "prompt_tokens" in self.meta
        has_all_text = was_waiting or self.cumulative
        if ids and begins and len(ids) == count and not (was_waiting and is_again):
            return News(ids, has_all=True, is_full=True)
        is_delta = len(known) + len(ids) == count
        told = meta.get("output_token_logprobs") or []
        if ids and len(told) == count and (has_all_text or not is_delta):
            sampled = ids_of(told)
            if sampled[: len(known)] == known and sampled[-1] == ids[-1]:
                return News(sampled, has_all=True, is_full=True)
        if not ids:
            repeats = text is not None and text.startswith(self.text)
            return News([], has_all=False, is_full=has_all_text or repeats)
        if is_delta:
            return News(ids, has_all=False, is_full=has_all_text)
        if is_again:
            return News(ids[:-1], has_all=False, is_full=True, again=1)
        has_all = begins and len(ids) > len(known)
        return News(ids, has_all=has_all, is_full=has_all or has_all_text)

    def _read_text(self, text: str | None, news: News, aborted: bool, *, is_last: bool) -> str:
        if text is None:
            return ""
        before, self._has_text = self.text, True
        if not news.is_full:
            self.text += text
            return text
        # Only the last event may have a shorter text: a stop string is trimmed there.
        repeats = text.startswith(before) or (is_last and before.startswith(text))
        if not aborted:
            self.text = text
        elif news.again:
            self.text = without_queued(before, text)
            repeats |= text == self.text[len(before) :] + self.text
        elif len(text) > len(before):
            self.text = text
        self.rewritten |= not repeats
        return self.text[len(before) :]

    def _append(self, told: dict[str, Any], news: News) -> None:
        """Append the ids of ``news``, and the entries of ``told`` for these ids, to the ids and lists so far."""
        if self._is_shared:
            known = self.meta
            self._ids = list(self._ids)
            self._lists = {name: list(known[name]) for name in PER_TOKEN if isinstance(known.get(name), list)}
            self._is_shared = False
        assert self._lists is not None  # narrowing: it is not shared
        self._ids += news.ids
        for name in PER_TOKEN:
            if told.get(name) is not None:
                self._lists[name] = extended(self._lists.get(name, []), told[name], len(self._ids), news)
