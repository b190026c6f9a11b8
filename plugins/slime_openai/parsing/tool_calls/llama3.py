"""``{"name": ..., "parameters": {...}}`` at the beginning of the answer: Llama 3.1, 3.2 and 3.3.

``<|python_tag|>`` may come before a call. Several calls are separated by ``;`` (SGLang's ``Llama32Detector``) or white
space. A brace is content unless it is at the beginning of the answer, behind the tag, or behind another call. Other
text behind the tag is content, too, such as ``brave_search.call(query="...")`` or Python code. Source: the chat
template of meta-llama/Llama-3.1-8B-Instruct.
"""

from __future__ import annotations

from slime_openai.parsing.deltas import Writer
from slime_openai.parsing.source import SPACE, Reading, Source
from slime_openai.parsing.tool_calls.calls import call_object, read_tagged, settle

__all__ = ["read"]


def read(source: Source, writer: Writer) -> Reading[None]:
    """Read content and calls."""
    yield from source.attempt(_calls(source, writer))
    yield from read_tagged(source, writer, ("<|python_tag|>",), _calls)


def _calls(source: Source, writer: Writer, tag: str = "") -> Reading[None]:
    yield from _call(source, writer)
    while (yield from source.attempt(_next(source, writer))):
        pass


def _next(source: Source, writer: Writer) -> Reading[None]:
    yield from source.run(SPACE)
    yield from source.attempt(source.expect(";"))
    yield from _call(source, writer)


def _call(source: Source, writer: Writer) -> Reading[None]:
    yield from source.run(SPACE)
    begin = source.offset
    # Fail early: a JSON answer that is no call should be streamed, not held back.
    yield from source.expect("{")
    yield from source.spaced('"name"', '"type"')
    source.back(begin)
    settle(source, writer, (yield from call_object(source, writer)))
