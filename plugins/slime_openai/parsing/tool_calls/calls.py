"""Grammars shared by several tool-call formats: tags that may begin a call, and calls written in JSON.

A call begins when its text has named a callable tool, and the JSON object of its arguments has begun. A JSON call
without arguments, or with its arguments before its name, begins at its closing brace. Until then the text is held back;
if it turns out to be no call, every character becomes content. A call that has begun stays a call. The arguments of a
call are streamed as the model writes them, even if they are broken or incomplete. Clients of OpenAI's API must expect
such arguments anyway.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import orjson

from slime_openai.parsing.deltas import Writer
from slime_openai.parsing.marks import held
from slime_openai.parsing.source import SPACE, Malformed, Reading, Source

__all__ = ["NAME", "arguments", "call_array", "call_object", "read_tagged", "settle"]

#: The name of a tool.
NAME = re.compile(r"[\w.-]*")
_ARGUMENTS = ("arguments", "parameters")
_PLAIN = re.compile(r'[^"\\]*')
_WORD = re.compile(r"[-+.\w]*")


def read_tagged(
    source: Source,
    writer: Writer,
    tags: tuple[str, ...],
    read_call: Callable[[Source, Writer, str], Reading[None]],
) -> Reading[None]:
    """Read content, with calls that begin with one of ``tags``. A tag that begins no call is content.

    ``read_call`` reads what follows the tag. It may raise Malformed only while it has not taken any text.
    """
    while tag := (yield from source.pass_on(writer.content, *tags)):
        yield from source.expect(tag)
        try:
            yield from read_call(source, writer, tag)
        except Malformed:
            source.back(len(tag))
            writer.content(source.take())


def settle(source: Source, writer: Writer, known: bool) -> None:
    """End a call. ``known``: the call was allowed, see :meth:`Writer.start`.

    The rest of an allowed call's text is markup, and is dropped. All text of any other call is content.
    """
    text = source.take()
    if not known:
        writer.content(text)


def arguments(source: Source, writer: Writer, name: str, *end: str) -> Reading[bool]:
    """Begin the call of ``name``, and stream its arguments: the JSON object that is next.

    Return False if this call is not allowed: the object is read, but not written. ``end``: tags of the format. Such a
    tag ends the object, even an unclosed one, unless it stands in a valid JSON string. Raises Malformed if no object
    begins here.
    """
    opening = yield from source.expect("{")
    opening += yield from source.run(SPACE)
    if (yield from source.peek()) not in '"}':
        raise Malformed
    known = writer.start(name)
    if known:
        source.take()
        writer.arguments(opening)
    yield from _rest_of_value(source, writer.arguments if known else None, end)
    return known


def call_object(source: Source, writer: Writer, *end: str) -> Reading[bool]:
    """Read ``{"name": ..., "arguments": {...}}``. The keys may have any order, and there may be other keys.

    ``arguments`` may be named ``parameters``. Return False as :func:`arguments` does. Raises Malformed for other text.
    """
    yield from source.expect("{")
    name, early = None, "{}"
    while True:
        key = yield from _key(source)
        if key == "name":
            name = yield from _string(source)
        elif key in _ARGUMENTS and name is not None:
            known = yield from arguments(source, writer, name, *end)
            yield from source.attempt(_rest_of_call(source))
            return known
        else:
            value = yield from _value(source)
            early = value if key in _ARGUMENTS else early
        if (yield from source.spaced(",", "}")) == "}":
            break
    if name is None or not isinstance(_parsed(early), dict):
        raise Malformed
    known = writer.start(name)
    if known:
        writer.arguments(early)
    return known


def call_array(source: Source, writer: Writer) -> Reading[None]:
    """Read ``[{"name": ..., "arguments": {...}}, ...]``. Raises Malformed if the first item is no call."""
    yield from source.expect("[")
    yield from _item(source, writer)
    while (yield from source.attempt(_item(source, writer, ","))):
        pass
    yield from source.attempt(source.spaced("]"))
    settle(source, writer, writer.behind_call)


def _item(source: Source, writer: Writer, *separator: str) -> Reading[None]:
    if separator:
        yield from source.spaced(*separator)
    yield from source.run(SPACE)
    settle(source, writer, (yield from call_object(source, writer)))


def _rest_of_call(source: Source) -> Reading[None]:
    while (yield from source.spaced(",", "}")) == ",":
        yield from _key(source)
        yield from _value(source)


def _key(source: Source) -> Reading[str]:
    yield from source.run(SPACE)
    key = yield from _string(source)
    yield from source.spaced(":")
    yield from source.run(SPACE)
    return key


def _string(source: Source) -> Reading[str]:
    begin = source.offset
    yield from source.expect('"')
    yield from source.run(_PLAIN)
    while (yield from source.expect('"', "\\")) == "\\":
        yield from source.peek()
        source.at += 1
        yield from source.run(_PLAIN)
    return str(_parsed(source.since(begin)))


def _value(source: Source) -> Reading[str]:
    """Read any JSON value, and return its text. Raises Malformed if it is invalid, or not closed."""
    begin = source.offset
    first = yield from source.peek()
    if first == '"':
        yield from _string(source)
    elif first in "{[":
        yield from source.expect(first)
        yield from _rest_of_value(source, None)
    else:
        yield from source.run(_WORD)
    text = source.since(begin)
    _parsed(text)
    return text


def _parsed(text: str) -> Any:
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError:
        raise Malformed from None


def _rest_of_value(
    source: Source, write: Callable[[str], object] | None, end: tuple[str, ...] = ()
) -> Reading[None]:
    """Read the rest of an object or a list, up to its closing bracket or one of ``end``.

    Only strings and brackets matter. A string with a raw control character is invalid JSON, and probably not closed.
    So ``end`` is recognised behind that character.
    """
    depth = 1
    quoted = torn = False
    while depth:
        bare = not quoted or torn
        waiting = 0 if source.ended or not bare else held(source.text, end, source.at)
        limit = len(source.text) - waiting
        found = _structure(quoted, torn, end).search(source.text, source.at, limit)
        token = found[0] if found else ""
        if found is None or (token == "\\" and not source.ended):
            source.at = found.start() if found else limit
            if write is not None:
                write(source.take())
            if source.ended:
                return
            yield
            continue
        if token in end:
            source.at = found.start()
            break
        source.at = found.end()
        if quoted:
            quoted = token != '"'
            torn = torn or token < " "
        elif token == '"':
            quoted, torn = True, False
        else:
            depth += 1 if token in "{[" else -1
    if write is not None:
        write(source.take())


@lru_cache
def _structure(quoted: bool, torn: bool, end: tuple[str, ...]) -> re.Pattern[str]:
    """Return a pattern of the characters and tags that matter within a string (``quoted``), or outside of strings.

    ``torn``: the string has a raw control character, so the tags in ``end`` count within it, too.
    """
    tags = [re.escape(tag) for tag in end] if torn or not quoted else []
    own = [r"\\.?", '"', r"[\x00-\x1f]"] if quoted else [r'["{}\[\]]']
    return re.compile("|".join(tags + own), re.DOTALL)
