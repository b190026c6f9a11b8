"""Families of chat models: each one's template and tokenizer, and how its models write what they have to say."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from openai_.chat_models.tokenizer import ChatTokenizer, MarkupTokens

__all__ = [
    "DEEPSEEK",
    "FAMILIES",
    "LLAMA",
    "MISTRAL",
    "QWEN2_5",
    "QWEN3",
    "QWEN3_PLAIN",
    "Call",
    "Family",
    "Words",
]


@dataclass(frozen=True)
class Call:
    """A tool call; ``arguments`` is JSON as the model spells it: its own spaces, order and escapes."""

    name: str
    arguments: str


@dataclass(frozen=True)
class Words:
    """A model's answer. ``thoughts`` None: nothing between thinking tags, nor the tags."""

    content: str = ""
    thoughts: str | None = None
    calls: tuple[Call, ...] = ()


@dataclass(frozen=True)
class Family:
    """``variables`` are the ``chat_template_kwargs`` of each request; the parsers have SGLang's names.

    Without a ``reasoning_parser`` its models do not think.
    """

    name: str
    template_name: str
    markup: MarkupTokens = field(repr=False)
    write: Callable[[Words, str], str] = field(repr=False)
    tool_parser: str
    reasoning_parser: str | None = None
    parallel_calls: bool = True
    variables: Mapping[str, Any] = field(default_factory=dict)

    @cached_property
    def template(self) -> str:
        """Source of the chat template."""
        path = Path(__file__).parent / "templates" / f"{self.template_name}.jinja"
        return path.read_text(encoding="utf-8")

    @cached_property
    def tokenizer(self) -> ChatTokenizer:
        """With the template; trained once, for all tests."""
        return ChatTokenizer(self.markup, self.template)

    @property
    def eos(self) -> str:
        """The token with which its models end an answer."""
        return self.markup.ends[0]

    def says(self, words: Words, prompt: str) -> str:
        """The text that its models sample behind ``prompt``, without the end token.

        Thoughts are left out by models that do not think, or that were told not to.
        """
        return self.write(words, prompt)


def _calls_in_tags(words: Words) -> str:
    calls = [f'{{"name": "{call.name}", "arguments": {call.arguments}}}' for call in words.calls]
    tagged = [f"<tool_call>\n{call}\n</tool_call>" for call in calls]
    return "\n".join([words.content] * bool(words.content) + tagged)


def _qwen2_5(words: Words, prompt: str) -> str:
    return _calls_in_tags(words)


def _qwen3(words: Words, prompt: str) -> str:
    if words.thoughts is None or prompt.endswith("</think>\n\n"):
        return _calls_in_tags(words)
    return f"<think>\n{words.thoughts}\n</think>\n\n{_calls_in_tags(words)}"


def _llama3(words: Words, prompt: str) -> str:
    calls = [f'{{"name": "{call.name}", "parameters": {call.arguments}}}' for call in words.calls]
    return words.content + "<|python_tag|>" * bool(words.content and calls) + "; ".join(calls)


def _mistral(words: Words, prompt: str) -> str:
    calls = [f'{{"name": "{call.name}", "arguments": {call.arguments}}}' for call in words.calls]
    content = f" {words.content}" if words.content else ""
    return content + (f"[TOOL_CALLS] [{', '.join(calls)}]" if calls else "")


def _deepseek(words: Words, prompt: str) -> str:
    calls = [
        f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{call.name}\n```json\n{call.arguments}\n```<｜tool▁call▁end｜>"
        for call in words.calls
    ]
    opened = prompt.endswith("<think>\n")  # then it has to close its thoughts, if it has any or not
    thoughts = ("" if opened else "<think>\n") + f"{words.thoughts or ''}\n</think>\n\n"
    thinks = opened or words.thoughts is not None
    tagged = f"<｜tool▁calls▁begin｜>{chr(10).join(calls)}<｜tool▁calls▁end｜>" if calls else ""
    return thoughts * thinks + words.content + tagged


_TOOL_TAGS = ("<tool_call>", "</tool_call>")
_CHATML = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_QWEN_ENDS = ("<|im_end|>", "<|endoftext|>")
_THINKING_QWEN = MarkupTokens(_CHATML, ("<think>", "</think>", *_TOOL_TAGS), _QWEN_ENDS)

QWEN2_5 = Family("qwen2.5", "qwen2_5", MarkupTokens(_CHATML, _TOOL_TAGS, _QWEN_ENDS), _qwen2_5, "qwen25")
QWEN3 = Family("qwen3", "qwen3", _THINKING_QWEN, _qwen3, "qwen25", "qwen3")
#: Qwen3, told not to think.
QWEN3_PLAIN = Family(
    "qwen3-plain", "qwen3", _THINKING_QWEN, _qwen3, "qwen25", "qwen3", variables={"enable_thinking": False}
)
LLAMA = Family(
    "llama3.1",
    "llama3_1",
    MarkupTokens(
        (
            "<|begin_of_text|>",
            "<|end_of_text|>",
            "<|start_header_id|>",
            "<|end_header_id|>",
            "<|eom_id|>",
            "<|eot_id|>",
            "<|python_tag|>",
        ),
        (),
        ("<|eot_id|>", "<|end_of_text|>", "<|eom_id|>"),
        begin="<|begin_of_text|>",
        digits=3,
    ),
    _llama3,
    "llama3",
    parallel_calls=False,
)
#: ``[TOOL_CALLS]`` is special: to be seen, it needs ``skip_special_tokens=false``.
MISTRAL = Family(
    "mistral",
    "mistral",
    MarkupTokens(
        (
            "<s>",
            "</s>",
            "[INST]",
            "[/INST]",
            "[TOOL_CALLS]",
            "[AVAILABLE_TOOLS]",
            "[/AVAILABLE_TOOLS]",
            "[TOOL_RESULTS]",
            "[/TOOL_RESULTS]",
        ),
        (),
        ("</s>",),
        begin="<s>",
    ),
    _mistral,
    "mistral",
)
DEEPSEEK = Family(
    "deepseek-r1",
    "deepseek_r1",
    MarkupTokens(
        ("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"),
        (
            "<think>",
            "</think>",
            "<｜User｜>",
            "<｜Assistant｜>",
            "<｜tool▁calls▁begin｜>",
            "<｜tool▁calls▁end｜>",
            "<｜tool▁call▁begin｜>",
            "<｜tool▁call▁end｜>",
            "<｜tool▁outputs▁begin｜>",
            "<｜tool▁outputs▁end｜>",
            "<｜tool▁output▁begin｜>",
            "<｜tool▁output▁end｜>",
            "<｜tool▁sep｜>",
        ),
        ("<｜end▁of▁sentence｜>",),
        begin="<｜begin▁of▁sentence｜>",
        digits=3,
    ),
    _deepseek,
    "deepseekv3",
    "deepseek-r1",
)
FAMILIES = (QWEN2_5, QWEN3, QWEN3_PLAIN, LLAMA, MISTRAL, DEEPSEEK)
