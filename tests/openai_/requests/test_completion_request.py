"""The body of a completion request: every parameter honoured, known to be without effect, or refused by name."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slime_openai.errors import InvalidRequest, UnsupportedParameter
from slime_openai.requests.completion_request import HONOURED, CompletionRequest, read_completion
from slime_openai.requests.options import NO_EFFECT, REFUSED


def read(**parameters: Any) -> CompletionRequest:
    return read_completion({"prompt": "Once", **parameters})


def refusal(**parameters: Any) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as raised:
        read(**parameters)
    return raised.value


def test_a_bare_request_has_openais_defaults() -> None:
    assert read() == CompletionRequest(
        prompts=("Once",), sampling={"max_new_tokens": 16}, echo=False, logprobs=None
    )


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [
        ("", ("",)),
        (["a", "b"], ("a", "b")),
        ([1, 2], ([1, 2],)),
        ([[1, 2], [3]], ([1, 2], [3])),
    ],
)
def test_prompts_come_in_four_forms(prompt: Any, prompts: tuple[Any, ...]) -> None:
    assert read(prompt=prompt).prompts == prompts


@pytest.mark.parametrize(
    ("prompt", "param", "words"),
    [
        (5, "prompt", "wanted text, or a list of at least one token id"),
        ({}, "prompt", "got an object"),
        ([], "prompt", "got a list of length 0"),
        ([[]], "prompt.[0]", "got a list of length 0"),
        (["a", 1], "prompt.[1]", "wanted a string, got 1"),
        (["a", [1]], "prompt.[1]", "wanted a string, got a list of length 1"),
        ([[1], "a"], "prompt.[1]", "got 'a'"),
        ([1, "a"], "prompt.[1]", "wanted a token id, got 'a'"),
        ([1, True], "prompt.[1]", "wanted a token id, got true"),
        ([[1], [2**31]], "prompt.[1].[0]", "wanted a token id"),
        ([None], "prompt.[0]", "wanted a token id, got null"),
    ],
)
def test_invalid_prompt_is_refused(prompt: Any, param: str, words: str) -> None:
    error = refusal(prompt=prompt)
    assert error.param == param
    assert words in str(error)


def test_a_prompt_has_to_be_there() -> None:
    with pytest.raises(InvalidRequest) as raised:
        read_completion({"prompt": None})
    assert (raised.value.param, raised.value.code) == ("prompt", "missing_required_parameter")


#: A value of each parameter that shows, and what else the request needs for it.
EFFECTS: dict[str, tuple[Any, dict[str, Any]]] = {
    "add_special_tokens": (False, {}),
    "bootstrap_host": ("h", {}),
    "bootstrap_port": ([1, 2], {}),
    "bootstrap_room": (7, {}),
    "cache_salt": ("s", {}),
    "custom_labels": ({"run": "7"}, {}),
    "custom_logit_processor": ("p", {}),
    "custom_params": ({"x": 1}, {}),
    "data_parallel_rank": (1, {}),
    "disagg_prefill_dp_rank": (1, {}),
    "ebnf": ('root ::= "a"', {}),
    "echo": (True, {}),
    "extra_key": ("k", {}),
    "frequency_penalty": (0.5, {}),
    "ignore_eos": (True, {}),
    "include_stop_str_in_output": (True, {}),
    "json_schema": ('{"type": "object"}', {}),
    "logit_bias": ({"5": 1}, {}),
    "logprobs": (0, {}),
    "lora_path": ("l", {}),
    "max_completion_tokens": (7, {}),
    "max_tokens": (7, {}),
    "min_p": (0.1, {}),
    "min_tokens": (3, {}),
    "model": ("m", {}),
    "n": (2, {}),
    "ngram_corpus_id": ("c", {}),
    "no_stop_trim": (True, {}),
    "presence_penalty": (-0.5, {}),
    "priority": (3, {}),
    "prompt": ("Twice", {}),
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
    "session_id": ("s", {}),
    "skip_special_tokens": (False, {}),
    "spaces_between_special_tokens": (False, {}),
    "stop": (["x", "y"], {}),
    "stop_token_ids": ([1], {}),
    "stream": (True, {}),
    "stream_options": ({"include_usage": True}, {"stream": True}),
    "temperature": (0.7, {}),
    "top_k": (20, {}),
    "top_p": (0.9, {}),
}


def test_the_table_of_this_file_is_complete() -> None:
    assert EFFECTS.keys() == HONOURED.keys() - {"best_of"}


@pytest.mark.parametrize("name", EFFECTS)
def test_every_honoured_parameter_changes_the_request(name: str) -> None:
    value, needs = EFFECTS[name]
    assert read(**{**needs, name: value}) != read(**needs)


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


def test_logprobs_of_a_chat_are_understood() -> None:
    assert read(logprobs=True) == read(logprobs=1)
    assert read(logprobs=False) == read()


def test_special_tokens_are_the_engines() -> None:
    assert read(prompt=[1, 2], add_special_tokens=False) == read(prompt=[1, 2])
    assert read(add_special_tokens=True) == read()
    assert read(add_special_tokens=False).unknown == {"add_special_tokens": False}


def test_best_of_is_honoured_only_where_it_chooses_nothing() -> None:
    assert read(best_of=1) == read()
    assert read(best_of=1, n=1) == read(n=1)
    for refused in ({"best_of": 2}, {"best_of": 2, "n": 2}, {"best_of": 1, "n": 2}):
        error = refusal(**refused)
        assert isinstance(error, UnsupportedParameter)
        assert error.param == "best_of"


@pytest.mark.parametrize("name", ["suffix", *REFUSED])
def test_unsupported_parameter_is_refused_by_name(name: str) -> None:
    error = refusal(**{name: "x"})
    assert isinstance(error, UnsupportedParameter)
    assert error.param == name


#: Parameters of openai 3.52, ``types.completion_create_params.CompletionCreateParamsBase``.
OPENAI = """best_of echo frequency_penalty logit_bias logprobs max_tokens model n presence_penalty prompt seed stop
stream stream_options suffix temperature top_p user"""


def test_every_parameter_of_openai_is_known() -> None:
    assert set(OPENAI.split()) <= HONOURED.keys() | NO_EFFECT.keys() | REFUSED.keys() | {"suffix"}


def test_nothing_may_be_generated_where_the_prompt_is_the_answer() -> None:
    assert read(max_tokens=0, echo=True).sampling == {"max_new_tokens": 0}
    assert "unless 'echo' is true" in str(refusal(max_tokens=0))


@pytest.mark.parametrize(
    ("parameters", "param", "words"),
    [
        ({"logprobs": "1"}, "logprobs", "wanted an integer from 0 to 20, got '1'"),
        ({"min_tokens": 17}, "min_tokens", "wanted at most the limit of 16 tokens, got 17"),
        (
            {"stream_options": {"include_usage": True}},
            "stream_options",
            "only allowed together with 'stream'",
        ),
        ({"max_tokens": 4, "max_completion_tokens": 5}, "max_tokens", "got 4 and 5"),
    ],
)
def test_a_refusal_says_what_was_wanted_and_what_came(
    parameters: dict[str, Any], param: str, words: str
) -> None:
    error = refusal(**parameters)
    assert error.param == param
    assert words in str(error)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=200, deadline=None)
@given(JSON | st.dictionaries(st.sampled_from([*HONOURED, *NO_EFFECT, *REFUSED]), JSON, max_size=4))
def test_any_json_gives_a_request_or_a_refusal(body: Any) -> None:
    if isinstance(body, dict):
        body.setdefault("prompt", "Once")
    with suppress(InvalidRequest):
        assert isinstance(read_completion(body), CompletionRequest)
