"""The body of ``/v1/chat/completions``, read once: each parameter honoured, without effect, refused, or unknown."""

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

#: Arguments of transformers' ``apply_chat_template`` that are no variables of a template. A client's own
#: template would be code of a stranger's.
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
    """One question. ``template_kwargs`` are variables for the chat template.

    With ``tools.choice`` "required", ``sampling`` binds the text to the JSON of :func:`calls_schema`: it is a list
    of calls, whatever the model's own format is. Otherwise the model may call ``tools.callable`` in that format.
    Without ``parallel_tool_calls``, which a choice of one tool by name implies, only its first call counts.
    ``input_ids``: the prompt, in place of what the template makes of ``messages``.
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
        raise UnsupportedParameter(f"{param}.{name}", "it is no variable of a chat template")
    return variables


def _input_ids(param: str, value: Any) -> Sequence[int]:
    if value == []:
        raise wrong(param, "token ids, of which there is at least one", value)
    return token_ids(param, value)


def _logprobs(param: str, value: Any) -> bool:
    """0 and 1 are false and true, as in vLLM and SGLang: gateways send a completion's ``logprobs`` here."""
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
    """The request in ``body``, any JSON. Raises InvalidRequest."""
    values, unknown = read_parameters(body, _PARAMETERS)
    if "messages" not in values:
        raise MissingParameter("messages", "the conversation, a list of messages")
    if values.get("add_special_tokens"):
        unknown["add_special_tokens"] = True  # the template has written them
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
    """A grammar binds the whole text, and would leave no room for calls in the model's own format."""
    grammar = grammar_of(values)
    if grammar is not None and tools.callable:
        raise UnsupportedParameter(
            grammar,
            "it binds the whole text, so that no tool could be called; "
            "send it without 'tools', or with 'tool_choice': 'none'",
        )


def _check_ending(values: Mapping[str, Any]) -> None:
    """``continue_final_message`` needs something that can be continued."""
    if not values.get("continue_final_message"):
        return
    last: Message = values["messages"][-1]
    if values.get("add_generation_prompt"):
        raise InvalidRequest(
            "add_generation_prompt",
            "'add_generation_prompt' begins a new message, 'continue_final_message' goes on with the last one.",
        )
    if last.role != "assistant" or not last.content or last.tool_calls:
        raise InvalidRequest(
            "continue_final_message",
            "Wanted an assistant's message with content and no tool calls at the end of 'messages', to go on with.",
        )


def _variables(values: Mapping[str, Any]) -> dict[str, Any]:
    """Variables for the template. ``chat_template_kwargs`` overrules what ``reasoning_effort`` stands for.

    As in SGLang, an effort switches thinking on, and "none" off, under the two names that templates have for it.
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
