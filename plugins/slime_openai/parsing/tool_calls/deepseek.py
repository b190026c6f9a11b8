"""``<｜tool▁calls▁begin｜>``: DeepSeek's two formats. In both, calls stand between tags, within a section of calls.

- DeepSeek-V3 and R1: ``function<｜tool▁sep｜>name``, and the arguments in a fenced block of ``json``.
- DeepSeek-V3.1: ``name<｜tool▁sep｜>{...}``.

Sources: the chat templates of deepseek-ai/DeepSeek-V3-0324 and deepseek-ai/DeepSeek-V3.1.
"""

from __future__ import annotations

from slime_openai.parsing.deltas import Writer
from slime_openai.parsing.source import SPACE, Reading, Source
from slime_openai.parsing.tool_calls.calls import NAME, arguments, read_tagged, settle

__all__ = ["read_v3", "read_v31"]

_SECTION, _SECTION_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
_START, _END = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
_SEPARATOR = "<｜tool▁sep｜>"


def read_v3(source: Source, writer: Writer) -> Reading[None]:
    """Read content and calls."""
    yield from read_tagged(source, writer, (_SECTION, _START), _calls_v3)


def read_v31(source: Source, writer: Writer) -> Reading[None]:
    """Read content and calls."""
    yield from read_tagged(source, writer, (_SECTION, _START), _calls_v31)


def _calls_v3(source: Source, writer: Writer, tag: str) -> Reading[None]:
    yield from _calls(source, writer, tag, fenced=True)


def _calls_v31(source: Source, writer: Writer, tag: str) -> Reading[None]:
    yield from _calls(source, writer, tag, fenced=False)


def _calls(source: Source, writer: Writer, tag: str, *, fenced: bool) -> Reading[None]:
    if tag == _SECTION:
        yield from source.spaced(_START)
    yield from _call(source, writer, fenced)
    while (yield from source.attempt(_another(source, writer, fenced))):
        pass
    yield from source.attempt(source.spaced(_SECTION_END))
    settle(source, writer, writer.behind_call)


def _another(source: Source, writer: Writer, fenced: bool) -> Reading[None]:
    yield from source.spaced(_START)
    yield from _call(source, writer, fenced)


def _call(source: Source, writer: Writer, fenced: bool) -> Reading[None]:
    if fenced:
        yield from source.spaced("function")
        yield from source.spaced(_SEPARATOR)
    name = yield from source.run(NAME)
    yield from source.spaced("```json" if fenced else _SEPARATOR)
    yield from source.run(SPACE)
    known = yield from arguments(source, writer, name, _END)
    if fenced:
        yield from source.attempt(source.spaced("```"))
    yield from source.attempt(source.spaced(_END))
    settle(source, writer, known)
