"""Events of a stream in SGLang's order and in others, and what a recorder makes of them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from typing import Any

import orjson

from slime_radix_cache.capture.streams import GenerationStream
from slime_sglang import contradiction

__all__ = [
    "CHANGES",
    "EACH_CHANGE",
    "FORMATS",
    "OF_LOGPROBS",
    "Recorded",
    "event",
    "events",
    "is_doubted",
    "written",
]

Event = dict[str, Any]

_TEXTS = ['a"', "b\\", "ç", "]]", "{", '],"x-y":', "\n", "8"]


def event(ids: list[int], *, told: int = 0, index: int | None = None, **facts: Any) -> Event:
    """Return the event after ``ids`` in SGLang's order. ``told``: the number of ids that it leaves out.

    ``facts`` replace facts of ``meta_info``, or come behind them; None leaves one out.
    """
    new = range(told, len(ids))
    meta = {
        "id": "r",
        "finish_reason": facts.pop("finish_reason", None),
        "prompt_tokens": 4,
        "weight_version": "1",
        "num_retractions": 0,
        "input_token_logprobs": [],
        "output_token_logprobs": [_entry(ids, place) for place in new],
        "output_token_logprobs_length": len(ids),
        "output_top_logprobs": [[_entry(ids, place), [-9.5, 3, None]] for place in new],
        "x-cached": 0,
        "completion_tokens": len(ids),
    } | facts
    meta = {name: value for name, value in meta.items() if value is not None or name == "finish_reason"}
    text = "".join(_TEXTS[ids[place] % len(_TEXTS)] for place in new)
    told_event: Event = {"text": text, "output_ids": [ids[place] for place in new], "meta_info": meta}
    return told_event | ({} if index is None else {"index": index})


def _entry(ids: list[int], place: int) -> list[Any]:
    return [-(place + 1) / 7, ids[place], _TEXTS[ids[place] % len(_TEXTS)]]


def events(name: str = "sglang") -> list[Event]:
    """Return a stream of eight tokens in the format ``name``. The last event has a finish reason."""
    ids = [16, 1, 82, 3, 3, 5, 60, 87]
    reason = {"type": "length", "length": 8}
    told = [event(ids[:end]) for end in range(1, 8)] + [event(ids, finish_reason=reason, e2e_latency=0.5)]
    for place, one in enumerate(told):
        FORMATS[name](one, place)
    return told


def _keep(one: Event, *names: str) -> None:
    meta = one["meta_info"]
    one["meta_info"] = {name: meta[name] for name in meta if name in names or "logprobs" not in name}


def _without_tops(one: Event, place: int) -> None:
    _keep(one, "output_token_logprobs", "output_token_logprobs_length")


def _counts_first(one: Event, place: int) -> None:
    meta = one["meta_info"]
    names = ["id", "finish_reason", "prompt_tokens", "weight_version", "completion_tokens"]
    one["meta_info"] = {name: meta[name] for name in (*names, *meta)}


def _clock(one: Event, place: int) -> None:
    meta = one["meta_info"]
    one["meta_info"] = {"id": meta["id"], "queue_time": place / 8, **meta}


def _spans(one: Event, place: int) -> None:
    meta = one["meta_info"]
    meta["weight_version"] = "1" if place < 3 else "2"
    if place >= 3:
        spans = [("1", 0, 3), ("2", 3, place + 1)]
        meta["weight_versions"] = [
            {"version": name, "start": start, "end": end} for name, start, end in spans
        ]


def _nothing(one: Event, place: int) -> None:
    """Change nothing."""


#: Changes of events in SGLang's order, with top logprobs, to another format. ``written`` makes spaces.
FORMATS: dict[str, Callable[[Event, int], None]] = {
    "sglang": _without_tops,
    "top logprobs": _nothing,
    "no logprobs": lambda one, place: _keep(one),
    "counts first": _counts_first,
    "clock": _clock,
    "spans": _spans,
    "spaces": _without_tops,
    "sorted": lambda one, place: one.update(meta_info=dict(sorted(one["meta_info"].items()))),
    "prompt ids": lambda one, place: one.update(prompt_token_ids=[1, 2, 3, 4]),
    "index": lambda one, place: one.update(index=0),
}


Change = Callable[[Event], object]


def _set(name: str, value: Any) -> Change:
    return lambda told: told["meta_info"].update({name: value})


def _cut(name: str, entry: int, place: int, value: Any) -> Change:
    return lambda told: told["meta_info"][name][entry].__setitem__(place, value)


#: Changes of an event that contradict the events before it, or the event itself.
CHANGES: dict[str, Change] = {
    "text": lambda told: told.update(text="X" + told["text"][1:]),
    "shorter text": lambda told: told.update(text=told["text"][:2]),
    "no text": lambda told: told.update(text=""),
    "id": lambda told: told["output_ids"].__setitem__(0, 17),
    "longer id": lambda told: told["output_ids"].__setitem__(0, 160),
    "longer last id": lambda told: told["output_ids"].__setitem__(-2, told["output_ids"][-2] * 10),
    "fewer ids": lambda told: told["output_ids"].__delitem__(slice(-2, None)),
    "no ids": lambda told: told["output_ids"].clear(),
    "request": _set("id", "another"),
    "prompt": _set("prompt_tokens", 5),
}
#: Such changes of logprobs.
OF_LOGPROBS: dict[str, Change] = {
    "logprob": _cut("output_token_logprobs", 0, 0, -7.0),
    "logprob's id": _cut("output_token_logprobs", 1, 1, 17),
    "logprob's text": _cut("output_token_logprobs", 1, 2, "X"),
    "longer entry": lambda told: told["meta_info"]["output_token_logprobs"][1].append(5),
    "fewer logprobs": lambda told: told["meta_info"]["output_token_logprobs"].__delitem__(slice(-2, None)),
    "no logprobs": lambda told: told["meta_info"]["output_token_logprobs"].clear(),
}
#: The names of each format and of each change that its events can have.
EACH_CHANGE = [
    (name, change)
    for name in FORMATS
    for change in (*CHANGES, *(OF_LOGPROBS if name != "no logprobs" else ()))
]


def written(told: Iterable[Event], name: str = "sglang") -> list[bytes]:
    """Return the JSON of events in the format ``name``."""
    if name == "spaces":
        return [json.dumps(one, ensure_ascii=False).encode() for one in told]
    return [orjson.dumps(one) for one in told]


class Recorded:
    """A stream, and what was recorded of it."""

    def __init__(self) -> None:
        self.answers: list[Any] = []
        self.took_back = False
        self.errors: list[Exception] = []
        self.stream = GenerationStream(self._record, self.errors.append)

    def _record(self, index: int, answer: Any, took_back: bool) -> None:
        self.answers.append(answer)
        self.took_back |= took_back

    def send(self, *data: bytes, together: int = 1) -> Recorded:
        """Send events, so many ``together``, and then the end of a cancelled stream."""
        for start in range(0, len(data), together):
            self.stream.feed(b"".join(b"data: %s\n\n" % one for one in data[start : start + together]))
        self.stream.record_all()
        return self


def is_doubted(recorded: Recorded) -> bool:
    """Return True if the record is not exact, as far as the text is not read."""
    told = [contradiction(answer, prompt_tokens=4, rid="r") for answer in recorded.answers]
    return recorded.took_back or bool(recorded.errors) or told[-1:] != [None]
