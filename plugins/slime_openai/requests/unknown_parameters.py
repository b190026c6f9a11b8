"""Parameters unknown to OpenAI's API and to this router: reported, refused, or handed to the engine."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from slime_openai.errors import UnknownParameter
from slime_openai.requests.fields import encoded

__all__ = ["TreatedParameters", "UnknownMode", "UnknownParameters"]

logger = logging.getLogger(__name__)

#: ``warn``: unknown parameters have no effect; ``refuse``: the request gets a 400; ``pass``: they go to the engine,
#: except ``_WRITTEN_HERE``.
UnknownMode = Literal["warn", "refuse", "pass"]

_HEADER = b"x-slime-unknown-parameters"
_ODD = re.compile(r"[^A-Za-z0-9_.\-]")
#: Longer names are cut to this many characters.
_LONGEST_NAME = 64
_MOST_IN_HEADER = 16
#: At most this many names are logged, once each. Clients choose the names, so a limit is needed.
_MOST_LOGGED = 256
#: Members of ``/generate`` that only the router sets: a client's value would change the request.
_WRITTEN_HERE = frozenset(
    (
        "input_ids",
        "logprob_start_len",
        "require_reasoning",
        "return_logprob",
        "sampling_params",
        "text",
        "top_logprobs_num",
    )
)


@dataclass(frozen=True, slots=True)
class TreatedParameters:
    """The unknown parameters of one request. ``passed``: the ones for the engine; ``headers``: for the reply."""

    passed: dict[str, Any] = field(default_factory=dict)
    headers: list[tuple[bytes, bytes]] = field(default_factory=list)


class UnknownParameters:
    """Handles unknown parameters as ``mode`` says."""

    def __init__(self, mode: UnknownMode) -> None:
        self._mode = mode
        self._logged: set[str] = set()

    def treat(self, unknown: Mapping[str, Any]) -> TreatedParameters:
        """Refuse ``unknown``, or else log the names and return the parameters for the engine and the reply's header.

        Raises UnknownParameter, and InvalidRequest for a value that cannot be sent.
        """
        if not unknown:
            return TreatedParameters()
        if self._mode == "refuse":
            raise UnknownParameter(*unknown)
        passed: dict[str, Any] = {}
        if self._mode == "pass":
            passed = {name: value for name, value in unknown.items() if name not in _WRITTEN_HERE}
            for name, value in passed.items():
                encoded(_shown(name), [value])  # one level more, as in the engine's request
        for name in unknown:
            self._log(_shown(name), "went to the engine" if name in passed else "had no effect")
        return TreatedParameters(passed, [(_HEADER, _listed(unknown))])

    def _log(self, name: str, effect: str) -> None:
        if name not in self._logged and len(self._logged) < _MOST_LOGGED:
            self._logged.add(name)
            logger.warning("the unknown parameter %s of a request %s (logged once)", name, effect)


def _shown(name: str) -> str:
    """Return ``name`` for a header or a log: shortened, with ``?`` for unusual characters."""
    return _ODD.sub("?", name[:_LONGEST_NAME]) or "?"


def _listed(names: Iterable[str]) -> bytes:
    shown = [_shown(name) for name in names]
    more = ["..."] if len(shown) > _MOST_IN_HEADER else []
    return ", ".join(shown[:_MOST_IN_HEADER] + more).encode()
