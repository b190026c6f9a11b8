"""Templates that are proved local, and the shorter conversations that they then render."""

from __future__ import annotations

import logging
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from importlib.resources import files
from typing import Any

import anyio
import pytest
from jinja2.sandbox import ImmutableSandboxedEnvironment

from openai_.chat_models.families import DEEPSEEK, LLAMA, MISTRAL, QWEN2_5, QWEN3
from slime_openai.prompts import rendering
from slime_openai.prompts.locality import is_local, trials
from slime_openai.prompts.rendering import Conversation, Renderer

Message = Mapping[str, Any]
ENGINE = files("slime_engine").joinpath("chat_template.jinja").read_text()
SAID = "<{{ m.role }}>{{ m.content }}"


def each(round_: str, *, before: str = "", behind: str = "") -> str:
    return before + "{% for m in messages %}" + SAID + round_ + "{% endfor %}" + behind


LOCAL = {
    "chatml": each("<end>\n", behind="{% if add_generation_prompt %}<assistant>{% endif %}"),
    "neighbours": each(
        "{{ messages[loop.index0 - 1].role }}{{ loop.last or messages[loop.index0 + 1].role }}"
    ),
    "next": each(
        "{{ loop.first or loop.previtem.role }}{{ loop.last or loop.nextitem.role ~ messages[loop.index].role }}"
    ),
    "own": each("{{ messages[loop.index0].role }}"),
    "first": each("{% if loop.first and messages[0].role != 'system' %}You help.{% endif %}"),
    "counted first": each("{{ loop.index0 == 0 }}{{ loop.index > 1 }}"),
    "from the end": each("{{ loop.revindex }}{{ loop.last }}{{ messages[-1].role }}"),
    "parts": each("{% for call in m.tool_calls or [] %}{{ loop.index }}{{ call.function.name }}{% endfor %}"),
    "beginning": each("", before="{% if messages[0].role == 'system' %}{{ messages[0].content }}{% endif %}"),
    "unused": each("", before="{% set system = messages[0].content %}{{ system }}"),
    "constants": each("{{ end }}", before="{% set end = eos_token | default('<end>') %}"),
    "of tools": each("{% if tools %}{{ tools | tojson }}{% endif %}"),
    "by tools": each("", before="{% if tools %}{% set a = 1 %}{% elif b %}{% set a = 2 %}{% endif %}"),
    "macro": each(
        "{{ shown(m.content) }}",
        before="{% macro shown(c) %}{% for p in c %}[{{ p }}]{% endfor %}{% endmacro %}",
    ),
    "captured": each("{{ end }}", before="{% set end %}<end>{% endset %}"),
    "set in a round": each("{% set a = m.content %}{{ a | trim }}"),
}
#: Each depends on earlier messages, or is not understood.
OTHERS = {
    "no loop": "{{ messages[-1].content }}",
    "no template": "{% for m in messages %}",
    "state": each("{% set ns.seen = true %}", before="{% set ns = namespace(seen=false) %}"),
    "other state": each("{{ next() }}", before="{% set next = joiner(',') %}"),
    "changed": each("{{ tools.append(1) }}"),
    "changed by name": each("{{ (tools | attr('append'))(1) }}{{ tools['append'](1) }}"),
    "counted": each("{{ loop.index }}"),
    "counted by name": each("{{ loop['index'] }}"),
    "alternating": each("{{ loop.index0 % 2 }}"),
    "above two": each("{{ loop.index0 > 2 }}"),
    "length": each("{{ messages | length }}{{ loop.length }}"),
    "cycle": each("{{ loop.cycle('a', 'b') }}{{ loop.changed(m.role) }}"),
    "two before": each("{{ messages[loop.index0 - 2].role }}"),
    "in parts": each("{% for c in m.content %}{{ messages[loop.index0].role }}{% endfor %}"),
    "first behind": each("", behind="{{ messages[0].role }}"),
    "by the first behind": each("", behind="{% if messages[0].role %}{% endif %}"),
    "system": each("{{ a }}", before="{% set a = messages[0].content %}"),
    "by the system": each("{{ a }}", before="{% if messages[0].content %}{% set a = 1 %}{% endif %}"),
    "else": each("{{ a }}", before="{% if b %}{% elif messages[0] %}{% else %}{% set a = 1 %}{% endif %}"),
    "captured system": each("{{ a }}", before="{% set a %}{{ messages[0].content }}{% endset %}"),
    "alias": each("{{ a[0].role }}", before="{% set a = messages %}"),
    "rest": each("", before="{% set messages = messages[1:] %}"),
    "third": each("", before="{{ messages[2].content }}"),
    "filtered": "{% for m in messages if m.content %}{{ m.content }}{% endfor %}",
    "else of the loop": "{% for m in messages %}{{ m.content }}{% else %}none{% endfor %}",
    "recursive": "{% for m in messages recursive %}{{ m.content }}{% endfor %}",
    "recursive parts": each("{% for c in m.content recursive %}{% endfor %}"),
    "pairs": "{% for a, b in messages %}{{ a }}{% endfor %}",
    "twice": each("") * 2,
    "within": each("{% for o in messages %}{{ o.content }}{% endfor %}"),
    "conditional": "{% if messages[0].content %}" + each("") + "{% endif %}",
    "macro of all": each("{{ all() }}", before="{% macro all() %}{{ messages | length }}{% endmacro %}"),
    "conditional macro": each("", before="{% if messages[0].x %}{% macro a() %}{% endmacro %}{% endif %}"),
    "macro in a round": each("{% macro a() %}{% endmacro %}"),
    "with": each("{% with a = 1 %}{% endwith %}"),
    "iterator": each("{{ a | list }}", before="{% set a = tools | map(attribute='name') %}"),
    "iterators": each("{{ a | list }}", before="{% set a = [] or tools | map('upper') %}"),
    "chance": each("{{ ['a', 'b'] | random }}"),
    "pair": each("", before="{% set a, b = 1, 2 %}"),
}


