"""``<tool_call><function=name><parameter=key>value</parameter></function></tool_call>``: Qwen3-Coder, Qwen3.5.

Sources: the chat template of Qwen/Qwen3-Coder-30B-A3B-Instruct, and the parser in the same repository
(``qwen3coder_tool_parser.py``). Values are text. The tool's schema says which values are JSON. The word null is JSON's
null. One newline at each end of a value belongs to the format. If ``</parameter>`` is missing, ``<parameter=`` or
``</function>`` ends the value. ``<tool_call>`` may be missing, too.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from slime_openai.parsing.deltas import Writer
from slime_openai.parsing.source import Malformed, Reading, Source
from slime_openai.parsing.tool_calls.calls import NAME, read_tagged, settle
from slime_openai.parsing.tool_calls.values import Value, dumps

__all__ = ["read"]

_START, _END = "<tool_call>", "</tool_call>"
_FUNCTION, _FUNCTION_END = "<function=", "</function>"
_PARAMETER, _PARAMETER_END = "<parameter=", "</parameter>"
_VALUE_ENDS = (_PARAMETER_END, _PARAMETER, _FUNCTION_END)
_KEY = re.compile(r"[^<>\n]*")


def read(source: Source, writer: Writer) -> Reading[None]:
    """Read content and calls."""
    yield from read_tagged(source, writer, (_START, _FUNCTION), _call)


def _call(source: Source, writer: Writer, tag: str) -> Reading[None]:
    if tag == _START:
        yield from source.spaced(_FUNCTION)
    name = yield from source.run(NAME)
    yield from source.expect(">")
    key = yield from _key(source)
    known = writer.start(name)
    if known:
        yield from _arguments(source, writer, key, writer.tools[name])
    else:
        yield from source.attempt(_skipped(source, key))
    yield from source.attempt(source.spaced(_END))
    settle(source, writer, known)


def _key(source: Source) -> Reading[str | None]:
    """Read and return the key of the next parameter. Return None at the end of the function."""
    if (yield from source.spaced(_PARAMETER, _FUNCTION_END)) == _FUNCTION_END:
        return None
    key = yield from source.run(_KEY)
    if not key:
        raise Malformed
    yield from source.expect(">")
    yield from source.attempt(source.expect("\n"))
    return key


def _skipped(source: Source, key: str | None) -> Reading[None]:
    while key is not None:
        if (yield from source.pass_on(None, *_VALUE_ENDS)) == _PARAMETER_END:
            yield from source.expect(_PARAMETER_END)
        key = yield from _key(source)


def _arguments(source: Source, writer: Writer, key: str | None, schema: Mapping[str, Any]) -> Reading[None]:
    """Write the parameters as a JSON object. The object stays open if the text ends before ``</function>``."""
    properties = schema.get("properties")
    separator = "{"
    while key is not None:
        source.take()
        writer.arguments(f"{separator}{dumps(key)}: ")
        separator = ", "
        value = Value(writer.arguments, properties.get(key) if isinstance(properties, dict) else None)
        end = yield from source.pass_on(value.add, *_VALUE_ENDS)
        value.finish(cut=end is None)
        if end == _PARAMETER_END:
            yield from source.expect(end)
        source.take()
        try:
            key = yield from _key(source)
        except Malformed:
            source.back()
            if source.ended:
                return
            key = None
    writer.arguments("{}" if separator == "{" else "}")
