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
from slime_openai.prompts.conversation import Conversation
from slime_openai.prompts.locality import Proof, prove, trials
from slime_openai.prompts.rendering import Renderer
from slime_openai.requests.messages import Message as Read

Message = Mapping[str, Any]
ENGINE = files("slime_engine").joinpath("chat_template.jinja").read_text()
SAID = "<{{ m.role }}>{{ m.content }}"


def each(round_: str, *, before: str = "", behind: str = "") -> str:
    return before + "{% for m in messages %}" + SAID + round_ + "{% endfor %}" + behind


def searching(search: str, *, namespace: str = "last=-1", round_: str = "{{ loop.index0 > ns.last }}") -> str:
    """Return a template that begins with ``search``, and shows ``round_`` behind each content."""
    return f"{{% set ns = namespace({namespace}) %}}{search}{each(round_)}"


def forward(condition: str) -> str:
    found = "{% set ns.last = loop.index0 %}"
    return f"{{% for m in messages %}}{{% if {condition} %}}\n{found}{{% endif %}}{{% endfor %}}"


FROM_THE_END = """
{% for m in messages[::-1] %}
  {% set place = messages|length - 1 - loop.index0 %}
  {% if ns.on and m.role == 'user' and m.content is string and not m['content'].endswith('!') %}
    {% set ns.on = false %}
    {% set ns.last = place %}
  {% endif %}
{% endfor %}
"""
ASKS = "m.role == 'user'"
#: Each searches for a message, and compares the index of each message with that of the found one.
SEARCHING = {
    "forward": searching(forward(ASKS)),
    "backward": searching(FROM_THE_END, namespace="on=true, last=messages|length - 1"),
    "forward to the first": searching(
        "{% for m in messages %}{% if ns.on and m.role != 'system' %}{% set ns.last = loop.index0 %}"
        "{% set ns.on = false %}{% endif %}{% endfor %}",
        namespace="on=true, last=-1",
    ),
    "with a name": searching(
        "{% for m in messages %}{% set a = m.content %}{% if m.role == 'tool' and a.strip() %}"
        "{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    ),
    "number": searching(
        f"{{% for m in messages %}}{{% if {ASKS} %}}{{% set ns.last = ns.last + 2 %}}{{% endif %}}{{% endfor %}}"
    ),
    "other comparison": searching(
        forward(ASKS), round_="{{ ns.last == loop.index0 }}{{ ns.last <= loop.index0 }}"
    ),
    "two": searching(
        f"{forward(ASKS)}{{% for m in messages %}}{{% set ns.b = loop.index0 %}}{{% endfor %}}",
        namespace="last=1, b=7",
        round_="{{ loop.index0 != ns.last }}{{ loop.index0 < ns.b }}",
    ),
    "text": searching(
        f"{forward(ASKS)}{{% for m in messages %}}{{% set ns.last = 'a,1' %}}{{% endfor %}}",
        round_="{{ loop.index0 == ns.last }}",
    ),
    "not compared": searching(forward(ASKS), round_=""),
    "asked before": searching(f"{forward(ASKS)}{{% if ns.last < 0 %}}none{{% endif %}}"),
    "of what assistants say": searching(forward("m.content.endswith('?')")),
    "of strings that assistants say": searching(forward("m.content is string")),
}
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
    "search of calls": searching(forward("m.tool_calls")),
    "search of keys": searching(forward("m.get('tool_calls')")),
    "search of private attributes": searching(forward("m.content.__class__")),
    "search of neighbours": searching(forward("loop.previtem.tool_calls")),
    "search of the loop": searching(forward("loop == m.content")),
    "search by function": searching(forward("range(3)")),
    "search of characters": searching(forward("m.content[0]")),
    "search by filter": searching(forward("m.content | trim")),
    "search by test": searching(forward("m.content is defined")),
    "search of other messages": searching(forward("messages[0].content")),
    "search of the message": searching(forward("m == m")),
    "search by a variable": searching(forward("enable_thinking")),
    "search by an earlier value": searching(forward("a"), round_="{% set a = 1 %}"),
    "search that writes": searching("{% for m in messages %}a{% set ns.last = loop.index0 %}{% endfor %}"),
    "search in pairs": searching("{% for a, b in messages %}{% set ns.last = loop.index0 %}{% endfor %}"),
    "search in a part": searching("{% for m in messages[1:] %}{% set ns.last = loop.index0 %}{% endfor %}"),
    "search in tools": searching("{% for m in tools %}{% set ns.last = loop.index0 %}{% endfor %}"),
    "search in the end": f"{{% set ns = namespace(last=1) %}}{each('{{ loop.index0 > ns.last }}')}{forward(ASKS)}",
    "search elsewhere": searching(forward(ASKS).replace("ns.", "other.")),
    "conditional search": searching(f"{{% if tools %}}{forward(ASKS)}{{% endif %}}"),
    "begun by position": "{% set ns = namespace({}) %}" + forward(ASKS) + each(""),
    "begun with messages": searching(forward(ASKS), namespace="last=messages"),
    "begun twice": searching(forward(ASKS) + "{% set ns = 1 %}"),
    "found index": searching(forward(ASKS), round_="{{ ns.last }}"),
    "found elsewhere": searching(forward(ASKS), round_="{{ loop.index0 > tools.last }}"),
    "found in a list": searching(forward(ASKS), round_="{{ loop.index0 in ns.last }}"),
    "found among three": searching(forward(ASKS), round_="{{ 0 < loop.index0 < ns.last }}"),
    "found by another number": searching(forward(ASKS), round_="{{ loop.index0 > ns.last + 1 }}"),
    "found behind": searching(forward(ASKS), round_="") + "{{ ns.last }}",
    "found in parts": searching(
        forward(ASKS), round_="{% for c in m.content %}{{ loop.index0 > ns.last }}{% endfor %}"
    ),
}


