"""Merges fields that only the prefill worker knows into the answer of the decode worker."""

from __future__ import annotations

import binascii
import re
from typing import Any

import orjson

from router_core.errors import WorkerBroke
from slime_sglang.answers import TOKEN_ARRAYS
from slime_sglang.documents import document_in
from slime_sglang.events import EventSplitter

__all__ = ["Prefilled"]

Meta = dict[str, Any]

#: The weight version as it stands in JSON. Inside a JSON string the quotes would be escaped.
_VERSION = re.compile(rb'"weight_version"\s*:\s*("[^"\\]*"|null)')
_SPANS = b'"weight_versions"'
_JOINED = ("input_token_logprobs", *TOKEN_ARRAYS)
_ARRAYS = tuple(f'"{name}":"'.encode() for name in TOKEN_ARRAYS)


class Prefilled:
    """The prefill worker's ``meta_info`` of each sequence, by index."""

    def __init__(self, metas: dict[int, Meta]) -> None:
        self._metas = metas
        told = (meta for meta in metas.values() if "weight_version" in meta)
        self._versions = {orjson.dumps(_first_version(meta)) for meta in told}

    @classmethod
    def whole(cls, body: bytes) -> Prefilled:
        """Read an unstreamed answer. An answer without ``meta_info`` has nothing to merge."""
        try:
            document = orjson.loads(body)
        except orjson.JSONDecodeError:
            return cls({})
        outputs = document if isinstance(document, list) else [document]
        return cls({index: _meta(output) for index, output in enumerate(outputs)})

    @classmethod
    def streamed(cls, body: bytes) -> Prefilled:
        """Read a stream that has ended. Raises WorkerBroke when it ended with an error."""
        metas: dict[int, Meta] = {}
        for data in EventSplitter().feed(body):
            output = document_in(data)
            if output is None:
                continue
            if "error" in output:
                raise WorkerBroke("the prefill worker ended its stream with an error", answered=True)
            metas.setdefault(_index(output), {}).update(_meta(output))
        return cls(metas)

    def adds_to(self, beginning: bytes) -> bool:
        """Return True when fields must be merged into an answer. ``beginning``: the answer or its first piece."""
        if any(name in meta for meta in self._metas.values() for name in _JOINED):
            return True
        if any(name in beginning for name in _ARRAYS):
            return True
        if not self._versions:
            return False
        told = set(_VERSION.findall(beginning))
        return len(told) != 1 or told != self._versions or _SPANS in beginning

    def adds_to_stream(self, first: bytes, *, asks_rows: bool = False) -> bool:
        """Return True when fields must be merged into a stream. ``first``: its first piece.

        ``asks_rows``: the request asks for arrays, which come in the last events. In a stream of several sequences,
        later sequences may begin after an update of the weights.
        """
        return asks_rows or (len(self._metas) > 1 and bool(self._versions)) or self.adds_to(first)

    def merge(self, body: bytes) -> bytes:
        """Return ``body``, the decode worker's whole answer, with the merged fields. Raises WorkerBroke."""
        try:
            document = orjson.loads(body)
        except orjson.JSONDecodeError as error:
            raise WorkerBroke(f"the decode worker's answer is not JSON: {error}", answered=True) from None
        for index, output in enumerate(document if isinstance(document, list) else [document]):
            self._complete(index, output)
        return orjson.dumps(document)

    def merge_event(self, data: bytes) -> bytes:
        """Return ``data``, the data of one event, with the merged fields. Raises WorkerBroke."""
        output = document_in(data)
        if output is None:
            return data
        self._complete(_index(output), output)
        return orjson.dumps(output)

    def _complete(self, index: int, output: Any) -> None:
        meta, before = _meta(output), self._metas.get(index, {})
        logprobs = before.get("input_token_logprobs")
        if isinstance(logprobs, list) and isinstance(meta.get("input_token_logprobs"), list):
            meta["input_token_logprobs"] = [*logprobs, *meta["input_token_logprobs"]]
        for name in TOKEN_ARRAYS:
            if isinstance(meta.get(name), str):
                first = before.get(name)
                if isinstance(first, str) and _fit(first, before, meta[name], meta, f"{name}_start_len"):
                    meta[name] = _overlaid(first, meta[name])
                else:
                    del meta[name]  # the decode worker does not know the rows of the prompt
        if "weight_version" in before:
            _tell_first_version(meta, _first_version(before))


def _meta(output: Any) -> Meta:
    meta = output.get("meta_info") if isinstance(output, dict) else None
    return meta if isinstance(meta, dict) else {}


def _index(output: dict[str, Any]) -> int:
    index = output.get("index")
    return index if isinstance(index, int) else 0


def _fit(first: str, before: Meta, second: str, meta: Meta, start: str) -> bool:
    """Return False if ``first`` and ``second`` have rows of different sizes, or do not begin at the same token.

    Also return False if their prompts have different lengths. ``start``: the name of the field with the place in the
    prompt at which the rows begin. Return True if the metas lack the figures to decide this.
    """
    names = ("prompt_tokens", "completion_tokens", start)
    told: list[list[Any]] = [
        [one.get(name, 0 if name == start else None) for name in names] for one in (before, meta)
    ]
    if not all(type(figure) is int for figures in told for figure in figures):
        return True
    (sent, sampled, begin), (same, more, place) = told
    rows = sent + sampled - 1 - begin, same + more - 1 - place
    return (sent, begin) == (same, place) and _bytes_in(first) * rows[1] == _bytes_in(second) * rows[0]


def _bytes_in(text: str) -> int:
    return len(text) // 4 * 3 - text[-2:].count("=")


def _overlaid(first: str, second: str) -> str:
    """Return the bytes of ``first``, and then those of ``second`` beyond the length of ``first``. Raises WorkerBroke.

    Arguments and result are base64. Only the four characters at the seam are decoded: routed experts may take 80 MB.
    """
    if len(second) < len(first):
        return first
    seam = (len(first) - 1) // 4 * 4 if first else 0
    try:
        head, tail = (binascii.a2b_base64(each[seam : seam + 4]) for each in (first, second))
    except ValueError:
        raise WorkerBroke("routed_experts are not base64", answered=True) from None
    quantum = binascii.b2a_base64(head + tail[len(head) :], newline=False).decode("ascii")
    return "".join((first[:seam], quantum, second[seam + 4 :]))


def _first_version(meta: Meta) -> object:
    """Return the version of the weights that sampled the first token. Later tokens may have another version."""
    spans = meta.get("weight_versions")
    first = spans[0] if isinstance(spans, list) and spans else None
    return first["version"] if isinstance(first, dict) and "version" in first else meta["weight_version"]


def _tell_first_version(meta: Meta, version: object) -> None:
    """Note in ``meta`` that the first token has ``version``, the prefill worker's, if ``meta`` names another version.

    ``weight_versions``, a list of spans, is SGLang's field for weights that change within a request.
    """
    count = meta.get("completion_tokens")
    if not isinstance(count, int) or count < 1:
        return
    spans = meta.get("weight_versions") or [{"version": meta.get("weight_version"), "start": 0, "end": count}]
    try:
        begin, *rest = spans
        if begin["version"] == version:
            return
        if begin["end"] > 1:
            rest = [{**begin, "start": 1}, *rest]
    except (TypeError, KeyError, ValueError):
        rest = []  # an unknown form: spans that do not cover all tokens show readers the error
    meta["weight_versions"] = [{"version": version, "start": 0, "end": 1}, *rest]
