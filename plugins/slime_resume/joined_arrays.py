"""Arrays with a row for each token, joined over the attempts of one response."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import numpy as np

from slime_sglang.answers import TOKEN_ARRAYS
from slime_sglang.token_arrays import IntArray, TokenArray, array_in, may_be_recomputed

__all__ = ["JoinedArrays"]

_EXPERTS, _START = "routed_experts", "routed_experts_start_len"


class JoinedArrays:
    """The arrays of the response to ``body``.

    An array is left out if it has a gap, rows of two sizes, or rows that other weights may have computed.
    An attempt returns no row for its last token. The next attempt has this token in its prompt, and returns the row.
    """

    def __init__(self, body: Mapping[str, Any]) -> None:
        start = body.get(_START)
        self._prompt = len(body["input_ids"])
        self._first = dict.fromkeys(TOKEN_ARRAYS, 0)
        self._first[_EXPERTS] = start if type(start) is int else 0
        self._asked = dict(self._first)
        self._rows: dict[str, IntArray] = {}
        self._broken: set[str] = set()

    @property
    def next_start(self) -> int:
        """The first token whose experts are not known. The next attempt is asked for the rows from this token on."""
        return self._end(_EXPERTS)

    def ask(self) -> None:
        """Note that the next attempt is asked for the experts from ``next_start`` on."""
        self._asked[_EXPERTS] = self.next_start

    def see(
        self, meta: Mapping[str, Any], sampled: int, kept: int = 0, versions: Collection[Any] = ()
    ) -> None:
        """Take the arrays in ``meta``, of an attempt that ends after ``sampled`` tokens of the response.

        ``kept``: the number of tokens of earlier attempts, sampled under ``versions``. For these tokens, no rows are
        taken that other weights computed. Unknown versions count as other weights.
        """
        version = meta.get("weight_version")
        spans = meta.get("weight_versions")
        is_same = version is not None and {version} == {*versions} and not spans
        needed = 0 if is_same or not kept else self._prompt + kept - 1
        is_doubtful = may_be_recomputed(meta, spans if isinstance(spans, list) and spans else (version,))
        for name in TOKEN_ARRAYS:
            value = meta.get(name)
            if value and is_doubtful:
                self._broken.add(name)
            elif value and name not in self._broken:
                try:
                    self._add(name, value, meta.get(f"{name}_start_len"), self._prompt + sampled - 1, needed)
                except ValueError:
                    self._broken.add(name)

    def _end(self, name: str) -> int:
        return self._first[name] + len(self._rows.get(name, ()))

    def _add(self, name: str, value: Any, told: Any, end: int, needed: int) -> None:
        """Append the rows in ``value``, which end before token ``end``, to the known rows. Raises ValueError.

        The rows of the tokens before ``needed`` must be known already.
        """
        array = array_in(value)
        if array is None:
            raise ValueError
        start = told if type(told) is int else self._start(name, len(array.values), end)
        known = self._end(name)
        if not 0 <= start <= known or start >= end or len(array.values) % (end - start):
            raise ValueError
        if known < needed:
            raise ValueError
        rows = array.values.reshape(end - start, -1)
        if name not in self._rows:
            self._first[name] = start  # an engine may begin at another token than it was asked for
            self._rows[name] = rows
        elif end > known:
            self._rows[name] = np.concatenate([self._rows[name], rows[known - start :]])

    def _start(self, name: str, values: int, end: int) -> int:
        """Return the first token of an array of ``values`` numbers that ends before token ``end``.

        Call this for engines that do not report the first token. The first token is the ``routed_experts_start_len`` of
        the request, or 0 if the engine ignores that field, as older engines do. The size of the array, compared with
        the known rows, shows which of the two it is. Raises ValueError if it is neither, or if the request was for
        later rows and no rows are known.
        """
        asked = self._asked[name]
        size = self._rows[name].shape[1] if name in self._rows else 0
        for start in (asked, 0):
            if not asked or values == (end - start) * size:
                return start
        raise ValueError

    def of(self, sampled: int) -> dict[str, Any]:
        """Return the whole arrays of a response of ``sampled`` tokens, as fields of ``meta_info``."""
        found: dict[str, Any] = {}
        for name, rows in self._rows.items():
            first = self._first[name]
            count = self._prompt + sampled - 1 - first
            if name not in self._broken and 0 < count <= len(rows):
                found[name] = TokenArray.of(rows[:count])
                if name == _EXPERTS:
                    found[_START] = first
        return found
