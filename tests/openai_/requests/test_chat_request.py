"""The body of a chat request: every parameter honoured, known to be without effect, or refused by name."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from typing import Any

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slime_openai.errors import InvalidRequest, UnsupportedParameter
from slime_openai.requests.chat_request import HONOURED, ChatRequest, read_chat
from slime_openai.requests.messages import Message
from slime_openai.requests.options import NO_EFFECT, REFUSED
from slime_openai.requests.tools import Tools

USER = {"role": "user", "content": "Hello."}
SILENT = {"role": "assistant", "content": ""}
CALLING = {"role": "assistant", "content": "a", "tool_calls": [{"function": {"name": "f", "arguments": ""}}]}
HALF = [USER, {"role": "assistant", "content": "Well"}]
TOOL = {"type": "function", "function": {"name": "find", "parameters": {"type": "object"}}}
OTHER = {"type": "function", "function": {"name": "other"}}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
#: More levels than orjson writes.
DEEP: dict[str, Any] = {}
for _ in range(300):
    DEEP = {"items": DEEP}


def read(**parameters: Any) -> ChatRequest:
    return read_chat({"messages": [USER], **parameters})


def refusal(**parameters: Any) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as raised:
        read(**parameters)
    return raised.value


def test_a_bare_request_has_openais_defaults() -> None:
    assert read() == ChatRequest(
        messages=(Message("user", "Hello."),),
        tools=Tools(),
        model=None,
        stream=False,
        include_usage=False,
        sampling={"max_new_tokens": None},
        engine={},
        parallel_tool_calls=True,
        logprobs=False,
        top_logprobs=0,
        template_kwargs={},
        add_generation_prompt=True,
        continue_final_message=False,
        separate_reasoning=True,
        stream_reasoning=True,
        return_token_ids=False,
        return_routed_experts=False,
        rid=None,
        session=None,
    )
    assert (read().n, read().stop) == (1, ())


#: A value of each parameter that shows, and what else the request needs for it.
EFFECTS: dict[str, tuple[Any, dict[str, Any]]] = {
    "add_generation_prompt": (False, {}),
    "add_special_tokens": (True, {}),
    "bootstrap_host": ("h", {}),
    "bootstrap_port": ([1, 2], {}),
    "bootstrap_room": (7, {}),
    "cache_salt": ("s", {}),
    "chat_template_kwargs": ({"x": 1}, {}),
    "continue_final_message": (True, {"messages": HALF}),
    "custom_labels": ({"run": "7"}, {}),
    "custom_logit_processor": ("p", {}),
    "custom_params": ({"x": 1}, {}),
    "data_parallel_rank": (1, {}),
    "disagg_prefill_dp_rank": (1, {}),
    "ebnf": ('root ::= "a"', {}),
    "enable_thinking": (False, {}),
    "extra_key": ("k", {}),
    "frequency_penalty": (0.5, {}),
    "ignore_eos": (True, {}),
    "include_stop_str_in_output": (True, {}),
    "input_ids": ([5, 0], {}),
    "json_schema": ('{"type": "object"}', {}),
    "logit_bias": ({"5": -100}, {}),
    "logprobs": (True, {}),
    "lora_path": ("l", {}),
    "max_completion_tokens": (7, {}),
    "max_tokens": (7, {}),
    "messages": ([{"role": "user", "content": "Bye."}], {}),
    "min_p": (0.1, {}),
    "min_tokens": (3, {}),
    "model": ("m", {}),
    "n": (2, {}),
    "ngram_corpus_id": ("c", {}),
    "no_stop_trim": (True, {}),
    "parallel_tool_calls": (False, {"tools": [TOOL]}),
    "presence_penalty": (-0.5, {}),
    "priority": (3, {}),
    "reasoning_effort": ("low", {}),
    "regex": ("a+", {}),
    "repetition_penalty": (1.1, {}),
    "response_format": ({"type": "json_object"}, {}),
    "request_id": ("r", {}),
    "return_hidden_states": ("last", {}),
    "return_indexer_topk": (True, {}),
    "return_meta_info": (True, {}),
    "return_prompt_token_ids": (True, {}),
    "return_routed_experts": (True, {}),
    "return_token_ids": (True, {}),
    "return_tokens_as_token_ids": (True, {}),
    "rid": ("r", {}),
    "routed_dp_rank": (0, {}),
    "routed_experts_start_len": (5, {}),
    "seed": (1, {}),
    "separate_reasoning": (False, {}),
    "session_id": ("s", {}),
    "skip_special_tokens": (False, {}),
    "spaces_between_special_tokens": (False, {}),
    "stop": ("x", {}),
    "stop_token_ids": ([1], {}),
    "stream": (True, {}),
    "stream_options": ({"include_usage": True}, {"stream": True}),
    "stream_reasoning": (False, {}),
    "temperature": (0.7, {}),
    "tool_choice": ("required", {"tools": [TOOL]}),
    "tools": ([TOOL], {}),
    "top_k": (20, {}),
    "top_logprobs": (3, {"logprobs": True}),
    "top_p": (0.9, {}),
}
WITHOUT_EFFECT: dict[str, Any] = {
    "metadata": {"run": "7"},
    "modalities": ["text"],
    "prompt_cache_key": "k",
    "prompt_cache_options": {"mode": "explicit"},
    "prompt_cache_retention": "24h",
    "safety_identifier": "s",
    "service_tier": "default",
    "store": False,
    "user": "u",
    "verbosity": "medium",
}


def test_the_tables_of_this_file_are_complete() -> None:
    assert EFFECTS.keys() == HONOURED.keys()
    assert WITHOUT_EFFECT.keys() == NO_EFFECT.keys()
    assert not HONOURED.keys() & NO_EFFECT.keys()
    assert not REFUSED.keys() & (HONOURED.keys() | NO_EFFECT.keys())


@pytest.mark.parametrize("name", HONOURED)
def test_every_honoured_parameter_changes_the_request(name: str) -> None:
    value, needs = EFFECTS[name]
    assert read(**{**needs, name: value}) != read(**needs)


@pytest.mark.parametrize("name", NO_EFFECT)
def test_a_parameter_without_effect_is_accepted_and_checked(name: str) -> None:
    assert read(**{name: WITHOUT_EFFECT[name]}) == read()
    assert refusal(**{name: 5}).param == name


@pytest.mark.parametrize("name", REFUSED)
def test_unsupported_parameter_is_refused_by_name(name: str) -> None:
    error = refusal(**{name: {}})
    assert isinstance(error, UnsupportedParameter)
    assert error.param == name
    assert f"'{name}'" in str(error)


@pytest.mark.parametrize("name", [*HONOURED, *NO_EFFECT, *REFUSED, "nobody_knows"])
def test_null_is_the_same_as_nothing(name: str) -> None:
    if name != "messages":
        assert read(**{name: None}) == read()


#: Parameters of openai 3.52, ``CompletionCreateParamsBase``.
OPENAI = """audio frequency_penalty function_call functions logit_bias logprobs max_completion_tokens max_tokens
messages metadata modalities model moderation n parallel_tool_calls prediction presence_penalty prompt_cache_key
prompt_cache_options prompt_cache_retention reasoning_effort response_format safety_identifier seed service_tier stop
store stream stream_options temperature tool_choice tools top_logprobs top_p user verbosity web_search_options"""


def test_every_parameter_of_openai_is_known() -> None:
    assert set(OPENAI.split()) <= HONOURED.keys() | NO_EFFECT.keys() | REFUSED.keys()


@pytest.mark.parametrize("top_k", [0, -1])
def test_no_top_k_is_all_tokens(top_k: int) -> None:
    assert read(top_k=top_k).sampling["top_k"] == -1


def test_parameters_are_renamed_for_the_engine() -> None:
    request = read(
        model="m",
        max_completion_tokens=9,
        max_tokens=9,
        min_tokens=2,
        seed=-5,
        n=3,
        stop="end",
        temperature=0,
        top_p=1,
        top_k=-1,
        logit_bias={"15": -100, "0": 2.5},
        lora_path="l",
        priority=-1,
        session_id="s",
    )
    assert request.sampling == {
        "max_new_tokens": 9,
        "min_new_tokens": 2,
        "sampling_seed": -5,
        "n": 3,
        "stop": ["end"],
        "temperature": 0,
        "top_p": 1,
        "top_k": -1,
        "logit_bias": {"15": -100, "0": 2.5},
    }
    assert request.engine == {"lora_path": "l", "priority": -1}
    assert (request.n, request.stop, request.session) == (3, ("end",), "s")


def test_response_formats_become_schemas() -> None:
    schema = {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA, "strict": True}}
    assert orjson.loads(read(response_format=schema).sampling["json_schema"]) == SCHEMA
    assert read(response_format={"type": "json_object"}).sampling["json_schema"] == '{"type":"object"}'
    assert read(response_format={"type": "text"}, regex="a+").sampling == {
        "max_new_tokens": None,
        "regex": "a+",
    }


def test_a_forced_call_binds_the_text_to_its_json() -> None:
    tools = [TOOL, OTHER]
    required = read(tools=tools, tool_choice="required")
    schema = orjson.loads(required.sampling["json_schema"])
    assert list(schema["$defs"]) == ["find", "other"]
    assert "maxItems" not in schema
    one = read(tools=tools, tool_choice="required", parallel_tool_calls=False)
    assert orjson.loads(one.sampling["json_schema"])["maxItems"] == 1


def test_a_call_by_name_is_one_call() -> None:
    request = read(tools=[TOOL, OTHER], tool_choice={"type": "function", "function": {"name": "other"}})
    schema = orjson.loads(request.sampling["json_schema"])
    assert list(schema["$defs"]) == ["other"]
    assert schema["maxItems"] == 1
    assert not request.parallel_tool_calls
    assert request.tools == Tools((TOOL, OTHER), "required", frozenset(("other",)))


def test_tools_that_may_be_called_leave_the_text_free() -> None:
    assert read(tools=[TOOL]).sampling == {"max_new_tokens": None}
    assert read(tools=[TOOL]).tools.choice == "auto"
    assert read(tools=[]) == read(tools=[], tool_choice="auto", parallel_tool_calls=True) == read()


def test_thinking_is_said_in_the_words_of_templates() -> None:
    assert read(reasoning_effort="high").template_kwargs == {
        "reasoning_effort": "high",
        "thinking": True,
        "enable_thinking": True,
    }
    assert read(reasoning_effort="none").template_kwargs["enable_thinking"] is False
    assert read(enable_thinking=False).template_kwargs == {"enable_thinking": False}
    overruled = read(reasoning_effort="none", chat_template_kwargs={"enable_thinking": True, "x": [1]})
    assert overruled.template_kwargs == {
        "reasoning_effort": "none",
        "thinking": False,
        "enable_thinking": True,
        "x": [1],
    }


def test_a_message_that_is_continued_gets_no_new_beginning() -> None:
    request = read(messages=HALF, continue_final_message=True)
    assert (request.continue_final_message, request.add_generation_prompt) == (True, False)
    assert read(messages=HALF, continue_final_message=True, add_generation_prompt=False) == request


@pytest.mark.parametrize(
    ("parameters", "param", "words"),
    [
        ({"temperature": 2.1}, "temperature", "wanted a number from 0 to 2, got 2.1"),
        ({"temperature": "1"}, "temperature", "got '1'"),
        ({"temperature": True}, "temperature", "got true"),
        ({"temperature": float("nan")}, "temperature", "got nan"),
        ({"top_p": 0}, "top_p", "wanted a number above 0, up to 1, got 0"),
        ({"top_k": -2}, "top_k", "wanted an integer of at least -1, got -2"),
        ({"min_p": -0.1}, "min_p", "wanted a number from 0 to 1"),
        ({"frequency_penalty": -3}, "frequency_penalty", "wanted a number from -2 to 2"),
        ({"repetition_penalty": 0}, "repetition_penalty", "wanted a number above 0, up to 2"),
        ({"n": 0}, "n", "wanted an integer from 1 to 128, got 0"),
        ({"n": 1.0}, "n", "got 1.0"),
        ({"n": True}, "n", "got true"),
        ({"seed": 2**63}, "seed", "wanted an integer from"),
        ({"max_tokens": 0}, "max_tokens", "wanted an integer of at least 1"),
        ({"max_tokens": 5, "max_completion_tokens": 6}, "max_tokens", "got 5 and 6"),
        ({"max_tokens": 5, "min_tokens": 6}, "min_tokens", "wanted at most the limit of 5 tokens, got 6"),
        ({"stop": ""}, "stop", "wanted a string that is not empty"),
        ({"stop": ["a", 1]}, "stop.[1]", "got 1"),
        ({"stop": {}}, "stop", "got an object"),
        ({"stop_token_ids": 5}, "stop_token_ids", "wanted a list of token ids, got 5"),
        ({"stop_token_ids": [5, True]}, "stop_token_ids.[1]", "wanted a token id, got true"),
        ({"stop_token_ids": [-1]}, "stop_token_ids.[0]", "got -1"),
        ({"logit_bias": [1]}, "logit_bias", "wanted an object"),
        ({"logit_bias": {"the": 1}}, "logit_bias", "wanted token ids as keys, got 'the'"),
        ({"logit_bias": {"٣": 1}}, "logit_bias", "wanted token ids as keys"),
        ({"logit_bias": {"5": 101}}, "logit_bias.5", "wanted a number from -100 to 100, got 101"),
        ({"response_format": "json"}, "response_format", "wanted an object"),
        ({"response_format": {"type": "xml"}}, "response_format.type", "wanted one of text, json_object"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "got null"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {}}}},
            "response_format.json_schema.name",
            "got null",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "a"}}},
            "response_format.json_schema.schema",
            "wanted an object, got null",
        ),
        ({"regex": "a", "ebnf": "b"}, "ebnf", "Wanted one grammar for the text, got regex and ebnf"),
        (
            {"regex": "a", "response_format": {"type": "json_object"}},
            "regex",
            "got response_format and regex",
        ),
        ({"regex": "a", "tools": [TOOL]}, "regex", "no tool could be called"),
        (
            {"response_format": {"type": "json_object"}, "tools": [TOOL], "tool_choice": "required"},
            "response_format",
            "no tool could be called",
        ),
        ({"tool_choice": "required"}, "tool_choice", "there are no 'tools'"),
        ({"top_logprobs": 2}, "top_logprobs", "only allowed together with 'logprobs'"),
        ({"top_logprobs": 21, "logprobs": True}, "top_logprobs", "wanted an integer from 0 to 20"),
        ({"logprobs": 2}, "logprobs", "wanted an integer from 0 to 1, got 2"),
        ({"logprobs": "1"}, "logprobs", "wanted true or false"),
        ({"stream_options": {}}, "stream_options", "only allowed together with 'stream'"),
        ({"stream_options": {"include_usage": 1}, "stream": True}, "stream_options.include_usage", "got 1"),
        ({"stream_options": {"x": 1}, "stream": True}, "stream_options.x", "only 'include_usage'"),
        (
            {"stream_options": {"include_obfuscation": True}, "stream": True},
            "stream_options.include_obfuscation",
            "only false can be honoured",
        ),
        ({"store": True}, "store", "only false can be honoured"),
        ({"service_tier": "flex"}, "service_tier", 'only "auto" or "default" can be honoured'),
        ({"verbosity": "low"}, "verbosity", 'only "medium" can be honoured'),
        ({"modalities": ["text", "audio"]}, "modalities", 'only ["text"] can be honoured'),
        ({"reasoning_effort": "huge"}, "reasoning_effort", "wanted one of none, minimal"),
        (
            {"enable_thinking": True, "chat_template_kwargs": {"enable_thinking": False}},
            "enable_thinking",
            "differ",
        ),
        (
            {"chat_template_kwargs": {"chat_template": "{{ x }}"}},
            "chat_template_kwargs.chat_template",
            "not a variable of a chat template",
        ),
        ({"continue_final_message": True}, "continue_final_message", "Wanted an assistant's message"),
        ({"continue_final_message": True, "messages": [SILENT]}, "continue_final_message", "with content"),
        ({"continue_final_message": True, "messages": [CALLING]}, "continue_final_message", "no tool calls"),
        (
            {"messages": HALF, "continue_final_message": True, "add_generation_prompt": True},
            "add_generation_prompt",
            "continues the last one",
        ),
        ({"rid": ["a"]}, "rid", "wanted a string that is not empty, got a list of length 1"),
        ({"bootstrap_room": [1, "x"]}, "bootstrap_room.[1]", "got 'x'"),
        ({"input_ids": "1 2"}, "input_ids", "wanted a list of token ids, got '1 2'"),
        ({"input_ids": []}, "input_ids", "wanted a list of at least one token id, got a list of length 0"),
        ({"input_ids": [[1, 2]]}, "input_ids.[0]", "wanted a token id, got a list of length 2"),
        ({"input_ids": [1, True]}, "input_ids.[1]", "wanted a token id, got true"),
        ({"input_ids": [-1]}, "input_ids.[0]", "wanted a token id, got -1"),
        ({"return_hidden_states": "first"}, "return_hidden_states", 'true, false or "last"'),
        ({"custom_params": {"x": DEEP}}, "custom_params", "it cannot be written as JSON"),
    ],
)
def test_a_refusal_says_what_was_wanted_and_what_came(
    parameters: dict[str, Any], param: str, words: str
) -> None:
    error = refusal(**parameters)
    assert error.param == param
    assert words in str(error)


def test_logprobs_of_a_completion_are_taken() -> None:
    assert read(logprobs=1) == read(logprobs=True)
    assert read(logprobs=0) == read()


def test_vllms_names_are_sglangs() -> None:
    assert read(request_id="r") == read(rid="r")
    assert read(request_id="r", rid="r") == read(rid="r")
    assert read(include_stop_str_in_output=True) == read(no_stop_trim=True)
    for names, param in (
        ({"request_id": "r", "rid": "s"}, "request_id"),
        ({"no_stop_trim": False, "include_stop_str_in_output": True}, "include_stop_str_in_output"),
    ):
        error = refusal(**names)
        assert (error.param, "two names of one parameter" in str(error)) == (param, True)


def test_a_salt_is_the_beginning_of_the_extra_key() -> None:
    assert read(cache_salt="s").engine == {"extra_key": "s"}
    assert read(extra_key="k", cache_salt="s").engine == {"extra_key": "sk"}


def test_unknown_parameters_are_kept_apart() -> None:
    request = read(max_token=5, Temperature=1, use_beam_search=None)
    assert request.unknown == {"max_token": 5, "Temperature": 1}
    assert replace(request, unknown={}) == read()


def test_a_template_writes_the_special_tokens() -> None:
    assert read(add_special_tokens=False) == read()
    assert read(add_special_tokens=True).unknown == {"add_special_tokens": True}


def test_a_schema_nested_beyond_measure_is_refused() -> None:
    described = {"name": "a", "schema": DEEP}
    error = refusal(response_format={"type": "json_schema", "json_schema": described})
    assert error.param == "response_format.json_schema.schema"


def test_messages_have_to_be_there() -> None:
    for body in ({}, {"messages": None}):
        with pytest.raises(InvalidRequest) as raised:
            read_chat(body)
        assert (raised.value.param, raised.value.code) == ("messages", "missing_required_parameter")
    with pytest.raises(InvalidRequest, match="the body: wanted a JSON object, got a list of length 0"):
        read_chat([])


#: Values that may stand at the wrong place.
ODD: tuple[Any, ...] = (
    *(None, True, 0, -1, 0.5, 2**63, "", "x", [], [None], ["x"], [[]], [{}], {}),
    *({"x": 1}, {"type": ["x"]}, {"type": "function"}, {"type": "text"}),
)


def damaged(value: Any) -> Iterator[Any]:
    """``value`` with each part of it, itself last, replaced by each of many odd values."""
    if isinstance(value, dict):
        for key, inner in value.items():
            for odd in damaged(inner):
                yield {**value, key: odd}
            yield {other: value[other] for other in value if other != key}
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            for odd in damaged(inner):
                yield [*value[:index], odd, *value[index + 1 :]]
    yield from ODD


FULL: dict[str, Any] = {
    **{
        name: value
        for name, (value, _) in EFFECTS.items()
        if name not in ("ebnf", "json_schema", "regex", "request_id", "response_format")
    },
    **WITHOUT_EFFECT,
    "messages": [
        {"role": "user", "name": "ann", "content": [{"type": "text", "text": "a"}]},
        {
            "role": "assistant",
            "content": None,
            "reasoning": "r",
            "tool_calls": [{"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}],
        },
        {"role": "tool", "tool_call_id": "c", "content": "b"},
        {"role": "assistant", "content": None, "refusal": "No."},
    ],
    "stop": ["a", "b"],
    "tool_choice": {"type": "function", "function": {"name": "find"}},
}
WITH_SCHEMA: dict[str, Any] = {
    "messages": [USER],
    "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}},
}


@pytest.mark.parametrize("body", [FULL, WITH_SCHEMA])
def test_a_body_that_is_damaged_anywhere_is_read_or_refused(body: dict[str, Any]) -> None:
    read_chat(body)
    for odd in damaged(body):
        with suppress(InvalidRequest):
            assert orjson.dumps(read_chat(odd).sampling)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
NAMES = st.sampled_from([*HONOURED, *NO_EFFECT, *REFUSED, "else"])
EXAMPLES = st.sampled_from([value for value, _ in EFFECTS.values()])
BODIES = st.dictionaries(NAMES, EXAMPLES | JSON, max_size=6).map(
    lambda body: {"messages": [USER], "tools": [TOOL], **body}
)


@settings(max_examples=200, deadline=None)
@given(JSON | BODIES)
def test_any_json_gives_a_request_or_a_refusal(body: Any) -> None:
    with suppress(InvalidRequest):
        assert orjson.dumps(read_chat(body).sampling)
