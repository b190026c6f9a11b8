"""Tools: which may be called, and the JSON that a forced call has to be."""

from __future__ import annotations

import json
from typing import Any

import pytest

from slime_openai.errors import InvalidRequest
from slime_openai.requests.tools import Tools, calls_schema, choose, read_tool_choice, read_tools


def tool(name: Any = "find", **function: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **function}}


def forced(*tools: dict[str, Any], several: bool = True, name: str | None = None) -> Any:
    return json.loads(
        calls_schema(choose(read_tools("tools", list(tools)), "required", name), several=several)
    )


def test_tools_are_kept_to_the_last_key_for_the_template() -> None:
    tools = [tool(description="d", strict=True, parameters={"type": "object"}, note=1), tool("other")]
    assert read_tools("tools", tools) == tuple(tools)


@pytest.mark.parametrize(
    ("value", "param", "words"),
    [
        ({}, "tools", "wanted a list of tools, got an object"),
        ([3], "tools.[0]", "wanted an object, got 3"),
        ([tool(), {}], "tools.[1].type", "only tools of type 'function'"),
        ([{"type": "custom"}], "tools.[0].type", "only tools of type 'function'"),
        ([{"type": "function"}], "tools.[0].function", "wanted an object, got null"),
        ([tool("")], "tools.[0].function.name", "wanted 1 to 64 of the characters"),
        ([tool(name=None)], "tools.[0].function.name", "got null"),
        ([tool("a b")], "tools.[0].function.name", "got 'a b'"),
        ([tool("find\n")], "tools.[0].function.name", "got 'find\\n'"),
        ([tool("x" * 65)], "tools.[0].function.name", "wanted 1 to 64"),
        ([tool(), tool()], "tools.[1].function.name", "got 'find' twice"),
        ([tool(parameters=[])], "tools.[0].function.parameters", "wanted an object, got a list of length 0"),
    ],
)
def test_invalid_tool_is_refused(value: Any, param: str, words: str) -> None:
    with pytest.raises(InvalidRequest) as raised:
        read_tools("tools", value)
    assert raised.value.param == param
    assert words in str(raised.value)


@pytest.mark.parametrize(
    ("value", "param", "words"),
    [
        ("any", "tool_choice", "wanted one of none, auto, required, got 'any'"),
        (["auto"], "tool_choice", "got a list of length 1"),
        ({"type": "allowed_tools"}, "tool_choice.type", "only 'function' can be chosen"),
        ({"type": "custom"}, "tool_choice.type", "only 'function' can be chosen"),
        ({"type": "function"}, "tool_choice.function", "wanted an object, got null"),
        ({"type": "function", "function": {}}, "tool_choice.function.name", "wanted the name of a tool"),
    ],
)
def test_invalid_tool_choice_is_refused(value: Any, param: str, words: str) -> None:
    with pytest.raises(InvalidRequest) as raised:
        read_tool_choice("tool_choice", value)
    assert raised.value.param == param
    assert words in str(raised.value)


def test_the_choice_decides_what_may_be_called() -> None:
    shown = (tool("a"), tool("b"))
    assert choose(shown, "auto", None) == Tools(shown, "auto", frozenset("ab"))
    assert choose(shown, "none", None) == Tools(shown, "none", frozenset())
    assert choose(shown, "required", None) == Tools(shown, "required", frozenset("ab"))
    assert choose(shown, *read_tool_choice("", {"type": "function", "function": {"name": "b"}})) == Tools(
        shown, "required", frozenset("b")
    )
    assert choose((), "auto", None) == Tools((), "none", frozenset())


def test_a_call_of_what_is_not_there_cannot_be_asked_for() -> None:
    with pytest.raises(InvalidRequest, match="there are no 'tools'") as none:
        choose((), "required", None)
    assert none.value.param == "tool_choice"
    with pytest.raises(InvalidRequest, match="the name of one of 'tools', got 'c'") as other:
        choose((tool("a"),), "required", "c")
    assert other.value.param == "tool_choice.function.name"


def test_a_forced_call_is_a_list_of_names_and_parameters() -> None:
    parameters = {"type": "object", "properties": {"q": {"type": "string"}}, "required": ["q"]}

    def call(name: str) -> dict[str, Any]:
        return {
            "type": "object",
            "properties": {
                "name": {"type": "string", "enum": [name]},
                "parameters": {"$ref": f"#/$defs/{name}"},
            },
            "required": ["name", "parameters"],
            "additionalProperties": False,
        }

    assert forced(tool("find", parameters=parameters), tool("stop")) == {
        "type": "array",
        "minItems": 1,
        "items": {"anyOf": [call("find"), call("stop")]},
        "$defs": {"find": parameters, "stop": {"type": "object", "properties": {}}},
    }


def test_single_call_and_single_name_make_one_schema() -> None:
    schema = forced(tool("a"), tool("b"), several=False, name="b")
    assert schema["maxItems"] == 1
    assert list(schema["$defs"]) == ["b"]
    assert len(schema["items"]["anyOf"]) == 1


def test_references_within_parameters_lead_to_the_same_tools_definitions() -> None:
    def parameters(kind: str) -> dict[str, Any]:
        return {
            "type": "object",
            "properties": {"p": {"$ref": "#/$defs/P"}, "again": {"title": "t", "$ref": "#"}},
            "$defs": {"P": {"type": kind}},
        }

    definitions = forced(
        tool("a", parameters=parameters("string")), tool("b", parameters=parameters("integer"))
    )["$defs"]
    for name, kind in (("a", "string"), ("b", "integer")):
        definition = definitions[name]
        assert definition["properties"]["p"] == {"$ref": f"#/$defs/{name}/$defs/P"}
        assert definition["properties"]["again"]["$ref"] == f"#/$defs/{name}"
        assert definition["$defs"]["P"] == {"type": kind}


def test_lookalike_of_a_reference_stays() -> None:
    parameters = {
        "description": 'e.g. {"$ref":"#/$defs/P"}',
        "properties": {"$ref": {"type": "string"}, 'x"$ref': {"const": "#"}},
        'y"$ref': "#",
        "$ref": "https://example.org/schema#",
    }
    assert forced(tool("a", parameters=parameters))["$defs"]["a"] == parameters


def test_parameters_nested_beyond_measure_are_refused_by_their_place() -> None:
    deep: dict[str, Any] = {}
    for _ in range(300):
        deep = {"properties": {"a": deep}}
    with pytest.raises(InvalidRequest) as raised:
        forced(tool("a"), tool("b", parameters=deep))
    assert raised.value.param == "tools.[1].function.parameters"
