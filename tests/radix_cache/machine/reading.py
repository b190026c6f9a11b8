"""Tokens to text, and why a response ends: as SGLang does both."""

from __future__ import annotations

from collections.abc import Sequence
from os.path import commonprefix
from typing import Any

from router_core.types import Tokenizer

__all__ = ["Detokenizer", "finish_reason", "stops_of"]

#: As many of the prompt's last tokens as SGLang decodes with the first sampled ones.
_READ_BACK = 5


class Detokenizer:
    """Tokens to text as SGLang does it, and why a response ends. ``eos_ids`` are those of the model.

    ``one_reading``: tokens read alike behind others and at the beginning of a text.
    """

    def __init__(self, tokenizer: Tokenizer, eos_ids: frozenset[int], *, one_reading: bool) -> None:
        self.tokenizer = tokenizer
        self.eos_ids = eos_ids
        self.one_reading = one_reading

    def decode(self, ids: Sequence[int], skip_special: bool = False) -> str:
        return self.tokenizer.decode(list(ids), skip_special_tokens=skip_special) if ids else ""

    def read(self, before: Sequence[int], ids: Sequence[int], skip_special: bool) -> str:
        """The text of ``ids`` behind ``before``: decoded with the tokens before."""
        back = list(before[-_READ_BACK:])
        shown = self.decode(back, skip_special)
        whole = self.decode([*back, *ids], skip_special)
        return whole[len(shown) :] if whole.startswith(shown) else self.decode(ids, skip_special)

    def text(self, before: Sequence[int], ids: Sequence[int], parameters: dict[str, Any], reason: Any) -> str:
        """Return the client's text of ``ids``; ``reason`` None: they go on, so none is shown that may change."""
        trims = not parameters.get("no_stop_trim")
        matched = reason.get("matched") if reason is not None and trims else None
        shown = ids[:-1] if isinstance(matched, int) else ids
        skip_special = parameters.get("skip_special_tokens") is not False
        text = self.read(before, shown, skip_special)
        if isinstance(matched, str):
            return text.partition(matched)[0]
        if reason is not None:
            return text
        text = self._settled(text.rstrip("\ufffd"), before, ids, skip_special)
        held = [
            size
            for stop in stops_of(parameters)
            for size in range(1, len(stop))
            if text.endswith(stop[:size])
        ]
        return text[: len(text) - max(held, default=0)] if trims else text

    def _settled(self, text: str, before: Sequence[int], ids: Sequence[int], skip_special: bool) -> str:
        """``text`` without what another byte takes back: some read a run of bytes as characters only as a whole."""
        start = len(ids)
        while start and self.decode(ids[start - 1 : start]) == "\ufffd":
            start -= 1
        if start == len(ids):
            return text
        later = self.read(before, [*ids, ids[start]], skip_special)
        return commonprefix((text, later))  # noqa: RUF071 - by characters


def stops_of(parameters: dict[str, Any]) -> list[str]:
    stop = parameters.get("stop") or []
    return [stop] if isinstance(stop, str) else list(stop)


def finish_reason(
    reader: Detokenizer, ids: Sequence[int], parameters: dict[str, Any]
) -> dict[str, Any] | None:
    """SGLang's ``Req.check_finished`` after the last of ``ids``."""
    limit = parameters.get("max_new_tokens", 128)
    if len(ids) >= limit:
        return {"type": "length", "length": limit}
    ends = reader.eos_ids.union(parameters.get("stop_token_ids") or ())
    if ids[-1] in ends and not parameters.get("ignore_eos"):
        return {"type": "stop", "matched": ids[-1]}
    stops = stops_of(parameters)
    tail = reader.decode(ids[-max(map(len, stops), default=0) - 1 :]) if stops else ""
    matched = next((stop for stop in stops if stop in tail), None)
    return {"type": "stop", "matched": matched} if matched is not None else None
