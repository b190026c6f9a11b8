from __future__ import annotations

import pytest

from slime_openai.parsing.deltas import Content, Delta, Reasoning, message
from slime_openai.parsing.parser import Parser
from slime_openai.parsing.reasoning import REASONING_FORMATS, choose_reasoning
from slime_openai.parsing.tool_calls import CALL_FORMATS, FORCED_CALLS
from slime_openai.requests.tools import Tools

QWEN3 = REASONING_FORMATS["qwen3"]
SEARCH = Tools(({"type": "function", "function": {"name": "search"}},), "auto", frozenset(("search",)))


def split(
    text: str, *, name: str = "qwen3", inside: bool = False, size: int = 1
) -> tuple[str | None, str | None]:
    """Reasoning and content of ``text``, fed in pieces of ``size``."""
    parser = Parser(reasoning=REASONING_FORMATS[name], starts_inside=inside)
    deltas: list[Delta] = []
    for begin in range(0, len(text), size):
        deltas += parser.feed(text[begin : begin + size])
    whole = message(deltas + parser.finish())
    return whole.reasoning, whole.content


@pytest.mark.parametrize("size", [1, 2, 7, 1000])
@pytest.mark.parametrize(
    ("text", "inside", "expected"),
    [
        ("<think>\nHm. 2+2?\n</think>\n\nFour.", False, ("Hm. 2+2?", "Four.")),
        ("Hm. 2+2?\n</think>\n\nFour.", True, ("Hm. 2+2?", "Four.")),
        ("\n<think>Hm.</think>Four.\n", True, ("Hm.", "Four.\n")),
        ("<think>\n\n</think>\n\nFour.", False, (None, "Four.")),
        ("Four.\n", False, (None, "Four.\n")),
        (" \n<thin ice", False, (None, " \n<thin ice")),
        (
            "The tag <think> begins </think> thoughts.",
            False,
            (None, "The tag <think> begins </think> thoughts."),
        ),
        (
            "<think>a\n\nb <b>bold</b> </thin\n\n</think>\n<think>",
            False,
            ("a\n\nb <b>bold</b> </thin", "<think>"),
        ),
        ("<think>cut \U0001f914 here\n", False, ("cut \U0001f914 here\n", "")),
        ("<think>cut</thi", False, ("cut</thi", "")),
        ("cut", True, ("cut", "")),
        ("<think>Hm.</think>", False, ("Hm.", "")),
        ("<think>Hm.</think>\n\n", False, ("Hm.", "")),
        ("", True, (None, "")),
    ],
)
def test_thoughts_are_told_from_the_answer(
    text: str, inside: bool, expected: tuple[str | None, str], size: int
) -> None:
    assert split(text, inside=inside, size=size) == expected


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("kimi", "◁think▷Hm.◁/think▷Four."),
        ("mistral", "[THINK]Hm.[/THINK]Four."),
        ("deepseek-r1", "<think>\nHm.\n</think>\n\nFour."),
        ("deepseek-v3", "<think>Hm.</think>Four."),
    ],
)
def test_families_have_their_tags(name: str, text: str) -> None:
    assert split(text, name=name) == ("Hm.", "Four.")


def test_thoughts_are_streamed_and_only_what_may_be_a_tag_waits() -> None:
    parser = Parser(reasoning=QWEN3, starts_inside=True)
    assert parser.feed("Let me") == [Reasoning("Let me")]
    assert parser.feed(" see\n") == [Reasoning(" see")]
    assert parser.feed("</th") == []
    assert parser.feed("ey") == [Reasoning("\n</they")]
    assert parser.feed("</think>\n") == []
    assert parser.feed("\nFour") == [Content("Four")]


def test_thoughts_come_in_one_piece_when_they_shall_not_be_streamed() -> None:
    parser = Parser(reasoning=QWEN3, stream_reasoning=False)
    assert parser.feed("<think>Let me") == []
    assert parser.feed(" see") == []
    assert parser.feed(".</think>") == [Reasoning("Let me see.")]
    assert parser.feed("Four.") == [Content("Four.")]


def test_cut_reasoning_comes_at_the_end_when_it_is_not_streamed() -> None:
    parser = Parser(reasoning=QWEN3, stream_reasoning=False)
    assert parser.feed("<think>Let me") == []
    assert parser.finish() == [Reasoning("Let me")]


