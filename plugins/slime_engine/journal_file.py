"""The journal as a file that outlives the engine: tokens are written before a client gets them.

The engine writes a JSON line when it takes a sequence, and another for each delta of that sequence. A delta has the
tokens sampled since the previous delta. All lines of a sequence have the same value in the field ``entry``. ``kill -9``
loses only tokens that no client got.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterable, Iterator
from contextlib import suppress
from types import TracebackType
from typing import Any

import orjson

from slime_engine.journal import JournalEntry
from slime_engine.sequence import TokenDelta

__all__ = ["JournalFile", "fold"]


class JournalFile:
    """Appends to the file at ``path``, which several engines may share, at the same time or one after the other."""

    def __init__(self, path: str) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        self._run = uuid.uuid4().hex
        self._write([b""])  # a newline: it ends the half line that a killed engine may have left

    def __enter__(self) -> JournalFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._file)

    def opened(self, entry: JournalEntry) -> None:
        """Write the first line of a sequence, which the engine has taken."""
        begun = {"rid": entry.rid, "input_ids": entry.input_ids.tolist(), "temperature": entry.temperature}
        self._write([orjson.dumps({"entry": self._name(entry)} | begun)])

    def sampled(self, deltas: Iterable[TokenDelta]) -> None:
        """Write the sampled tokens, and the finish reasons of sequences that end."""
        self._write([orjson.dumps(self._line(delta)) for delta in deltas])

    def _name(self, entry: JournalEntry) -> str:
        return f"{self._run}.{entry.index}"

    def _line(self, delta: TokenDelta) -> dict[str, Any]:
        begin = delta.completion_tokens - len(delta.token_ids)
        entry = delta.sequence.entry
        versions = [version for version, start, end in delta.spans for _ in range(max(start, begin), end)]
        return {
            "entry": self._name(entry),
            "output_ids": delta.token_ids,
            "output_logprobs": entry.output_logprobs[begin : delta.completion_tokens].tolist(),
            "output_versions": versions,
            "finish_reason": delta.finish_reason,
        }

    def _write(self, lines: list[bytes]) -> None:
        rest = memoryview(b"\n".join((*lines, b"")))
        while rest:
            rest = rest[os.write(self._file, rest) :]


def fold(lines: Iterable[bytes], into: dict[str, dict[str, Any]] | None = None) -> dict[str, dict[str, Any]]:
    """Return the entries in a file's lines, by the value of their field ``entry``.

    An entry is as in ``GET /journal``, but without ``index``, ``dp_rank`` and ``text``. ``into``: the result for
    earlier lines, which is updated and returned.
    """
    entries = {} if into is None else into
    for line in _whole(lines):
        entry = entries.setdefault(
            line.pop("entry"),
            {"output_ids": [], "output_logprobs": [], "output_versions": [], "finish_reason": None},
        )
        for key, value in line.items():
            if key.startswith("output_"):
                entry[key] += value
            else:
                entry[key] = value
        reason = entry["finish_reason"]
        entry["aborted"] = reason is not None and reason["type"] == "abort"
    return entries


def _whole(lines: Iterable[bytes]) -> Iterator[dict[str, Any]]:
    """Yield each whole line, parsed. The tokens of a partial line, cut by a kill, never went to a client."""
    for line in lines:
        with suppress(orjson.JSONDecodeError):
            yield orjson.loads(line)
