"""The body of ``/v1/chat/completions``, read once.

A parameter is honoured, or accepted without an effect, or refused, or unknown.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from slime_openai.errors import InvalidRequest, MissingParameter, UnsupportedParameter, wrong
from slime_openai.requests.fields import (
    Reader,
    boolean,
    integer,
    is_int,
    mapping,
    one_of,
    read_parameters,
    token_ids,
)
from slime_openai.requests.messages import Message, read_messages
from slime_openai.requests.options import COMMON, NO_EFFECT, REFUSED, Options, common_options
from slime_openai.requests.sampling import grammar_of
from slime_openai.requests.tools import Tools, calls_schema, choose, read_tool_choice, read_tools

__all__ = ["ChatRequest", "read_chat"]

#: Arguments of transformers' ``apply_chat_template`` that are no template variables. Among them is
#: ``chat_template``: a client's own template would be untrusted code.
_NOT_VARIABLES = frozenset(
    (
        "add_generation_prompt",
        "chat_template",
        "continue_final_message",
        "conversation",
        "documents",
        "max_length",
        "messages",
        "padding",
        "return_assistant_tokens_mask",
        "return_dict",
        "return_tensors",
        "self",
        "tokenize",
        "tokenizer_kwargs",
        "tools",
        "truncation",
    )
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatRequest(Options):
    """A chat request. ``template_kwargs``: variables for the chat template.

    With ``tools.choice`` "required", ``sampling`` has the JSON schema of :func:`calls_schema`: the answer is a list of
    calls in JSON, not in the model's own format. Otherwise the model may call ``tools.callable`` in its own format.
    If ``parallel_tool_calls`` is False, only the first call counts. The value is False, too, if the client chose one
    tool by name. ``input_ids``: the prompt, instead of the rendered ``messages``.
    """

    messages: tuple[Message, ...]
    tools: Tools
    input_ids: Sequence[int] | None = None
    parallel_tool_calls: bool = True
    logprobs: bool = False
    top_logprobs: int = 0
    template_kwargs: dict[str, Any] = field(default_factory=dict)
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    separate_reasoning: bool = True
    stream_reasoning: bool = True


def _template_kwargs(param: str, value: Any) -> dict[str, Any]:
    variables = mapping(param, value)
    for name in sorted(_NOT_VARIABLES & variables.keys()):
        raise UnsupportedParameter(f"{param}.{name}", "it is not a variable of a chat template")
    return variables


def _input_ids(param: str, value: Any) -> Sequence[int]:
    if value == []:
        raise wrong(param, "a list of at least one token id", value)
    return token_ids(param, value)


def _logprobs(param: str, value: Any) -> bool:
    """Read 0 and 1 as false and true, as vLLM and SGLang do: gateways send a completion's ``logprobs`` here."""
    return bool(_zero_or_one(param, value)) if is_int(value) else boolean(param, value)


_zero_or_one = integer(0, 1)

#: The parameters of a chat request that are honoured.
HONOURED: Mapping[str, Reader] = {
    **COMMON,
    "add_generation_prompt": boolean,
    "add_special_tokens": boolean,
    "chat_template_kwargs": _template_kwargs,
    "continue_final_message": boolean,
    "enable_thinking": boolean,
    "input_ids": _input_ids,
    "logprobs": _logprobs,
    "max_completion_tokens": integer(1),
    "messages": lambda param, value: read_messages(value, param),
    "parallel_tool_calls": boolean,
    "reasoning_effort": one_of("none", "minimal", "low", "medium", "high", "xhigh", "max"),
    "separate_reasoning": boolean,
    "stream_reasoning": boolean,
    "tool_choice": read_tool_choice,
    "tools": read_tools,
    "top_logprobs": integer(0, 20),
}
_PARAMETERS: Mapping[str, Reader] = {**HONOURED, **NO_EFFECT, **REFUSED}


def read_chat(body: Any) -> ChatRequest:
    """Return the request in ``body``, which may be any JSON. Raises InvalidRequest."""
    values, unknown = read_parameters(body, _PARAMETERS)
    if "messages" not in values:
        raise MissingParameter("messages", "the conversation, a list of messages")
    if values.get("add_special_tokens"):
        unknown["add_special_tokens"] = True  # the template writes the special tokens
    options = common_options(values, unknown, max_tokens=None)
    mode, name = values.get("tool_choice", ("auto", None))
    tools = choose(values.get("tools", ()), mode, name)
    several = name is None and values.get("parallel_tool_calls", True)
    _check_grammar(values, tools)
    if tools.choice == "required":
        options["sampling"]["json_schema"] = calls_schema(tools, several=several)
    if "top_logprobs" in values and not values.get("logprobs"):
        raise InvalidRequest("top_logprobs", "'top_logprobs' is only allowed together with 'logprobs'.")
    _check_ending(values)
    return ChatRequest(
        messages=values["messages"],
        tools=tools,
        input_ids=values.get("input_ids"),
        parallel_tool_calls=several,
        logprobs=values.get("logprobs", False),
        top_logprobs=values.get("top_logprobs", 0),
        template_kwargs=_variables(values),
        add_generation_prompt=values.get("add_generation_prompt", not values.get("continue_final_message")),
        continue_final_message=values.get("continue_final_message", False),
        separate_reasoning=values.get("separate_reasoning", True),
        stream_reasoning=values.get("stream_reasoning", True),
        **options,
    )


def _check_grammar(values: Mapping[str, Any], tools: Tools) -> None:
    """Refuse a grammar beside callable tools: it binds the whole text and so forbids calls in the model's format."""
    grammar = grammar_of(values)
    if grammar is not None and tools.callable:
        raise UnsupportedParameter(
            grammar,
            "it binds the whole text, so that no tool could be called; "
            "send it without 'tools', or with 'tool_choice': 'none'",
        )


def _check_ending(values: Mapping[str, Any]) -> None:
    """Check that ``continue_final_message`` has a last message that can be continued."""
    if not values.get("continue_final_message"):
        return
    last: Message = values["messages"][-1]
    if values.get("add_generation_prompt"):
        raise InvalidRequest(
            "add_generation_prompt",
            "'add_generation_prompt' begins a new message, 'continue_final_message' continues the last one.",
        )
    if last.role != "assistant" or not last.content or last.tool_calls:
        raise InvalidRequest(
            "continue_final_message",
            "Wanted an assistant's message with content and no tool calls at the end of 'messages', to be continued.",
        )


def _variables(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return variables for the template. ``chat_template_kwargs`` overrides the variables of ``reasoning_effort``.

    As in SGLang, the effort "none" switches thinking off, and any other effort switches it on. The switch has two
    names in templates: ``thinking`` and ``enable_thinking``.
    """
    variables: dict[str, Any] = {}
    effort = values.get("reasoning_effort")
    if effort is not None:
        thinks = effort != "none"
        variables = {"reasoning_effort": effort, "thinking": thinks, "enable_thinking": thinks}
    given: dict[str, Any] = values.get("chat_template_kwargs", {})
    if "enable_thinking" in values:
        thinks = values["enable_thinking"]
        if given.get("enable_thinking", thinks) is not thinks:
            raise InvalidRequest(
                "enable_thinking", "'enable_thinking' and 'chat_template_kwargs.enable_thinking' differ."
            )
        variables["enable_thinking"] = thinks
    return {**variables, **given}
