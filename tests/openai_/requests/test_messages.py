"""Messages of clients: read as they are meant, refused with the place of the fault, handed on to templates."""

from __future__ import annotations

from typing import Any

import pytest

from slime_openai.errors import InvalidRequest
from slime_openai.requests.content import has_media
from slime_openai.requests.messages import Message, ToolCall, for_template, read_messages

CALL: dict[str, Any] = {
    "id": "call_1",
    "type": "function",
    "function": {"name": "find", "arguments": '{"q":"x"}'},
}


def read_one(**message: Any) -> Message:
    (read,) = read_messages([message])
    return read


def refusal(*messages: Any) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as raised:
        read_messages(list(messages))
    return raised.value


def test_a_conversation_of_all_roles_is_read() -> None:
    assert read_messages(
        [
            {"role": "system", "content": "Be brief."},
            {"role": "developer", "content": "In English."},
            {"role": "user", "content": "Find x.", "name": "ann"},
            {"role": "assistant", "content": None, "reasoning_content": "Hm.", "tool_calls": [CALL]},
            {"role": "tool", "content": "found", "tool_call_id": "call_1"},
            {"role": "function", "content": "found", "name": "find"},
        ]
    ) == (
        Message("system", "Be brief."),
        Message("developer", "In English."),
        Message("user", "Find x.", name="ann"),
        Message("assistant", None, (ToolCall("find", '{"q":"x"}', "call_1"),), reasoning="Hm."),
        Message("tool", "found", tool_call_id="call_1"),
        Message("function", "found", name="find"),
    )


def test_parts_are_joined_with_nothing_between() -> None:
    parts = [
        {"type": "text", "text": "a "},
        {"type": "refusal", "refusal": "b"},
        {"type": "text", "text": "", "cache_control": {}},
    ]
    assert read_one(role="assistant", content=parts) == Message("assistant", "a b")
    assert read_one(role="user", content=[]) == Message("user", "")


def test_an_answer_comes_back_as_sdks_dump_it() -> None:
    dumped = {
        "role": "assistant",
        "content": None,
        "refusal": None,
        "annotations": [],
        "audio": None,
        "function_call": None,
        "parsed": {"any": 1},
        "tool_calls": [{**CALL, "index": 0, "function": {**CALL["function"], "parsed_arguments": {}}}],
    }
    assert read_one(**dumped) == read_one(role="assistant", tool_calls=[CALL])


@pytest.mark.parametrize("role", ["assistant", "tool", "function"])
@pytest.mark.parametrize("message", [{}, {"content": None}])
def test_roles_that_may_be_silent_need_no_content(role: str, message: dict[str, Any]) -> None:
    assert read_one(role=role, **message) == Message(role, None)


@pytest.mark.parametrize("key", ["reasoning", "reasoning_content"])
def test_reasoning_is_read_under_both_names(key: str) -> None:
    assert read_one(role="assistant", content="a", **{key: "r"}).reasoning == "r"


def test_equal_reasoning_under_both_names_is_no_contradiction() -> None:
    assert read_one(role="assistant", reasoning="r", reasoning_content="r").reasoning == "r"
    assert refusal({"role": "assistant", "reasoning": "r", "reasoning_content": "s"}).param == (
        "messages.[0].reasoning"
    )


def test_a_refusal_is_what_the_assistant_said() -> None:
    assert read_one(role="assistant", content="", refusal="No.") == Message("assistant", "No.")
    assert refusal({"role": "assistant", "content": "Yes.", "refusal": "No."}).param == "messages.[0].refusal"


def test_arguments_that_are_an_object_become_their_json() -> None:
    call = {"function": {"name": "find", "arguments": {"q": "é"}}}
    assert read_one(role="assistant", tool_calls=[call]).tool_calls == (ToolCall("find", '{"q":"é"}'),)


def test_arguments_that_are_no_json_are_kept() -> None:
    call = {"type": "function", "function": {"name": "find", "arguments": "{q: x"}}
    (message,) = read_messages([{"role": "assistant", "tool_calls": [call]}])
    assert message.tool_calls == (ToolCall("find", "{q: x"),)
    assert for_template(message)["tool_calls"][0]["function"]["arguments"] == "{q: x"


def call_with(**function: Any) -> dict[str, Any]:
    return {"role": "assistant", "tool_calls": [{"type": "function", "function": function}]}