def test_without_a_format_tags_are_content() -> None:
    parser = Parser()
    assert parser.feed("<think>Hm.</think>Four.") == [Content("<think>Hm.</think>Four.")]


CALL = '<tool_call>\n{"name": "search", "arguments": {}}\n</tool_call>'


def test_a_call_ends_thoughts_whose_end_was_forgotten() -> None:
    parser = Parser(reasoning=QWEN3, starts_inside=True, calls=CALL_FORMATS["qwen25"], tools=SEARCH)
    whole = message(parser.feed(f"I'll search.\n{CALL}") + parser.finish())
    assert (whole.reasoning, whole.content) == ("I'll search.", None)
    assert [call.name for call in whole.tool_calls] == ["search"]


def test_thoughts_about_calls_stay_thoughts_where_nothing_can_be_called() -> None:
    parser = Parser(reasoning=QWEN3, starts_inside=True, calls=CALL_FORMATS["qwen25"])
    whole = message(parser.feed(f"{CALL}</think>Done.") + parser.finish())
    assert (whole.reasoning, whole.content) == (CALL, "Done.")


@pytest.mark.parametrize(
    ("text", "thoughts"),
    [
        ('[{"name": "search", "parameters": {}}]', None),
        ('\n[ {"name": "search", "parameters": {}}]', None),
        ('Hm.\n</think>\n\n[{"name": "search", "parameters": {}}]', "Hm."),
        ('[1] Hm.\n</think>\n\n[{"name": "search", "parameters": {}}]', "[1] Hm."),
    ],
)
def test_a_forced_call_may_leave_no_room_for_thoughts(text: str, thoughts: str | None) -> None:
    parser = Parser(reasoning=QWEN3, starts_inside=True, calls=FORCED_CALLS, tools=SEARCH)
    whole = message([delta for character in text for delta in parser.feed(character)] + parser.finish())
    assert (whole.reasoning, whole.content) == (thoughts, None)
    assert [call.name for call in whole.tool_calls] == ["search"]


@pytest.mark.parametrize(
    ("name", "prompt", "prefilled", "inside"),
    [
        ("qwen3", "<|im_start|>assistant\n", "", False),
        ("qwen3", "<|im_start|>assistant\n<think>\n", "", True),
        ("qwen3", "<|im_start|>assistant\n<think>\n\n</think>\n\n", "", False),
        ("qwen3", "What is <think>?<|im_end|>\n<|im_start|>assistant\n", "", False),
        ("qwen3", "<|im_start|>assistant\n<think>\nHm", "<think>\nHm", True),
        ("qwen3", "<|im_start|>assistant\n<think>\nHm</think>Fo", "<think>\nHm</think>Fo", False),
        ("qwen3", "<|im_start|>assistant\n<think>\nHm, I", "Hm, I", True),
        ("qwen3-thinking", "<|im_start|>assistant\n", "", True),
        ("deepseek-r1", "<｜Assistant｜>", "", True),
        ("deepseek-r1", "<｜Assistant｜></think>", "", False),
        ("deepseek-r1", "<｜Assistant｜><think>\nHm</think>Fo", "<think>\nHm</think>Fo", False),
        ("deepseek-v3", "<｜Assistant｜></think>", "", False),
        ("deepseek-v3", "<｜Assistant｜><think>", "", True),
    ],
)
def test_the_prompt_tells_whether_the_answer_begins_within_thoughts(
    name: str, prompt: str, prefilled: str, inside: bool
) -> None:
    assert REASONING_FORMATS[name].starts_inside(prompt, prefilled) is inside


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ("{{ '<|im_start|>' + message.role + '\\n' + message.content }}", None),
        ("{{ content.split('</think>')[-1].lstrip('\\n') }}", "qwen3"),
        ("{{ '<think>\\n\\n</think>\\n\\n' }}", "qwen3"),
        ("{{ '<｜Assistant｜>' + content.split('</think>')[-1] }}", "deepseek-v3"),
        ("{{ '[THINK]' + block.thinking + '[/THINK]' }}", "mistral"),
        ("{{ '◁think▷◁/think▷' }}", "kimi"),
        ("{{ '<seed:think>' }}", None),
    ],
)
def test_the_chat_template_tells_how_a_model_thinks(template: str, name: str | None) -> None:
    found = choose_reasoning(template)
    assert (found and found.name) == name
