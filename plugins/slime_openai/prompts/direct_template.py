"""Rendering by a tokenizer's chat template, without the copies that transformers makes of all values.

transformers copies messages, tools and variables, value by value, before a template reads them, since a caller may pass
objects of any type. The values of a chat request are plain JSON, and a template cannot change them.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Mapping, Sequence
from typing import Any

from slime_openai.prompts.template_attributes import with_short_lookups

__all__ = ["DirectTemplate"]

logger = logging.getLogger(__name__)

_HOME = "transformers.tokenization_utils_base"
#: This many texts at the beginning, and later one in ``_COMPARED_EVERY``, are also rendered by transformers, to compare
#: the results. Most texts at the beginning are those of the router's own probes of the template.
_COMPARED_FIRST = 100
_COMPARED_EVERY = 101
#: A message with this key gets further keys from transformers.
_THOUGHTS = "reasoning_content"


class DirectTemplate:
    """The chat template in ``source``, or that of ``tokenizer``, which must have a method ``apply_chat_template``.

    This method renders all messages if the tokenizer does not come from transformers, or has several named templates.
    """

    def __init__(self, tokenizer: Any, source: str | None) -> None:
        self._tokenizer = tokenizer
        self._apply: Any = tokenizer.apply_chat_template
        self._override = {} if source is None else {"chat_template": source}
        self._compiled: Any = None
        #: Names that the template may use in every text: functions, and the tokenizer's special tokens.
        self._globals: dict[str, Any] = {}
        #: Names of arguments of transformers' functions. If a variable has such a name, transformers renders.
        self._reserved = {"messages", "self"}
        self._rendered = 0
        known = getattr(tokenizer, "chat_template", None)
        template = known if source is None else source
        if (
            getattr(self._apply, "__module__", "") == _HOME
            and isinstance(template, str)
            and not isinstance(known, dict)
        ):
            self._compile(template)

    def _compile(self, template: str) -> None:
        try:
            # The tokenizer has loaded this module. _compile_jinja_template is private: another version may lack it.
            from transformers.utils.chat_template_utils import _compile_jinja_template, render_jinja_template

            environment = with_short_lookups(_compile_jinja_template(template).environment)
            self._compiled = environment.from_string(template)
            self._globals = {**self._compiled.globals, **self._tokenizer.special_tokens_map}
            for function in (self._apply, render_jinja_template):
                self._reserved.update(inspect.signature(function).parameters)
        except Exception:  # also an error in the template, which transformers reports later
            self._compiled = None

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        variables: Mapping[str, Any],
        *,
        add_generation_prompt: bool,
    ) -> Any:
        """Return the text of ``messages``. Raises what the template raises."""
        text: Any = None
        if self._compiled is not None and self._reserved.isdisjoint(variables) and _are_plain(messages):
            self._rendered += 1
            text = self._directly(messages, tools, variables, add_generation_prompt)
            if text is not None and self._rendered > _COMPARED_FIRST and self._rendered % _COMPARED_EVERY:
                return text
        whole = self._apply(
            messages,
            tools=tools,
            add_generation_prompt=add_generation_prompt,
            tokenize=False,
            **self._override,
            **variables,
        )
        if text is not None and text != whole:
            self._compiled = None
            logger.error(
                "from now on, transformers renders all messages: a template gave two texts for the same messages"
            )
        return whole

    def _directly(
        self, messages: Any, tools: Any, variables: Mapping[str, Any], add_generation_prompt: bool
    ) -> Any:
        """Return the text of ``messages``; None if the template raises an error. Then transformers raises it again."""
        compiled = self._compiled
        values = {
            **self._globals,
            "messages": messages,
            "tools": tools,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
            **variables,
        }
        try:
            return compiled.environment.concat(
                compiled.root_render_func(compiled.new_context(values, shared=True))
            )
        except Exception:
            return None


def _are_plain(messages: Sequence[Mapping[str, Any]]) -> bool:
    """Return True if transformers would copy ``messages`` unchanged: no value is None, no message has ``_THOUGHTS``."""
    return not [message for message in messages if _THOUGHTS in message or None in message.values()]
