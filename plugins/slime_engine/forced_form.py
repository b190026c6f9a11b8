"""The grammar that a chat requests by OpenAI's ``response_format`` and ``tool_choice``."""

from __future__ import annotations

from typing import Any

import orjson

from slime_engine.errors import BadRequest
from slime_engine.fields import JSONObject

__all__ = ["forced_form"]

_NO_PARAMETERS: dict[str, Any] = {"type": "object", "properties": {}}


def forced_form(body: JSONObject) -> dict[str, str]:
    """Return the sampling parameter ``json_schema`` that constrains the answer, or ``{}``. Raises BadRequest.

    If ``tool_choice`` forces a call, the answer is a list of calls, ``[{"name": ..., "parameters": {...}}]``, as in
    SGLang (``get_json_schema_constraint``). Then ``response_format`` has no effect.
    """
    schema = _forced_call(body) or _response_format(body.get("response_format"))
    try:
        return {} if schema is None else {"json_schema": orjson.dumps(schema).decode()}
    except orjson.JSONEncodeError as error:  # orjson writes fewer nested levels than it reads
        raise BadRequest(f"The schema cannot be written as JSON: {error}.") from None


def _response_format(wanted: Any) -> dict[str, Any] | None:
    if wanted is None:
        return None
    kind = wanted.get("type") if isinstance(wanted, dict) else None
    if kind == "text":
        return None
    if kind == "json_object":
        return {"type": "object"}
    described = wanted.get("json_schema") if isinstance(wanted, dict) and kind == "json_schema" else None
    schema = described.get("schema") if isinstance(described, dict) else None
    if not isinstance(schema, dict):
        raise BadRequest(
            'response_format must be {"type": "text"}, {"type": "json_object"} or'
            ' {"type": "json_schema", "json_schema": {"name": ..., "schema": {...}}}.'
        )
    return schema


def _forced_call(body: JSONObject) -> dict[str, Any] | None:
    choice = body.get("tool_choice")
    if choice in (None, "auto", "none"):
        return None
    named = choice.get("function") if isinstance(choice, dict) else None
    name = named.get("name") if isinstance(named, dict) else None
    if choice != "required" and not isinstance(name, str):
        raise BadRequest(
            'tool_choice must be "none", "auto", "required" or'
            f' {{"type": "function", "function": {{"name": ...}}}}, got {choice!r}.'
        )
    tools = body.get("tools")
    functions = [_function(tool) for tool in tools] if isinstance(tools, list) else []
    functions = [function for function in functions if name in (None, function["name"])]
    if not functions:
        raise BadRequest("tool_choice forces a call, but tools has no tool that may be called.")
    return _calls(functions, several=name is None and body.get("parallel_tool_calls") is not False)


def _function(tool: object) -> dict[str, Any]:
    function = tool.get("function") if isinstance(tool, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise BadRequest('tools must be a list of {"type": "function", "function": {"name": ...}}.')
    parameters = function.get("parameters") or {}
    if not isinstance(parameters, dict) or not isinstance(parameters.get("$defs", {}), dict):
        raise BadRequest(
            f"The parameters of {function['name']!r} must be a JSON schema, and its $defs an object."
        )
    return function


def _calls(functions: list[dict[str, Any]], *, several: bool) -> dict[str, Any]:
    definitions: dict[str, Any] = {}
    calls = []
    for function in functions:
        parameters = dict(function.get("parameters") or _NO_PARAMETERS)
        for name, definition in parameters.pop("$defs", {}).items():
            if definitions.setdefault(name, definition) != definition:
                raise BadRequest(f"Tools have conflicting definitions of {name!r} in their $defs.")
        named = {"type": "string", "enum": [function["name"]]}
        calls.append(
            {
                "type": "object",
                "properties": {"name": named, "parameters": parameters},
                "required": ["name", "parameters"],
                "additionalProperties": False,
            }
        )
    limit = {} if several else {"maxItems": 1}
    schema = {"type": "array", "minItems": 1, **limit, "items": {"anyOf": calls}}
    return schema | ({"$defs": definitions} if definitions else {})