@pytest.mark.parametrize(
    ("message", "param", "words"),
    [
        ("hello", "", "wanted a message, which is an object, got 'hello'"),
        (
            {"content": "x"},
            ".role",
            "wanted one of assistant, developer, function, system, tool, user, got null",
        ),
        ({"role": "User", "content": "x"}, ".role", "got 'User'"),
        ({"role": ["user"], "content": "x"}, ".role", "got a list of length 1"),
        ({"role": "user"}, ".content", "wanted a string or a list of content parts, got null"),
        ({"role": "system", "content": None}, ".content", "got null"),
        ({"role": "user", "content": 5}, ".content", "got 5"),
        ({"role": "user", "content": True}, ".content", "got true"),
        ({"role": "assistant", "content": {}}, ".content", "got an object"),
        ({"role": "user", "content": ["x"]}, ".content.[0]", "wanted a content part, an object with a type"),
        ({"role": "user", "content": [{"text": "x"}]}, ".content.[0]", "got an object"),
        ({"role": "user", "content": [{"type": "text"}]}, ".content.[0].text", "wanted a string, got null"),
        (
            {"role": "user", "content": [{"type": "thinking"}]},
            ".content.[0].type",
            "wanted one of text, refusal",
        ),
        ({"role": "user", "content": [{"type": "image_url"}]}, ".content.[0]", "'image_url' are no text"),
        ({"role": "user", "content": "x", "name": 1}, ".name", "wanted a string that is not empty, got 1"),
        ({"role": "user", "content": "x", "tool_calls": []}, ".tool_calls", "Unknown parameter"),
        ({"role": "user", "content": "x", "tool_call_id": "a"}, ".tool_call_id", "Unknown parameter"),
        ({"role": "assistant", "content": "x", "mood": "good"}, ".mood", "Unknown parameter"),
        (
            {"role": "assistant", "function_call": {"name": "f"}},
            ".function_call",
            "send 'tool_calls' instead",
        ),
        ({"role": "assistant", "audio": {"id": "a"}}, ".audio", "keeps no earlier audio"),
        ({"role": "assistant", "refusal": 1}, ".refusal", "wanted a string, got 1"),
        ({"role": "assistant", "reasoning_content": []}, ".reasoning_content", "got a list of length 0"),
        ({"role": "tool", "content": "x", "tool_call_id": 7}, ".tool_call_id", "wanted a string, got 7"),
        (
            {"role": "assistant", "tool_calls": {}},
            ".tool_calls",
            "wanted a list of tool calls, got an object",
        ),
        ({"role": "assistant", "tool_calls": ["f"]}, ".tool_calls.[0]", "wanted a tool call"),
        (
            {"role": "assistant", "tool_calls": [{"type": "custom"}]},
            ".tool_calls.[0].type",
            "only calls of type",
        ),
        ({"role": "assistant", "tool_calls": [{}]}, ".tool_calls.[0].function", "wanted an object, got null"),
        (
            {"role": "assistant", "tool_calls": [{**CALL, "id": 1}]},
            ".tool_calls.[0].id",
            "wanted a string, got 1",
        ),
        ({"role": "user", "content": [{"type": ["text"]}]}, ".content.[0]", "got an object"),
        ({"role": "assistant", "tool_calls": [{"function": "f"}]}, ".tool_calls.[0].function", "got 'f'"),
        (call_with(arguments="{}"), ".tool_calls.[0].function.name", "not empty, got null"),
        (call_with(name="f"), ".tool_calls.[0].function.arguments", "Missing required parameter"),
        (call_with(name="f", arguments=[]), ".tool_calls.[0].function.arguments", "wanted a string of JSON"),
    ],
)
def test_a_refusal_names_the_place_and_what_came(message: Any, param: str, words: str) -> None:
    error = refusal({"role": "user", "content": "fine"}, message)
    assert error.param == "messages.[1]" + param
    assert words in str(error)
    assert f"'{error.param}'" in str(error)


@pytest.mark.parametrize("value", [None, "hello", {}, [], 3])
def test_messages_are_a_list_with_something_in_it(value: Any) -> None:
    with pytest.raises(InvalidRequest, match="list of messages that is not empty") as raised:
        read_messages(value)
    assert raised.value.param == "messages"


def test_arguments_nested_beyond_measure_are_refused() -> None:
    deep: dict[str, Any] = {}
    for _ in range(300):
        deep = {"a": deep}
    error = refusal(call_with(name="f", arguments=deep))
    assert error.param == "messages.[0].tool_calls.[0].function.arguments"


def test_a_template_gets_strings_objects_and_roles_it_knows() -> None:
    messages = read_messages(
        [
            {"role": "developer", "content": "Be brief."},
            {"role": "assistant", "content": None, "reasoning": "Hm.", "tool_calls": [CALL]},
            {"role": "function", "content": None, "name": "find"},
            {"role": "tool", "content": [{"type": "text", "text": "y"}], "tool_call_id": "call_1"},
        ]
    )
    assert [for_template(message) for message in messages] == [
        {"role": "system", "content": "Be brief."},
        {
            "role": "assistant",
            "content": "",
            "reasoning_content": "Hm.",
            "tool_calls": [
                {"id": "call_1", "type": "function", "function": {"name": "find", "arguments": {"q": "x"}}}
            ],
        },
        {"role": "tool", "content": "", "name": "find"},
        {"role": "tool", "content": "y", "tool_call_id": "call_1"},
    ]


@pytest.mark.parametrize("arguments", ["[1]", '"{}"', "null", ""])
def test_a_template_gets_arguments_that_are_no_object_as_they_are(arguments: str) -> None:
    rendered = for_template(Message("assistant", None, (ToolCall("f", arguments),)))
    assert rendered["tool_calls"] == [{"type": "function", "function": {"name": "f", "arguments": arguments}}]


@pytest.mark.parametrize("kind", ["image_url", "input_audio", "video_url", "file"])
def test_media_are_found_in_any_message(kind: str) -> None:
    text = {"type": "text", "text": "look"}
    assert has_media([{"role": "user", "content": "x"}, {"role": "tool", "content": [text, {"type": kind}]}])
    assert not has_media([{"role": "user", "content": [text]}, {"role": "user", "content": kind}])


@pytest.mark.parametrize(
    "messages", [None, 1, "image_url", {}, [None], [{"content": [1, {"type": ["image_url"]}]}]]
)
def test_invalid_conversation_has_no_media(messages: Any) -> None:
    assert not has_media(messages)