@pytest.mark.parametrize("name", LOCAL)
def test_template_is_proved_local(name: str) -> None:
    assert is_local(LOCAL[name])


@pytest.mark.parametrize("name", OTHERS)
def test_template_is_not_proved_local(name: str) -> None:
    assert not is_local(OTHERS[name])


def test_local_templates_of_models() -> None:
    models = {"engine": ENGINE}
    models |= {one.name: one.template for one in (QWEN2_5, QWEN3, LLAMA, MISTRAL, DEEPSEEK)}
    assert {name for name, source in models.items() if is_local(source)} == {"engine", QWEN2_5.name}


class Sandboxed:
    """A tokenizer with only a template. ``lengths``: of the conversations that it rendered."""

    def __init__(self, source: str) -> None:
        self.chat_template = source
        self.lengths: list[int] = []
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        self._template = environment.from_string(source)

    def apply_chat_template(self, messages: Sequence[Message], **variables: Any) -> str:
        self.lengths.append(len(messages))
        return self._template.render(messages=messages, **variables)

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        raise NotImplementedError

    def decode(self, token_ids: Any, *, skip_special_tokens: bool = False) -> str:
        raise NotImplementedError


def behind(renderer: Renderer, chat: Conversation, place: int, *, is_known: bool = True) -> str | None:
    async def run() -> str | None:
        return await renderer.behind(chat, place, is_known=is_known)

    return anyio.run(run)


def conversations(chance: random.Random) -> Iterator[tuple[Conversation, int]]:
    call = {"type": "function", "function": {"name": "f", "arguments": {"a": "b"}}}
    tool = {"type": "function", "function": {"name": "f", "parameters": {}}}
    while True:
        messages: list[dict[str, Any]] = [
            {
                "role": chance.choice(("assistant", "system", "tool", "user")),
                "content": chance.choice(("", "?", "! ")),
            }
            for _ in range(chance.randrange(3, 12))
        ]
        for one in messages:
            if one["role"] == "assistant":
                one |= chance.choice(({}, {"tool_calls": [call] * 2}, {"reasoning_content": "."}))
        places = [place for place, one in enumerate(messages) if place > 1 and one["role"] == "assistant"]
        if places:
            tools = chance.choice((None, [tool, tool]))
            yield Conversation(messages, tools, {}, chance.random() < 0.5), chance.choice(places)