@pytest.mark.parametrize("name", LOCAL)
def test_template_is_proved_local(name: str) -> None:
    assert prove(LOCAL[name]) == Proof(None)


@pytest.mark.parametrize("name", OTHERS)
def test_template_is_not_proved_local(name: str) -> None:
    assert prove(OTHERS[name]) is None


@pytest.mark.parametrize("name", SEARCHING)
def test_template_that_searches_is_proved_local(name: str) -> None:
    proof = prove(SEARCHING[name])
    assert proof is not None
    assert (proof.search is None) == (name == "not compared")


def test_local_templates_of_models() -> None:
    models = {"engine": ENGINE}
    models |= {one.name: one.template for one in (QWEN2_5, QWEN3, LLAMA, MISTRAL, DEEPSEEK)}
    proofs = {name: prove(source) for name, source in models.items()}
    local = {name: proof.search for name, proof in proofs.items() if proof is not None}
    assert local.keys() == {"engine", QWEN2_5.name, QWEN3.name}
    assert [name for name, search in local.items() if search is not None] == [QWEN3.name]


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
                "content": chance.choice(("", "?", "! ", "<tool_response></tool_response>")),
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


@pytest.mark.parametrize("name", [*LOCAL, *SEARCHING, "engine", "qwen2.5", "qwen3"])
def test_text_behind_a_message_is_that_of_the_whole(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    models = {"engine": ENGINE, "qwen2.5": QWEN2_5.template, "qwen3": QWEN3.template}
    source = {**models, **LOCAL, **SEARCHING}[name]
    renderer = Renderer(Sandboxed(source))
    monkeypatch.setattr(rendering, "_COMPARED_EVERY", 1 << 30)  # else a difference would be mended
    for (chat, place), _ in zip(conversations(random.Random(name)), range(60), strict=False):
        assert behind(renderer, chat, place) == behind(renderer, chat, place, is_known=False)


def user(content: str) -> Message:
    return {"role": "user", "content": content}


def a_chat(turns: int) -> Conversation:
    answer = {"role": "assistant", "content": "!"}
    return Conversation([*[user("?"), answer] * turns, user("?")])


def test_only_the_messages_behind_are_rendered_and_a_sample_of_the_whole() -> None:
    tokenizer = Sandboxed(LOCAL["chatml"])
    renderer = Renderer(tokenizer)
    tokenizer.lengths.clear()
    for _ in range(203):
        assert behind(renderer, a_chat(9), 17) == "<end>\n<user>?<end>\n<assistant>"
    assert tokenizer.lengths.count(19) == 3
    assert tokenizer.lengths.count(3) == 203


@pytest.mark.parametrize(
    ("name", "length"),
    [("forward", 4), ("backward", 4), ("two", 4), ("number", 19), ("text", 19), ("not compared", 3)]
    + [(name, 19) for name in ("of what assistants say", "of strings that assistants say")],
)
def test_template_that_searches_renders_few_messages(name: str, length: int) -> None:
    tokenizer = Sandboxed(SEARCHING[name])
    renderer = Renderer(tokenizer)
    assert behind(renderer, a_chat(9), 17) is not None  # the first text is compared with the whole
    tokenizer.lengths.clear()
    assert behind(renderer, a_chat(9), 17) == behind(renderer, a_chat(9), 17, is_known=False)
    assert tokenizer.lengths == [length, 19]


def test_turns_of_an_agent_behind_one_question_are_short() -> None:
    tokenizer = Sandboxed(QWEN3.template)
    renderer = Renderer(tokenizer)
    call = {"type": "function", "function": {"name": "f", "arguments": {"a": "b"}}}
    step: list[Message] = [
        {"role": "assistant", "content": "", "reasoning_content": ".", "tool_calls": [call]}
    ]
    step.append({"role": "tool", "content": "7"})
    chat = Conversation([user("?"), *step * 600])
    tokenizer.lengths.clear()
    assert behind(renderer, chat, 1199) == behind(renderer, chat, 1199, is_known=False)  # in a thread
    assert behind(renderer, chat, 1199)
    assert tokenizer.lengths == [4, 1201, 1201, 4]
    unasked = replace(chat, messages=chat.messages[1:])
    assert behind(renderer, unasked, 1198) == behind(renderer, unasked, 1198, is_known=False)
    assert tokenizer.lengths[4:] == [1200, 1200]


def test_messages_of_a_client_are_searched_as_the_template_sees_them() -> None:
    said = [Read("developer", "!"), Read("user", "?"), Read("assistant"), Read("function", "7")]
    said += [Read("tool"), Read("assistant", "!"), Read("user", "?")]
    for role, length in (("system", 7), ("tool", 4), ("user", 4), ("developer", 4)):
        tokenizer = Sandboxed(searching(forward(f"m.role == '{role}'"), namespace="last=messages|length - 1"))
        renderer = Renderer(tokenizer)
        assert behind(renderer, Conversation(said), 5)
        tokenizer.lengths.clear()
        assert behind(renderer, Conversation(said), 5) == behind(
            renderer, Conversation(said), 5, is_known=False
        )
        assert tokenizer.lengths == [length, 7]


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
    monkeypatch.setattr(rendering, "prove", lambda source: Proof(None))
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
