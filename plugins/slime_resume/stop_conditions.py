"""The finish reason and text of a response whose last token the engine did not check.

On an abort SGLang returns before it checks the token of that step (``Req.check_finished``). So an EOS, the end of a
stop string, or the last token that the limit allows, comes with the reason ``abort``. A continuation after an EOS would
put the EOS into the middle of a response.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from router_core.types import Tokenizer

__all__ = ["StopConditions", "stop_strings"]

#: Number of last tokens decoded together: the text of a token depends on the tokens before it.
_WINDOW = 16


def stop_strings(parameters: dict[str, Any]) -> list[str]:
    """Return the stop strings of ``sampling_params``."""
    stop = parameters.get("stop") or []
    return [stop] if isinstance(stop, str) else [one for one in stop if one]


class StopConditions:
    """Checks last tokens for stop conditions, as an engine does. ``eos_ids``: the model's EOS tokens.

    ``min_new_tokens`` needs no check: an engine samples no EOS or stop token before it has sampled that many tokens.
    """

    def __init__(self, tokenizer: Tokenizer, eos_ids: Collection[int]) -> None:
        self._tokenizer = tokenizer
        self._eos_ids = frozenset(eos_ids)

    def reason(
        self, ids: Sequence[int], parameters: dict[str, Any], limit: int | None
    ) -> dict[str, Any] | None:
        """Return the finish reason of a response that ends with the last of ``ids``; None if it goes on."""
        if not ids:
            return None
        if limit is not None and len(ids) >= limit:
            return {"type": "length", "length": limit}
        stop_ids = self._eos_ids.union(parameters.get("stop_token_ids") or ())
        if ids[-1] in stop_ids and not parameters.get("ignore_eos"):
            return {"type": "stop", "matched": ids[-1]}
        stops = stop_strings(parameters)
        if stops:
            reach = max(map(len, stops)) + 1
            tail = self._tokenizer.decode(list(ids[-reach:]), skip_special_tokens=False)
            matched = next((stop for stop in stops if stop in tail), None)
            return {"type": "stop", "matched": matched} if matched is not None else None
        return None

    def trimmed(
        self, text: str, ids: Sequence[int], parameters: dict[str, Any], reason: dict[str, Any]
    ) -> str:
        """Return ``text``, which an engine gave for all of ``ids``, trimmed as the engine trims it for ``reason``."""
        matched = reason.get("matched")
        if parameters.get("no_stop_trim") or matched is None:
            return text
        if isinstance(matched, str):
            return text.partition(matched)[0]
        skip_special = parameters.get("skip_special_tokens") is not False
        near = list(ids[-_WINDOW:])
        whole = self._tokenizer.decode(near, skip_special_tokens=skip_special)
        without = self._tokenizer.decode(near[:-1], skip_special_tokens=skip_special)
        both = enumerate(zip(whole, without, strict=False))
        same = next((place for place, (one, other) in both if one != other), len(without))
        return text.removesuffix(whole[same:]) + without[same:] if text.endswith(whole[same:]) else text
