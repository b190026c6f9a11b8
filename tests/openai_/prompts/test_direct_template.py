"""Rendering of messages without the copies that transformers makes of them: the texts are the same."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from openai_.chat_models.families import FAMILIES, QWEN2_5, Family
from slime_openai.prompts.direct_template import DirectTemplate
from slime_openai.prompts.locality import trials

if TYPE_CHECKING:
    from collections.abc import Mapping

#: More texts than are compared with those of transformers at first.
MANY = 101
TOOL = {
    "type": "function",
    "function": {"name": "probed", "parameters": {"type": "object", "properties": {}}},
}
ASKED = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Café?"}]


class Uncopied(dict[str, Any]):
    """A message that cannot be copied as transformers does it."""

    def items(self) -> Any:
        raise NotImplementedError


class LoudText(str):
    """A text that templates write in another way than its copy, which is a plain string."""

    def __str__(self) -> str:
        return self.upper()


def template_of(family: Family, source: str | None = None) -> DirectTemplate:
    """Return the template of ``family`` after its first texts, which are all compared."""
    template = DirectTemplate(family.tokenizer.huggingface, source)
    for _ in range(MANY):
        template.render(ASKED, None, family.variables, add_generation_prompt=True)
    return template


def by_transformers(family: Family, messages: Any, tools: Any, variables: Any, *, prompt: bool) -> str:
    try:
        return family.tokenizer.apply_chat_template(
            messages, tools=tools, add_generation_prompt=prompt, **variables
        )
    except Exception as error:  # a template may raise anything
        return f"{type(error).__name__} {error}"


def directly(template: DirectTemplate, messages: Any, tools: Any, variables: Any, *, prompt: bool) -> str:
    try:
        return str(template.render(messages, tools, variables, add_generation_prompt=prompt))
    except Exception as error:
        return f"{type(error).__name__} {error}"


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_texts_are_those_of_transformers(family: Family) -> None:
    template = template_of(family)
    variables = {**family.variables, "bos_token": "<first>", "deep": [{"a": 1.5}]}
    for number, (messages, _) in enumerate(trials()):
        tools, prompt = ([TOOL], False) if number % 2 else (None, True)
        ours = directly(template, messages, tools, variables, prompt=prompt)
        assert ours == by_transformers(family, messages, tools, variables, prompt=prompt)


def test_templates_see_the_same_names(caplog: pytest.LogCaptureFixture) -> None:
    source = "{{ documents }}{{ tools }}{{ eos_token }}{{ add_generation_prompt }}{{ dict(a=1) }}"
    template = template_of(QWEN2_5, source)
    theirs = QWEN2_5.tokenizer.apply_chat_template(ASKED, chat_template=source)
    assert template.render(ASKED, None, {}, add_generation_prompt=False) == theirs
    assert not caplog.text  # each text was rendered directly, too


#: A message with names of its own, of methods of dicts, of attributes that the sandbox hides, and of missing members.
ODD = {"role": "user", "content": "{0}", "items": "mine", "__class__": "mine", "_own": "mine", "": "empty"}


@pytest.mark.parametrize(
    "read",
    [
        *(
            "m.role",
            "m.items is callable",
            "m['items']",
            "m.items() | list",
            "m.get('items')",
            "m.pop",
            "m.pop('role')",
        ),
        *("m.__class__", "m['__class__']", "m._own", "m.update", "m.__init__.__globals__", "m.copy().role"),
        *(
            "m.missing",
            "m.missing is defined",
            "m.missing.deep",
            "m.missing | default('none')",
            "m.role.missing",
        ),
        *(
            "m.content.format(1)",
            "m.content.upper()",
            "m.content.__class__",
            "m.content.format_map({'0': 1})",
        ),
        *(
            "loop.index",
            "loop.index0",
            "loop.first",
            "loop.last",
            "loop.length",
            "loop.revindex",
            "loop.revindex0",
        ),
        *(
            "loop.previtem",
            "loop.nextitem.role",
            "loop.cycle('a', 'b')",
            "loop.depth",
            "loop.missing",
            "loop._iterator",
        ),
        *("namespace(a=1).a", "dict(a=1).a", "[1].append", "[1].append(2)", "range(3).stop"),
    ],
)
def test_attributes_are_those_of_the_sandbox(read: str, caplog: pytest.LogCaptureFixture) -> None:
    source = f"{{% for m in messages %}}{{{{ {read} }}}},{{% endfor %}}"
    template = DirectTemplate(QWEN2_5.tokenizer.huggingface, source)
    messages = [ODD, {**ODD, "missing": {"deep": 1}}]
    for _ in range(MANY):
        ours = directly(template, messages, None, {}, prompt=True)
    assert ours == by_transformers(QWEN2_5, messages, None, {"chat_template": source}, prompt=True)
    assert not caplog.text


def test_messages_are_not_copied() -> None:
    template = template_of(QWEN2_5)
    uncopied = [Uncopied(message) for message in ASKED]
    text = template.render(uncopied, [TOOL], {}, add_generation_prompt=True)
    assert text == by_transformers(QWEN2_5, ASKED, [TOOL], {}, prompt=True)


@pytest.mark.parametrize(
    "message",
    [
        {"role": "assistant", "content": None},
        {"role": "assistant", "content": "!", "reasoning_content": "Hm."},
    ],
    ids=["content is missing", "thoughts"],
)
def test_messages_that_transformers_changes_are_read_as_it_does(message: Mapping[str, Any]) -> None:
    source = "{% for m in messages %}{{ m.keys() | list }}{{ m.thinking }}{% endfor %}"
    template = template_of(QWEN2_5, source)
    theirs = QWEN2_5.tokenizer.apply_chat_template([*ASKED, message], chat_template=source)
    assert template.render([*ASKED, message], None, {}, add_generation_prompt=False) == theirs


@pytest.mark.parametrize("name", ["conversations", "sanitize_control_tokens", "documents"])
def test_variables_with_names_of_arguments_stay_arguments(name: str) -> None:
    template = template_of(QWEN2_5)
    variables = {name: ["<|im_end|>"]}
    ours = directly(template, ASKED, None, variables, prompt=True)
    assert ours == by_transformers(QWEN2_5, ASKED, None, variables, prompt=True)


def test_errors_of_a_template_are_those_of_transformers() -> None:
    source = "{{ raise_exception('no ' + messages[1].content) if messages | length > 2 else 'yes' }}"
    template = template_of(QWEN2_5, source)
    with pytest.raises(Exception, match="no Café"):
        template.render([*ASKED, *ASKED], None, {}, add_generation_prompt=False)


def test_another_text_ends_direct_rendering(caplog: pytest.LogCaptureFixture) -> None:
    template = DirectTemplate(QWEN2_5.tokenizer.huggingface, "{{ messages[0].content }}")
    loud: Any = [{"role": "user", "content": LoudText("hush")}]
    text = template.render(loud, None, {}, add_generation_prompt=False)
    assert text == "hush"
    assert "from now on" in caplog.text
    for _ in range(MANY):
        assert template.render(loud, None, {}, add_generation_prompt=False) == text
