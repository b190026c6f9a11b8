"""Chat templates of every habit, rendered."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anyio
import jinja2
import pytest

from openai_.chat.chatting import chatting
from openai_.chat_models.families import QWEN2_5
from router_core.errors import SettingsError
from slime_openai.errors import InvalidRequest
from slime_openai.prompts.conversation import Conversation
from slime_openai.prompts.rendering import Renderer

if TYPE_CHECKING:
    from routers import Start

OBJECT = "{{ call.function.arguments | tojson }}"
TEXT = "{{ '' + call.function.arguments }}"
CALLS = "{% for call in m.tool_calls or [] %}<{{ call.function.name }}:ARGUMENTS>{% endfor %}"
ONLY_WITHOUT_CONTENT = "{% if m.content is none %}" + CALLS + "{% else %}{{ m.content }}{% endif %}"
ALWAYS = "{{ m.content or '' }}" + CALLS


compiled = lru_cache(jinja2.Template)


class Templated:
    """A tokenizer that only knows a template."""

    def __init__(self, one_message: str | None) -> None:
        self.chat_template = one_message and "{% for m in messages %}|" + one_message + "{% endfor %}"

    def apply_chat_template(self, messages: Any, chat_template: str = "", **variables: Any) -> str:
        for unused in ("tokenize", "tools", "add_generation_prompt"):
            variables.pop(unused)
        template = compiled(chat_template or self.chat_template or "")
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


TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
CLOSED = "{{ m.content }}<end>"
OF_THE_PLACE = "{{ m.content }}{{ '<end>' if loop.index < 3 else '<stop>' }}"
OF_THOUGHTS = "{{ m.content }}{{ m.reasoning_content }}<end>"
OF_A_VARIABLE = "{{ m.content }}<{{ mark }}>"
REFUSING = "{% if m.role == 'system' %}{{ 1 // 0 }}{% endif %}{{ m.content }}<end>"
HIDING = "{% if loop.last %}{{ m.content | reverse }}{% endif %}"


@pytest.mark.parametrize(
    ("template", "variables", "end"),
    [
        (CLOSED, {}, "<end>"),
        (OF_THE_PLACE, {}, None),
        (OF_THOUGHTS, {}, None),
        (OF_A_VARIABLE, {"mark": 1}, "<1>"),
        (OF_A_VARIABLE, {"mark": True}, "<True>"),
        (OF_A_VARIABLE, {"mark": "x" * 2000}, None),
        (REFUSING, {}, "<end>"),
        (HIDING, {}, None),
    ],
)
def test_end_of_a_turn_is_known_if_it_is_always_the_same(
    template: str, variables: dict[str, Any], end: str | None
) -> None:
    renderer = Renderer(Templated(template))
    for value in ({"mark": True}, variables, variables):
        known = renderer.end_of_turn(Conversation([], None, value))
    assert known == end
    assert renderer.end_of_turn(Conversation([], TOOLS, variables)) == end


def test_end_of_a_turn_is_cached_for_some_variables_only() -> None:
    renderer = Renderer(Templated(OF_A_VARIABLE))
    ends = [renderer.end_of_turn(Conversation([], variables={"mark": mark})) for mark in range(300)]
    assert ends == [f"<{mark}>" for mark in range(256)] + [None] * 44


LAST = (
    "{% if loop.last and message.role == 'assistant' %}<|endoftext|>{% else %}<|im_end|>{{ '\n' }}{% endif %}"
)


@pytest.mark.anyio
@pytest.mark.parametrize("ends_alike", [True, False])
async def test_next_turn_is_rendered_once_if_every_turn_ends_alike(
    start: Start,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    ends_alike: bool,
) -> None:
    path = tmp_path / "template"
    body = "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}"
    behind = "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    path.write_text(body + ("<|im_end|>\n" if ends_alike else LAST) + behind)
    async with chatting(start, "One.", "Two.", family=QWEN2_5, flags=("--chat-template", str(path))) as chat:
        messages: list[dict[str, Any]] = [{"role": "user", "content": "a"}]
        first = await chat.post(messages=messages, return_token_ids=True)
        messages += [first["choices"][0]["message"], {"role": "user", "content": "b"}]
        await chat.post(messages=[*messages, {"role": "user", "content": "c"}])  # the end is tried out
        sizes = []
        render = Renderer._render

        def counted(self: Renderer, conversation: Conversation, *messages: Any) -> str:
            sizes.append(len(conversation.messages))
            return render(self, conversation, *messages)

        monkeypatch.setattr(Renderer, "_render", counted)
        second = await chat.post(messages=messages, return_token_ids=True)
        assert second["history"] == ("exact" if ends_alike else "fresh")
        assert (sizes == [3]) is ends_alike
        said = [("user", "a"), ("assistant", "One."), ("user", "b")]
        shown = "".join(f"<|im_start|>{role}\n{content}<|im_end|>\n" for role, content in said)
        assert chat.read(second["prompt_token_ids"]) == f"{shown}<|im_start|>assistant\n"
