"""Conversations are one, whatever clients did to their messages."""

from __future__ import annotations

import json
from typing import Any

import jinja2
import pytest

from slime_openai.prompts.identity import beginning, next_key
from slime_openai.prompts.template_traits import STRICT, TemplateTraits, Trim, probe
from slime_openai.requests.call_arguments import as_object, as_written, canonical
from slime_openai.requests.messages import Message, ToolCall, read_messages

START = beginning(None, {})
CALLED = Message(
    "assistant",
    tool_calls=(
        ToolCall("weather", '{"days":2,  "city": "Z\\u00fcrich"}', "call_1"),
        ToolCall("clock", "{}", "call_2"),
    ),
)
#: As smolagents has them: its objects, printed.
WRITTEN: list[Any] = [
    {
        "id": "call_1",
        "type": "function",
        "function": {"name": "weather", "arguments": {"city": "Zürich", "days": 2}},
    },
    {"id": "call_2", "type": "function", "function": {"name": "clock", "arguments": {}}},
]


def said(content: str) -> bytes:
    """The key of an assistant's message with this text."""
    (message,) = read_messages([{"role": "assistant", "content": [{"type": "text", "text": content}]}])
    return next_key(START, message, STRICT)


def test_calls_may_be_written_into_the_text() -> None:
    called = next_key(START, CALLED, STRICT)
    assert said(f"Calling tools:\n{WRITTEN}") == called
    assert said(f"\nCalling tools:\n{WRITTEN}\n") == called  # behind the empty content of a stream
    assert said(f"Calling tools:\n{WRITTEN[:1]}") != called
    assert said(f"Calling tools:\n{WRITTEN[::-1]}") != called
    assert said(f"No.\nCalling tools:\n{WRITTEN}") != called


def test_text_before_written_calls_is_content() -> None:
    message = Message("assistant", "Let me see.", CALLED.tool_calls)
    assert said(f"Let me see.\nCalling tools:\n{WRITTEN}") == next_key(START, message, STRICT)


def test_invalid_list_of_calls_is_text() -> None:
    texts = [
        "Calling tools:\n",
        "Calling tools:\nnone",
        "Calling tools:\n[1]",
        "Calling tools:\n[{'function': {'name': 'f'}}]",
        "Calling tools:\n[{'function': {'name': 'f', 'arguments': {1, 2}}}]",
        "Calling tools:\n[__import__('os')]",
        "Calling tools:\n\0",
        "Calling tools:\n[{'function': {'name': 1, 'arguments': {}}}]",
        "Calling tools:\n[{'function': {'name': 'f', 'arguments': {1: 2}}}]",
        "Calling tools:\n" + "[" * 5000,
    ]
    assert (
        len({said(text) for text in texts} | {next_key(START, Message("assistant", ""), STRICT)})
        == len(texts) + 1
    )


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ('{"a": 18446744073709551616}', '{"a": 18446744073709551617}'),
        ('{"a": 0.12345678901234567890}', '{"a": 0.12345678901234567891}'),
        ('{"a": 1e400}', '{"a": 1e401}'),
        ('{"a": 1e99999999999999999999}', '{"a": 1e99999999999999999998}'),
        ('{"a": 1, "a": 2}', '{"a": 2}'),
        ('{"a": 1, "a": 2}', '{"a": 2, "a": 1}'),
        ('{"a": {"b": 1, "b": 2}}', '{"a": {"b": 2}}'),
        ('{"a": 1}', '{"a": 1.0}'),
        ('{"a": 1}', '{"a": true}'),
        ('{"a": 0.0}', '{"a": -0.0}'),
        ('{"a": NaN}', '{"a": null}'),
        ('{"a": "\\ud800"}', '{"a": "\\ud801"}'),
        (f'{{"a": 1{"0" * 5000}}}', f'{{"a": 2{"0" * 5000}}}'),
        ("{" * 3000, "{" * 3001),
        ('{"a": ', '{"a":'),
    ],
)
def test_arguments_that_differ_in_anything_are_others(one: str, other: str) -> None:
    for sort in (False, True):
        assert canonical(one, sort=sort) == canonical(one, sort=sort)
        assert canonical(one, sort=sort) != canonical(other, sort=sort)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ('{"a":[1,{"b":"ü"}]}', ' { "a" : [ 1 , { "b" : "\\u00fc" } ] } '),
        ('{"a": 1.10}', '{"a": 1.1}'),
        ('{"a": 1e3}', '{"a": 1000.0}'),
    ],
)
def test_arguments_that_clients_write_anew_are_the_same(one: str, other: str) -> None:
    assert canonical(one, sort=False) == canonical(other, sort=False)


