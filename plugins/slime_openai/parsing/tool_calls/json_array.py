"""``[{"name": ..., "parameters": {...}}, ...]`` and nothing else: forced calls, in place of the model's own format.

With ``tool_choice`` "required" or a named tool, a JSON schema constrains the answer to this form (SGLang:
``JsonArrayParser``).
"""

from __future__ import annotations

from slime_openai.parsing.deltas import Writer
from slime_openai.parsing.source import SPACE, Reading, Source
from slime_openai.parsing.tool_calls.calls import call_array

__all__ = ["beginning", "read"]


def read(source: Source, writer: Writer) -> Reading[None]:
    """Read calls; any other text is content."""
    yield from source.attempt(_array(source, writer))
    yield from source.pass_on(writer.content)


def beginning(source: Source) -> Reading[None]:
    """Read the first characters of forced calls. Raises Malformed."""
    yield from source.spaced("[")
    yield from source.spaced("{")
    yield from source.spaced('"name"')


def _array(source: Source, writer: Writer) -> Reading[None]:
    yield from source.run(SPACE)
    yield from call_array(source, writer)
