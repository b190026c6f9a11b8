"""Answers for the tests of parsers: tools, calls as each format writes them, and a way to read them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import count, pairwise
from typing import Any

import orjson

from slime_openai.parsing.deltas import Delta, message
from slime_openai.parsing.parser import Parser
from slime_openai.parsing.reasoning import ReasoningFormat
from slime_openai.parsing.tool_calls import CALL_FORMATS, CallFormat
from slime_openai.requests.messages import Message
from slime_openai.requests.tools import Tool, Tools

__all__ = ["TOOLS", "WRITTEN", "Call", "calls_of", "cut", "feed", "read", "tools", "written"]

#: The name of a tool and the JSON of its arguments.
Call = tuple[str, str]


def tools(**schemas: dict[str, Any] | None) -> Tools:
    """Tools by name, with the schemas of their parameters."""
    shown: list[Tool] = []
    for name, schema in schemas.items():
        function: dict[str, Any] = {"name": name}
        shown.append({"type": "function", "function": function})
        if schema is not None:
            function["parameters"] = {"type": "object", "properties": schema}
    return Tools(tuple(shown), "auto", frozenset(schemas))


TOOLS = tools(
    search=None,
    store={
        "text": {"type": "string"},
        "count": {"type": "integer"},
        "share": {"type": "number"},
        "again": {"type": "boolean"},
        "items": {"type": "array"},
        "more": {"type": "object"},
        "limit": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
        "label": {"type": ["string", "null"]},
        "either": {"type": ["integer", "string"]},
        "odd": {"type": [3], "anyOf": 3},
    },
)


def _hermes(calls: Sequence[Call]) -> str:
    each = (
        f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'
        for name, arguments in calls
    )
    return "\n".join(each)


def _llama3(calls: Sequence[Call]) -> str:
    return "; ".join(f'{{"name": "{name}", "parameters": {arguments}}}' for name, arguments in calls)


def _mistral(calls: Sequence[Call]) -> str:
    each = (f'{{"name": "{name}", "arguments": {arguments}}}' for name, arguments in calls)
    return f"[TOOL_CALLS] [{', '.join(each)}]"


def _mistral_named(calls: Sequence[Call]) -> str:
    return "".join(f"[TOOL_CALLS]{name}[ARGS]{arguments}" for name, arguments in calls)


def _deepseek_v3(calls: Sequence[Call]) -> str:
    each = "\n".join(
        f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{arguments}\n```<｜tool▁call▁end｜>"
        for name, arguments in calls
    )
    return f"<｜tool▁calls▁begin｜>{each}<｜tool▁calls▁end｜>"


def _deepseek_v31(calls: Sequence[Call]) -> str:
    each = (
        f"<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{arguments}<｜tool▁call▁end｜>"
        for name, arguments in calls
    )
    return f"<｜tool▁calls▁begin｜>{''.join(each)}<｜tool▁calls▁end｜>"


def _qwen3_coder(calls: Sequence[Call]) -> str:
    return "\n".join(
        f"<tool_call>\n<function={name}>\n{_parameters(arguments)}</function>\n</tool_call>"
        for name, arguments in calls
    )


def _parameters(arguments: str) -> str:
    values = orjson.loads(arguments).items()
    return "".join(f"<parameter={key}>\n{_bare(value)}\n</parameter>\n" for key, value in values)


def _bare(value: object) -> str:
    return value if isinstance(value, str) else orjson.dumps(value).decode()


#: Calls as the chat templates of each family write them.
WRITTEN: dict[str, tuple[str, Callable[[Sequence[Call]], str]]] = {
    "hermes": ("hermes", _hermes),
    "llama3": ("llama3", _llama3),
    "mistral": ("mistral", _mistral),
    "mistral, named": ("mistral", _mistral_named),
    "deepseekv3": ("deepseekv3", _deepseek_v3),
    "deepseekv31": ("deepseekv31", _deepseek_v31),
    "qwen3_coder": ("qwen3_coder", _qwen3_coder),
}


def written(family: str, *calls: Call) -> str:
    """The text of ``calls``."""
    return WRITTEN[family][1](calls)


def cut(text: str, cuts: Iterable[int]) -> list[str]:
    """``text`` in pieces."""
    places = sorted({min(each, len(text)) for each in cuts} | {0, len(text)})
    return [text[begin:end] for begin, end in pairwise(places)]


def feed(parser: Parser, pieces: Iterable[str]) -> list[Delta]:
    """All deltas of an answer."""
    deltas = [delta for piece in pieces for delta in parser.feed(piece)]
    return deltas + parser.finish()


def read(
    family: str | CallFormat,
    *pieces: str,
    tools: Tools = TOOLS,
    parallel: bool = True,
    reasoning: ReasoningFormat | None = None,
    stop: Sequence[str] = (),
) -> list[Delta]:
    """The deltas of an answer in ``pieces``; its calls have the ids ``call_0``, ``call_1``, ..."""
    numbers = count()
    parser = Parser(
        reasoning=reasoning,
        calls=family if isinstance(family, CallFormat) else CALL_FORMATS[WRITTEN[family][0]],
        tools=tools,
        parallel=parallel,
        stop=stop,
        new_id=lambda: f"call_{next(numbers)}",
    )
    return feed(parser, pieces)


def calls_of(answer: Message | list[Delta]) -> list[Call]:
    """Names and arguments."""
    whole = message(answer) if isinstance(answer, list) else answer
    return [(call.name, call.arguments) for call in whole.tool_calls]