@pytest.mark.parametrize("name", [*LOCAL, "engine", "qwen2.5"])
def test_text_behind_a_message_is_that_of_the_whole(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    source = {"engine": ENGINE, "qwen2.5": QWEN2_5.template, **LOCAL}[name]
    renderer = Renderer(Sandboxed(source))
    monkeypatch.setattr(rendering, "_COMPARED_EVERY", 1 << 30)  # else a difference would be mended
    for (chat, place), _ in zip(conversations(random.Random(name)), range(60), strict=False):
        assert behind(renderer, chat, place) == behind(renderer, chat, place, is_known=False)


def a_chat(turns: int) -> Conversation:
    user, answer = {"role": "user", "content": "?"}, {"role": "assistant", "content": "!"}
    return Conversation([*[user, answer] * turns, user])


def test_only_the_messages_behind_are_rendered_and_a_sample_of_the_whole() -> None:
    tokenizer = Sandboxed(LOCAL["chatml"])
    renderer = Renderer(tokenizer)
    tokenizer.lengths.clear()
    for _ in range(203):
        assert behind(renderer, a_chat(9), 17) == "<end>\n<user>?<end>\n<assistant>"
    assert tokenizer.lengths.count(19) == 3
    assert tokenizer.lengths.count(3) == 203


def test_the_whole_is_rendered_where_it_must_be() -> None:
    tokenizer = Sandboxed(each("{% if loop.first and m.role == 'assistant' %}{{ 1 // 0 }}{% endif %}"))
    renderer = Renderer(tokenizer)
    spoken = [{"role": role, "content": "a"} for role in ("user", "assistant", "assistant", "user")]
    tokenizer.lengths.clear()
    assert behind(renderer, Conversation(spoken), 2) == "<user>a"
    assert behind(renderer, Conversation(spoken), 2, is_known=False) == "<user>a"
    assert behind(renderer, Conversation(spoken), 1) == "<assistant>a<user>a"
    assert behind(renderer, Conversation(spoken, size=1 << 20), 1) == "<assistant>a<user>a"  # in a thread
    assert tokenizer.lengths == [3, 4, 4, 4, 4]


def test_template_that_lies_is_found_out(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(rendering, "is_local", lambda source: True)
    counting = Sandboxed(each("{{ loop.index }}"))
    renderer = Renderer(counting)
    assert behind(renderer, a_chat(3), 5) == "6<user>?7"  # the trials at load find it
    assert not caplog.records
    of_words = Sandboxed(each("", behind="{% if 'think' in messages[0].content %}<think>{% endif %}"))
    renderer = Renderer(of_words)
    chat = a_chat(3)
    chat = replace(chat, messages=[{"role": "user", "content": "think"}, *chat.messages[1:]])
    of_words.lengths.clear()
    for _ in range(3):
        assert behind(renderer, chat, 5) == "<user>?<think>"
    assert of_words.lengths == [3, 7, 7, 7]
    [record] = caplog.records
    assert record.levelno == logging.ERROR
    assert "whole conversations are rendered" in record.message


def test_trials_have_an_assistants_message_at_their_place() -> None:
    assert {messages[place]["role"] for messages, place in trials()} == {"assistant"}
    assert min(place for _, place in trials()) > 1


def test_cost_of_a_shorter_conversation_is_known() -> None:
    said = [{"role": "user", "content": "a" * 50}, {"role": "user", "content": "a" * 7}]
    assert Conversation(said, size=1000).since(1).size == 7
    assert Conversation(said, [{}], size=1000).since(1).size == 1000
    assert (
        Conversation([*said, {"role": "assistant", "content": "", "tool_calls": []}], size=9).since(1).size
        == 9
    )