def test_the_order_of_keys_counts_unless_the_template_sorts_them() -> None:
    one, other = '{"a": 1, "b": [2, 3]}', '{"b": [2, 3], "a": 1}'
    assert canonical(one, sort=False) != canonical(other, sort=False)
    assert canonical(one, sort=True) == canonical(other, sort=True)


@pytest.mark.parametrize(
    "arguments",
    [
        '{"a": 18446744073709551616}',
        '{"a": 0.12345678901234567890, "b": [1e400, "x"]}',
        '{"a": 1, "a": {"b": 1, "b": 2}, "a": 3}',
        f'{{"a": 1{"0" * 5000}}}',
    ],
)
@pytest.mark.parametrize("indent", [None, 1])
def test_a_template_writes_every_digit_and_key(arguments: str, indent: int | None) -> None:
    """As ``tojson`` does."""
    value = as_object(arguments)
    assert value is not None
    written = as_written(json.dumps(value, indent=indent))
    assert canonical(written, sort=False) == canonical(arguments, sort=False)


@pytest.mark.parametrize(
    "arguments", ["[1]", '"x"', "{", '{"a": "\\ud800"}', '{"a":' * 300 + "1" + "}" * 300]
)
def test_arguments_that_no_template_can_write_stay_text(arguments: str) -> None:
    assert as_object(arguments) is None


#: Changes of a content by a template, by name.
TRIMMING = {
    "m.content": Trim(),
    "m.content | trim": Trim(None, None),
    "m.content.lstrip()": Trim(None, ""),
    "m.content.rstrip('\\n')": Trim("", "\n"),
    "m.content.strip(' \\n')": Trim(" \n", " \n"),
    "m.content | trim if loop.first else m.content": Trim(),
    "m.content | replace('\\n', ' ')": Trim(),
    "m.content[1:] if m.content[:1] == '\\n' else m.content": Trim(),
}


@pytest.mark.parametrize("content", TRIMMING)
def test_a_template_is_asked_what_it_trims(content: str) -> None:
    source = f"{{% for m in messages %}}<{{{{ m.role }}}}>{{{{ {content} }}}}{{% endfor %}}"
    template = jinja2.Template(source, keep_trailing_newline=True)
    traits = probe(lambda messages, with_tools: str(template.render(messages=messages)))
    wanted = TRIMMING[content]
    assert traits.trims["user"] == wanted
    for white_space in (" ", "\n", "\t ", "\n\n", " \n"):
        for text in (f"{white_space}x", f"x{white_space}", white_space):
            message = {"role": "user", "content": text}
            trimmed = {"role": "user", "content": traits.content("user", text)}
            assert template.render(messages=[message]) == template.render(messages=[trimmed])


def test_a_template_is_asked_what_it_shows_of_results_and_calls() -> None:
    shows = (
        "{% for m in messages %}{{ m.name }}{{ m.tool_call_id }}{{ m.content }}{% for c in m.tool_calls %}"
    )
    for order, ends in (("", False), ("|dictsort", True)):
        source = f"{shows}{{{{ c.function.arguments{order} }}}}{{% endfor %}}{{% endfor %}}"
        template = jinja2.Template(source)
        traits = probe(lambda messages, with_tools, t=template: str(t.render(messages=messages)))  # type: ignore[misc]
        assert (traits.shows_tool_name, traits.shows_call_ids, traits.sorts_keys) == (True, True, ends)
    plain = jinja2.Template("{% for m in messages %}{{ m.content }}{% endfor %}")
    traits = probe(lambda messages, with_tools: str(plain.render(messages=messages)))
    assert not traits.shows_tool_name
    assert not traits.shows_call_ids
    assert probe(lambda messages, with_tools: None) == TemplateTraits(
        {role: Trim() for role in ("system", "tool", "user")}
    )
