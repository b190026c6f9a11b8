"""The model's formats of reasoning and tool calls, from its chat template or from the flags."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

from router_core.errors import SettingsError
from router_core.types import Tokenizer
from slime_openai.parsing.parser import Parser
from slime_openai.parsing.reasoning import REASONING_FORMATS, choose_reasoning
from slime_openai.parsing.tool_calls import CALL_FORMATS, FORCED_CALLS, choose_calls
from slime_openai.requests.chat_request import ChatRequest

__all__ = ["Formats"]

T = TypeVar("T")
_GRAMMARS = ("json_schema", "regex", "ebnf")


class Formats:
    """Makes a parser for each answer. Raises SettingsError for an unknown name of a format."""

    def __init__(self, template: str, tokenizer: Tokenizer, *, calls: str, reasoning: str) -> None:
        self._calls = _named("--tool-call-parser", calls, CALL_FORMATS, choose_calls(template))
        self._reasoning = _named(
            "--reasoning-parser", reasoning, REASONING_FORMATS, choose_reasoning(template)
        )
        format = self._reasoning
        self._thinks_in_special_tokens = format is not None and any(
            _is_special(tokenizer, tag) for tag in (format.start, format.end)
        )

    def parser(self, request: ChatRequest, prompt: str) -> Parser:
        """Return a parser for one answer to ``request``. ``prompt``: the end of the prompt's text."""
        reasoning = self._reasoning if request.separate_reasoning else None
        last = request.messages[-1]
        prefilled = (last.content or "") if request.continue_final_message else ""
        return Parser(
            reasoning=reasoning,
            starts_inside=reasoning is not None and reasoning.starts_inside(prompt, prefilled),
            calls=FORCED_CALLS if request.tools.choice == "required" else self._calls,
            tools=request.tools,
            parallel=request.parallel_tool_calls,
            stop=() if request.sampling.get("no_stop_trim") else request.stop,
            stream_reasoning=request.stream_reasoning,
            # The ids fit the model's own format, also for forced calls: the chat template checks them in the next turn.
            new_id=self._calls.new_id if self._calls else None,
        )

    def thinks_before_grammar(self, request: ChatRequest) -> bool:
        """Return True when the engine must let the model think before a grammar binds its answer."""
        return self._reasoning is not None and any(map(request.sampling.get, _GRAMMARS))

    def needs_special_tokens(self, request: ChatRequest) -> bool:
        """Return True when the engine must return special tokens: some formats are made of them."""
        if request.separate_reasoning and self._thinks_in_special_tokens:
            return True
        return self._calls is not None and bool(request.tools.callable)


def _named(flag: str, name: str, known: Mapping[str, T], found: T | None) -> T | None:
    if name == "auto":
        return found
    if name == "none":
        return None
    if name not in known:
        raise SettingsError(f"{flag} {name}: wanted auto, none, or one of {', '.join(sorted(known))}")
    return known[name]


def _is_special(tokenizer: Tokenizer, tag: str) -> bool:
    ids = list(tokenizer.encode(tag, add_special_tokens=False))
    return tag not in tokenizer.decode(ids, skip_special_tokens=True)
