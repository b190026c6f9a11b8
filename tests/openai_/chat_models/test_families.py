"""Each template has the quirks it is there for, each tokenizer the tokens of its family."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from jinja2 import TemplateError
from transformers import AutoTokenizer

from openai_.chat_models.families import (
    DEEPSEEK,
    FAMILIES,
    LLAMA,
    MISTRAL,
    QWEN2_5,
    QWEN3,
    QWEN3_PLAIN,
    Call,
    Family,
    Words,
)

Message = dict[str, Any]

TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}


def system(content: str) -> Message:
    return {"role": "system", "content": content}


def user(content: str) -> Message:
    return {"role": "user", "content": content}


def result(content: str, call_id: str = "abcdefghi") -> Message:
    return {"role": "tool", "content": content, "tool_call_id": call_id}


def assistant(content: str | None, *arguments: Any, **more: Any) -> Message:
    """With a call of the tool for each of ``arguments``."""
    calls = [
        {"id": "abcdefghi", "type": "function", "function": {"name": "weather", "arguments": one}}
        for one in arguments
    ]
    return {"role": "assistant", "content": content, **more, **({"tool_calls": calls} if calls else {})}


def rendered(
    family: Family, messages: Sequence[Message], tools: Any = None, prompt: bool = True, **more: Any
) -> str:
    variables = {**family.variables, **more}
    return family.tokenizer.apply_chat_template(
        messages, tools=tools, add_generation_prompt=prompt, **variables
    )


@dataclass(frozen=True)
class Quirk:
    """``shown`` is the end of the rendered messages, ``whole``: all of them."""

    name: str
    family: Family
    messages: Sequence[Message]
    shown: str
    whole: bool = False
    tools: Any = None
    prompt: bool = False
    variables: Mapping[str, Any] = field(default_factory=dict)


LLAMA_HEAD = (
    "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\n"
    "Cutting Knowledge Date: December 2023\nToday Date: 26 Jul 2024\n\n{}<|eot_id|>"
)
MISTRAL_TOOLS = (
    '[AVAILABLE_TOOLS] [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]'
    "[/AVAILABLE_TOOLS]"
)
DEEPSEEK_CALL = "<｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\n{}\n```<｜tool▁call▁end｜>"
QUIRKS = [
    Quirk(
        "writes a system prompt that nobody sent",
        QWEN2_5,
        [user("Hi")],
        "<|im_start|>system\nYou are a model for tests.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n",
        whole=True,
    ),
    Quirk(
        "shows tools in the system prompt",
        QWEN2_5,
        [system("Help."), user("Hi")],
        f"<tools>\n{json.dumps(TOOL)}\n</tools>\n\nA call looks like this:\n<tool_call>\n"
        '{"name": "...", "arguments": {...}}\n</tool_call><|im_end|>\n<|im_start|>user\nHi<|im_end|>\n',
        tools=[TOOL],
    ),
    Quirk(
        "joins words and calls by line breaks",
        QWEN2_5,
        [user("Hi"), assistant("I look.", {"a": 1}, {"ü": [2]})],
        '<|im_start|>assistant\nI look.\n<tool_call>\n{"name": "weather", "arguments": {"a": 1}}\n</tool_call>\n'
        '<tool_call>\n{"name": "weather", "arguments": {"ü": [2]}}\n</tool_call><|im_end|>\n',
    ),
    Quirk(
        "quotes arguments that are text",
        QWEN2_5,
        [user("Hi"), assistant("", '{"a":1}')],
        '<|im_start|>assistant\n<tool_call>\n{"name": "weather", "arguments": "{\\"a\\":1}"}\n</tool_call><|im_end|>\n',
    ),
    Quirk(
        "merges results into one user turn",
        QWEN2_5,
        [user("Hi"), assistant("", {}, {}), result("a"), result("b"), user("So?")],
        "<|im_end|>\n<|im_start|>user\n<tool_response>\na\n</tool_response>\n<tool_response>\nb\n</tool_response>"
        "<|im_end|>\n<|im_start|>user\nSo?<|im_end|>\n",
    ),
    Quirk(
        "has no system prompt of its own",
        QWEN3,
        [user("Hi")],
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n",
        whole=True,
        prompt=True,
    ),
    Quirk(
        "keeps thoughts behind the last question",
        QWEN3,
        [user("Hi"), assistant("", {}, reasoning_content="\nHm.\n"), result("a")],
        '<|im_start|>assistant\n<think>\nHm.\n</think>\n\n<tool_call>\n{"name": "weather", "arguments": {}}\n'
        "</tool_call><|im_end|>\n<|im_start|>user\n<tool_response>\na\n</tool_response><|im_end|>\n",
    ),
    Quirk(
        "drops the thoughts before a new question",
        QWEN3,
        [user("Hi"), assistant("Yes.", reasoning_content="Hm."), user("So?")],
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nYes.<|im_end|>\n<|im_start|>user\nSo?<|im_end|>\n",
        whole=True,
    ),
    Quirk(
        "finds thoughts in the content",
        QWEN3,
        [user("Hi"), assistant("<think>\nHm.\n</think>\n\nYes."), user("So?")],
        "<|im_start|>assistant\nYes.<|im_end|>\n<|im_start|>user\nSo?<|im_end|>\n",
    ),
    Quirk(
        "takes a result in a user's message for no question",
        QWEN3,
        [user("Hi"), assistant("Yes.", reasoning_content="Hm."), user("<tool_response>a</tool_response>")],
        "<|im_start|>assistant\n<think>\nHm.\n</think>\n\nYes.<|im_end|>\n"
        "<|im_start|>user\n<tool_response>a</tool_response><|im_end|>\n",
    ),
    Quirk(
        "gives the last message an empty block of thoughts",
        QWEN3,
        [user("Hi"), assistant("Yes.")],
        "<|im_start|>assistant\n<think>\n\n</think>\n\nYes.<|im_end|>\n",
    ),
    Quirk(
        "takes the empty block away again",
        QWEN3,
        [user("Hi"), assistant("", {}), result("a")],
        '<|im_start|>assistant\n<tool_call>\n{"name": "weather", "arguments": {}}\n</tool_call><|im_end|>\n'
        "<|im_start|>user\n<tool_response>\na\n</tool_response><|im_end|>\n",
    ),
    Quirk(
        "leaves arguments that are text as they are",
        QWEN3,
        [user("Hi"), assistant("", '{"a":1}')],
        '<tool_call>\n{"name": "weather", "arguments": {"a":1}}\n</tool_call><|im_end|>\n',
    ),
    Quirk(
        "thinks nothing when told not to",
        QWEN3_PLAIN,
        [user("Hi")],
        "<|im_start|>assistant\n<think>\n\n</think>\n\n",
        prompt=True,
    ),
    Quirk(
        "begins with a date and trims",
        LLAMA,
        [system(" Help. \n"), user("\n Hi "), assistant(" Yes. ")],
        LLAMA_HEAD.format("Help.") + "<|start_header_id|>user<|end_header_id|>\n\nHi<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\nYes.<|eot_id|>",
        whole=True,
    ),
    Quirk(
        "takes the date from a variable",
        LLAMA,
        [user("Hi")],
        LLAMA_HEAD.format("").replace("26 Jul 2024", "1 May 2026")
        + "<|start_header_id|>user<|end_header_id|>\n\nHi<|eot_id|>",
        variables={"date_string": "1 May 2026"},
        whole=True,
    ),
    Quirk(
        "shows tools in the first question",
        LLAMA,
        [user("Hi")],
        json.dumps(TOOL, indent=4) + "\n\nHi<|eot_id|>",
        tools=[TOOL],
    ),
    Quirk(
        "or in the system turn",
        LLAMA,
        [system("Help."), user("Hi")],
        json.dumps(TOOL, indent=4)
        + "\n\nHelp.<|eot_id|><|start_header_id|>user<|end_header_id|>\n\nHi<|eot_id|>",
        tools=[TOOL],
        variables={"tools_in_user_message": False},
    ),
    Quirk(
        "loses the words beside a call",
        LLAMA,
        [user("Hi"), assistant("I look.", {"a": 1})],
        '<|start_header_id|>assistant<|end_header_id|>\n\n{"name": "weather", "parameters": {"a": 1}}<|eot_id|>',
    ),
    Quirk(
        "quotes results",
        LLAMA,
        [user("Hi"), assistant("", {}), result('a "b"')],
        '<|start_header_id|>ipython<|end_header_id|>\n\n"a \\"b\\""<|eot_id|>',
    ),
    Quirk(
        "shows tools before the last question",
        MISTRAL,
        [user("Hi"), assistant(" Yes. "), user("So?")],
        f"<s>[INST] Hi[/INST] Yes.</s>{MISTRAL_TOOLS}[INST] So?[/INST]",
        tools=[TOOL],
        whole=True,
    ),
    Quirk(
        "says the system prompt in a question that nothing follows",
        MISTRAL,
        [system("Help."), user("Hi"), assistant("Yes."), user("So?")],
        "<s>[INST] Hi[/INST] Yes.</s>[INST] Help.\n\nSo?[/INST]",
        whole=True,
    ),
    Quirk(
        "says no system prompt when an answer follows",
        MISTRAL,
        [system("Help."), user("Hi"), assistant("Yes.")],
        "<s>[INST] Hi[/INST] Yes.</s>",
        whole=True,
    ),
    Quirk(
        "has ids in calls and results and loses the words beside them",
        MISTRAL,
        [user("Hi"), assistant("I look.", {"a": 1}), result("7")],
        '[INST] Hi[/INST][TOOL_CALLS] [{"name": "weather", "arguments": {"a": 1}, "id": "abcdefghi"}]</s>'
        '[TOOL_RESULTS] {"content": 7, "call_id": "abcdefghi"}[/TOOL_RESULTS]',
    ),
    Quirk(
        "has no generation prompt",
        MISTRAL,
        [user("Hi")],
        "<s>[INST] Hi[/INST]",
        prompt=True,
        whole=True,
    ),
    Quirk(
        "opens the thoughts and shows no tools",
        DEEPSEEK,
        [user("Hi"), system("Help.")],
        "<｜begin▁of▁sentence｜>Help.<｜User｜>Hi<｜Assistant｜><think>\n",
        tools=[TOOL],
        prompt=True,
        whole=True,
    ),
    Quirk(
        "cuts the thoughts of all turns",
        DEEPSEEK,
        [user("Hi"), assistant("<think>\nHm.\n</think>\n\nYes.", reasoning_content="Hm.")],
        "<｜User｜>Hi<｜Assistant｜>\n\nYes.<｜end▁of▁sentence｜>",
    ),
    Quirk(
        "marks the first call and the first result only",
        DEEPSEEK,
        [
            user("Hi"),
            assistant("I look.", "{}"),
            result("a"),
            assistant("And again.", "{}", "{}"),
            result("b"),
        ],
        f"<｜Assistant｜>I look.<｜tool▁calls▁begin｜>{DEEPSEEK_CALL}<｜tool▁calls▁end｜><｜end▁of▁sentence｜>"
        "<｜tool▁outputs▁begin｜><｜tool▁output▁begin｜>a<｜tool▁output▁end｜>"
        f"\n{DEEPSEEK_CALL}\n{DEEPSEEK_CALL}<｜tool▁calls▁end｜><｜end▁of▁sentence｜>"
        "<｜tool▁output▁begin｜>b<｜tool▁output▁end｜><｜tool▁outputs▁end｜>",
        prompt=True,
    ),
    Quirk(
        "answers results without a turn of its own",
        DEEPSEEK,
        [user("Hi"), assistant("", "{}"), result("a"), assistant("Yes.")],
        "<｜tool▁output▁end｜><｜tool▁outputs▁end｜>Yes.<｜end▁of▁sentence｜>",
    ),
]


@pytest.mark.parametrize("quirk", QUIRKS, ids=lambda quirk: f"{quirk.family.name} {quirk.name}")
def test_a_template_has_its_quirks(quirk: Quirk) -> None:
    text = rendered(quirk.family, quirk.messages, quirk.tools, quirk.prompt, **quirk.variables)
    assert text == quirk.shown if quirk.whole else text.endswith(quirk.shown)


@pytest.mark.parametrize(
    ("family", "messages", "why"),
    [
        (MISTRAL, [user("Hi"), user("So?")], "must alternate"),
        (MISTRAL, [assistant("Yes.")], "must alternate"),
        (MISTRAL, [user("Hi"), assistant("Yes."), system("Help.")], "must alternate"),
        (MISTRAL, [user("Hi"), assistant("", {}), result("a", "call_1")], "9 letters and digits"),
        (
            MISTRAL,
            [user("Hi"), {**assistant("", {}), "tool_calls": [{"id": "x", "function": {}}]}],
            "9 letters",
        ),
        (LLAMA, [user("Hi"), assistant("", {}, {})], "Only one tool call"),
        (DEEPSEEK, [user("Hi"), assistant("", {"a": 1})], "can only concatenate str"),
        (QWEN2_5, [user("Hi"), assistant(None)], "concatenate|content"),  # transformers 5 drops what is null
    ],
)
def test_a_template_refuses(family: Family, messages: list[Message], why: str) -> None:
    with pytest.raises((TemplateError, TypeError), match=why):
        rendered(family, messages)


@pytest.mark.parametrize(
    ("family", "after_result", "after_question"),
    [
        (QWEN2_5, True, True),
        (QWEN3, True, False),  # a question drops the thoughts
        (QWEN3_PLAIN, False, False),  # the empty block of thoughts is not in history
        (LLAMA, True, True),
        (MISTRAL, False, False),  # ids appear, tools move
        (DEEPSEEK, False, False),  # thoughts are not in history
    ],
    ids=lambda value: getattr(value, "name", value),
)
def test_template_keeps_the_expected_part_of_its_models_words(
    family: Family, after_result: bool, after_question: bool
) -> None:
    """The client sends back all that it got, and the model spells JSON as Python does."""
    arguments = {"city": "Oslo"}
    turns = [
        Words(thoughts="Look.", calls=(Call("weather", json.dumps(arguments)),)),
        Words("It rains.", thoughts="So."),
    ]
    for_template = json.dumps(arguments) if family is DEEPSEEK else arguments
    replies = [
        [assistant("", for_template, reasoning_content="Look."), result("rain")],
        [assistant("It rains.", reasoning_content="So."), user("And now?")],
    ]
    messages = [user("Weather?")]
    prompts = [rendered(family, messages, [TOOL])]
    for reply in replies:
        messages += reply
        prompts.append(rendered(family, messages, [TOOL]))
    kept = [
        following.startswith(prompt + family.says(words, prompt) + family.eos)
        for words, (prompt, following) in zip(turns, pairwise(prompts), strict=True)
    ]
    assert kept == [after_result, after_question]


@pytest.mark.parametrize("family", [QWEN2_5, QWEN3, LLAMA, DEEPSEEK], ids=lambda family: family.name)
def test_models_write_calls_as_their_template_does(family: Family) -> None:
    calls = (Call("weather", '{"city": "Zürich"}'),) * (2 if family.parallel_calls else 1)
    given = ['{"city": "Zürich"}' if family is DEEPSEEK else {"city": "Zürich"}] * len(calls)
    text = rendered(family, [user("Hi"), assistant("", *given)], prompt=False)
    assert family.says(Words(calls=calls), "") + family.eos in text


@pytest.mark.parametrize(
    ("family", "prompt", "words", "text"),
    [
        (QWEN2_5, "", Words("Yes.", "Hm."), "Yes."),
        (QWEN3, "", Words("Yes.", "Hm."), "<think>\nHm.\n</think>\n\nYes."),
        (QWEN3, "", Words("Yes."), "Yes."),
        (QWEN3_PLAIN, "<think>\n\n</think>\n\n", Words("Yes.", "Hm."), "Yes."),
        (LLAMA, "", Words("Yes.", "Hm."), "Yes."),
        (
            LLAMA,
            "",
            Words("Yes.", calls=(Call("f", "{}"),)),
            'Yes.<|python_tag|>{"name": "f", "parameters": {}}',
        ),
        (
            LLAMA,
            "",
            Words(calls=(Call("f", "{}"), Call("g", "{}"))),
            '{"name": "f", "parameters": {}}; {"name": "g", "parameters": {}}',
        ),
        (MISTRAL, "", Words("Yes.", "Hm."), " Yes."),
        (
            MISTRAL,
            "",
            Words(calls=(Call("f", "{}"), Call("g", "{}"))),
            '[TOOL_CALLS] [{"name": "f", "arguments": {}}, {"name": "g", "arguments": {}}]',
        ),
        (DEEPSEEK, "<think>\n", Words("Yes.", "Hm."), "Hm.\n</think>\n\nYes."),
        (DEEPSEEK, "<think>\n", Words("Yes."), "\n</think>\n\nYes."),
        (DEEPSEEK, "", Words("Yes.", "Hm."), "<think>\nHm.\n</think>\n\nYes."),
        (DEEPSEEK, "", Words("Yes."), "Yes."),
    ],
)
def test_how_models_write_what_they_have_to_say(family: Family, prompt: str, words: Words, text: str) -> None:
    assert family.says(words, prompt) == text


TEXTS = (
    "The weather in Zürich: 2026-11-21, 3°C.\n\n  日本語 😀 e\u0301",
    '{"name": "weather", "arguments": {"city": "S\\u00e3o Paulo"}}',
    "\t x  \r\n\n ",
)


@pytest.fixture(params=FAMILIES, ids=lambda family: family.name)
def family(request: pytest.FixtureRequest) -> Family:
    chosen: Family = request.param
    return chosen


def test_decoding_gives_back_what_was_encoded(family: Family) -> None:
    tokenizer, markup = family.tokenizer, family.markup
    for text in (*TEXTS, "x ".join((*markup.special, *markup.plain, ""))):
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text
        assert b"".join(tokenizer.token_bytes[token_id] for token_id in ids) == text.encode()


def test_transformers_loads_the_same_tokenizer(family: Family, tmp_path: Path) -> None:
    family.tokenizer.save(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    assert loaded.chat_template == family.template
    text = rendered(family, [user(TEXTS[0]), assistant("Yes."), user(TEXTS[1])], [TOOL])
    assert loaded.encode(text, add_special_tokens=False) == family.tokenizer.encode(text)
    assert loaded.eos_token == family.eos
    assert (
        loaded.convert_tokens_to_ids(family.eos) in family.tokenizer.eos_ids <= family.tokenizer.special_ids
    )


def test_only_special_markup_is_left_out_of_a_text(family: Family) -> None:
    tokenizer, markup = family.tokenizer, family.markup
    assert tokenizer.special_ids == {
        token_id for text in markup.special for token_id in tokenizer.encode(text)
    }
    ids = tokenizer.encode("".join(markup.special + markup.plain))
    assert len(ids) == len(markup.special + markup.plain)
    assert tokenizer.decode(ids, skip_special_tokens=True) == "".join(markup.plain)


def test_a_begin_is_doubled_when_the_tokenizer_adds_it_to_the_templates(family: Family) -> None:
    text = rendered(family, [user("Hi")])
    plain = family.tokenizer.encode(text)
    begin = [] if family.markup.begin is None else family.tokenizer.encode(family.markup.begin)
    assert plain[: len(begin)] == begin
    assert family.tokenizer.encode(text, add_special_tokens=True) == begin + plain
