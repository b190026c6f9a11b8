"""The tool call format follows from the model's template."""

from __future__ import annotations

import re

from openai_.chat_models.families import MISTRAL
from slime_openai.parsing.deltas import message
from slime_openai.parsing.formats import Formats
from slime_openai.requests.chat_request import read_chat


def test_forced_calls_have_ids_that_the_template_accepts() -> None:
    formats = Formats(MISTRAL.template, MISTRAL.tokenizer, calls="auto", reasoning="auto")
    request = read_chat(
        {
            "messages": [{"role": "user", "content": "?"}],
            "tools": [{"type": "function", "function": {"name": "f"}}],
            "tool_choice": "required",
        }
    )
    parser = formats.parser(request, "")
    answer = message(parser.feed('[{"name": "f", "parameters": {}}]') + parser.finish())
    (call,) = answer.tool_calls
    assert call.id is not None
    assert re.fullmatch("[a-zA-Z0-9]{9}", call.id)
