"""Tool calls in the text of a model.

Each format has a module with its grammar, which reads from a :class:`slime_openai.parsing.source.Source`. Formats share
the grammars in ``calls``. ``values`` converts bare text to JSON.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from slime_openai.parsing.deltas import Writer, new_call_id
from slime_openai.parsing.source import Reading, Source
from slime_openai.parsing.tool_calls import deepseek, hermes, json_array, llama3, mistral, qwen3_coder

__all__ = ["CALL_FORMATS", "FORCED_CALLS", "CallFormat", "choose_calls"]


@dataclass(frozen=True, slots=True)
class CallFormat:
    """The tool call format of a family of models. ``new_id`` makes ids that the family's chat templates accept."""

    name: str
    read: Callable[[Source, Writer], Reading[None]]
    new_id: Callable[[], str] = new_call_id


#: The format of answers in which ``tool_choice`` forces a call: the JSON schema allows nothing else.
FORCED_CALLS = CallFormat("json", json_array.read)

#: Formats by their names in SGLang's ``--tool-call-parser`` (``function_call/function_call_parser.py``).
CALL_FORMATS = {
    format.name: format
    for format in (
        CallFormat("deepseekv3", deepseek.read_v3),
        CallFormat("deepseekv31", deepseek.read_v31),
        CallFormat("hermes", hermes.read),
        CallFormat("llama3", llama3.read),
        CallFormat("mistral", mistral.read, mistral.new_id),
        CallFormat("qwen", hermes.read),
        CallFormat("qwen25", hermes.read),
        CallFormat("qwen3_coder", qwen3_coder.read),
        CallFormat("step3p5", qwen3_coder.read),
    )
}


def choose_calls(template: str) -> CallFormat | None:
    """Return the format in which a chat template writes calls; None if it writes no calls, or has an unknown format.

    ``<tool_call>`` means Hermes only if other known tags are missing: Qwen3-Coder and GLM-4.5 also have this tag.
    """
    name = None
    if "[TOOL_CALLS]" in template:
        name = "mistral"
    elif "<｜tool▁calls▁begin｜>" in template:
        name = "deepseekv3" if "```json" in template else "deepseekv31"
    elif "<function=" in template and "<parameter=" in template:
        name = "qwen3_coder"
    elif "<tool_call>" in template and "<arg_key>" not in template:
        name = "qwen25"
    elif "<|start_header_id|>" in template and '"parameters": ' in template:
        name = "llama3"
    return CALL_FORMATS[name] if name else None
