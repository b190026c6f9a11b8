"""The tools of a request, the choice among them, and the JSON schema of forced calls."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Literal

from slime_openai.errors import InvalidRequest, UnsupportedParameter, wrong
from slime_openai.requests.fields import encoded, mapping, one_of

__all__ = ["Tool", "ToolChoice", "Tools", "calls_schema", "choose", "read_tool_choice", "read_tools"]

#: A tool with every key that the client sent, since the chat template may show all of them.
Tool = dict[str, Any]
ToolChoice = Literal["none", "auto", "required"]

_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")
_mode = one_of("none", "auto", "required")
#: A reference within its own document. The pattern matches no text in a JSON string, where quotes are escaped.
_LOCAL_REF = re.compile(r'(?<=[{,])"\$ref":"#')
_NO_PARAMETERS = '{"type":"object","properties":{}}'


@dataclass(frozen=True, slots=True)
class Tools:
    """Tools ``shown`` to the model, and the ``callable`` names. ``choice`` "required": the model must call a tool."""

    shown: tuple[Tool, ...] = ()
    choice: ToolChoice = "none"
    callable: frozenset[str] = frozenset()


def read_tools(param: str, value: Any) -> tuple[Tool, ...]:
    """Read function tools with unique names. Raises InvalidRequest."""
    if not isinstance(value, list):
        raise wrong(param, "a list of tools", value)
    names = set()
    for index, tool in enumerate(value):
        place = f"{param}.[{index}]"
        kind = mapping(place, tool).get("type")
        if kind != "function":
            raise UnsupportedParameter(f"{place}.type", "only tools of type 'function' can be called")
        function = mapping(f"{place}.function", tool.get("function"))
        name = function.get("name")
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise wrong(f"{place}.function.name", "1 to 64 of the characters a-z, A-Z, 0-9, _ and -", name)
        if name in names:
            raise InvalidRequest(
                f"{place}.function.name", f"Wanted tools with unique names, got {name!r} twice."
            )
        names.add(name)
        if function.get("parameters") is not None:
            mapping(f"{place}.function.parameters", function["parameters"])
    return tuple(value)


def read_tool_choice(param: str, value: Any) -> tuple[ToolChoice, str | None]:
    """Return the mode, and the name of the tool if one tool is chosen."""
    if not isinstance(value, dict):
        mode: ToolChoice = _mode(param, value)
        return mode, None
    if value.get("type") != "function":
        raise UnsupportedParameter(
            f"{param}.type",
            "only 'function' can be chosen; to limit the choice, send only the allowed tools",
        )
    name = mapping(f"{param}.function", value.get("function")).get("name")
    if not isinstance(name, str):
        raise wrong(f"{param}.function.name", "the name of a tool", name)
    return "required", name


def choose(shown: tuple[Tool, ...], mode: ToolChoice, name: str | None) -> Tools:
    """Combine tools and choice, which were read before. Raises InvalidRequest when the choice does not fit."""
    if not shown:
        if mode == "required":
            raise InvalidRequest("tool_choice", "'tool_choice' asks for a call, but there are no 'tools'.")
        return Tools()
    names = frozenset(tool["function"]["name"] for tool in shown)
    if name is not None and name not in names:
        raise wrong("tool_choice.function.name", "the name of one of 'tools'", name)
    if mode == "none":
        names = frozenset()
    return Tools(shown, mode, names if name is None else frozenset((name,)))


def calls_schema(tools: Tools, *, several: bool) -> str:
    """Return the JSON schema of a list with one call of a callable tool; with ``several``, of one or more such calls.

    The list has the form ``[{"name": ..., "parameters": {...}}, ...]``, as in SGLang's ``get_json_schema_constraint``
    (``function_call/utils.py``). Each tool's parameters become a definition, and references in the parameters point
    into this definition. So equal names in the ``$defs`` of two tools do not clash.
    """
    calls, definitions = [], []
    for index, tool in enumerate(tools.shown):
        function = tool["function"]
        name = function["name"]
        if name not in tools.callable:
            continue
        place = f"tools.[{index}].function.parameters"
        given = function.get("parameters")
        schema = _NO_PARAMETERS if given is None else encoded(place, given)
        definition = _LOCAL_REF.sub(f'"$ref":"#/$defs/{name}', schema)
        definitions.append(f'"{name}":{definition}')
        calls.append(
            f'{{"type":"object","properties":{{"name":{{"type":"string","enum":["{name}"]}},'
            f'"parameters":{{"$ref":"#/$defs/{name}"}}}},"required":["name","parameters"],'
            '"additionalProperties":false}'
        )
    limit = "" if several else '"maxItems":1,'
    return (
        f'{{"type":"array","minItems":1,{limit}"items":{{"anyOf":[{",".join(calls)}]}},'
        f'"$defs":{{{",".join(definitions)}}}}}'
    )
