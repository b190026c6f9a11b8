"""Chat templates of every habit, rendered."""

from __future__ import annotations

from typing import Any

import anyio
import jinja2
import pytest

from router_core.errors import SettingsError
from slime_openai.errors import InvalidRequest
from slime_openai.prompts.rendering import Conversation, Renderer

OBJECT = "{{ call.function.arguments | tojson }}"
TEXT = "{{ '' + call.function.arguments }}"
CALLS = "{% for call in m.tool_calls or [] %}<{{ call.function.name }}:ARGUMENTS>{% endfor %}"
ONLY_WITHOUT_CONTENT = "{% if m.content is none %}" + CALLS + "{% else %}{{ m.content }}{% endif %}"
ALWAYS = "{{ m.content or '' }}" + CALLS


class Templated:
    """A tokenizer that only knows a template."""

    def __init__(self, one_message: str | None) -> None:
        self.chat_template = one_message and "{% for m in messages %}|" + one_message + "{% endfor %}"

    def apply_chat_template(self, messages: Any, chat_template: str = "", **variables: Any) -> str:
        for unused in ("tokenize", "tools", "add_generation_prompt"):
            variables.pop(unused)
        template = jinja2.Template(chat_template or self.chat_template or "")
        return str(template.render(messages=messages, **variables))

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        raise NotImplementedError

    def decode(self, token_ids: Any, *, skip_special_tokens: bool = False) -> str:
        raise NotImplementedError


def a_call(arguments: Any) -> dict[str, Any]:
    return {"type": "function", "id": "c", "function": {"name": "f", "arguments": arguments}}


def rendered(renderer: Renderer, *messages: dict[str, Any], continues: bool = False) -> str:
    return anyio.run(renderer.render, Conversation(messages, continues=continues))


@pytest.mark.parametrize("template", [ALWAYS, ONLY_WITHOUT_CONTENT], ids=["always", "only without content"])
@pytest.mark.parametrize("arguments", [OBJECT, TEXT], ids=["object", "text"])
def test_calls_are_written_whatever_form_the_template_wants(template: str, arguments: str) -> None:
    renderer = Renderer(Templated(template.replace("ARGUMENTS", arguments)))
    message = {"role": "assistant", "content": "", "tool_calls": [a_call({"a": "b"})]}
    assert rendered(renderer, message) == '|<f:{"a": "b"}>'


def test_arguments_that_are_no_object_are_written_as_they_are() -> None:
    renderer = Renderer(Templated(ALWAYS.replace("ARGUMENTS", TEXT)))
    message = {"role": "assistant", "content": "", "tool_calls": [a_call('{"a')]}
    assert rendered(renderer, message) == '|<f:{"a>'


def test_a_message_that_is_continued_ends_the_text() -> None:
    renderer = Renderer(Templated("{{ m.content | trim }}<end>"))
    said = {"role": "assistant", "content": "  and so "}
    assert rendered(renderer, said) == "|and so<end>"
    assert rendered(renderer, said, continues=True) == "|and so "


def test_a_template_that_hides_the_last_message_cannot_continue_it() -> None:
    renderer = Renderer(Templated("{{ m.role }}"))
    with pytest.raises(InvalidRequest) as refusal:
        rendered(renderer, {"role": "assistant", "content": "x"}, continues=True)
    assert refusal.value.param == "continue_final_message"


def test_a_template_of_the_command_line_is_used_instead() -> None:
    renderer = Renderer(Templated(None), "{{ messages[0].content }}!")
    assert rendered(renderer, {"role": "user", "content": "a"}) == "a!"
    assert renderer.source == "{{ messages[0].content }}!"


def test_without_any_template_the_router_does_not_start() -> None:
    with pytest.raises(SettingsError, match="--chat-template FILE"):
        Renderer(Templated(None))
