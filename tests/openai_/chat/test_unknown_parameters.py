"""Parameters of other systems: handed on, mapped, named in a header, refused, or passed."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import orjson
import pytest

from openai_.chat.chatting import chatting
from openai_.chat.scripted import scripted
from openai_.chat_models.families import QWEN2_5

if TYPE_CHECKING:
    import httpx

    from routers import Start
    from slime_testing import FakeEngine

pytestmark = pytest.mark.anyio

#: "Hi", in the embedded engine's tokens.
HI = [39, 72]
HEADER = "x-slime-unknown-parameters"
#: The path, and the least that a request has there.
ROUTES: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi"}]}),
    ("/v1/completions", {"prompt": "Hi"}),
]
EACH_ROUTE = pytest.mark.parametrize(("path", "least"), ROUTES, ids=["chat", "completion"])
STREAMED = pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])


@asynccontextmanager
async def working(start: Start, *flags: str) -> AsyncIterator[tuple[httpx.AsyncClient, FakeEngine]]:
    """A client, and an engine that answers ``Hi`` to it, twice."""
    async with scripted(start, HI, HI, flags=flags) as (running, engine):
        engine.meta["hidden_states"] = [[0.5]]
        yield running.client, engine


def choices_of(answer: httpx.Response) -> list[dict[str, Any]]:
    """Of a whole answer, or of all chunks."""
    assert answer.status_code == 200, answer.text
    parts = [line[6:] for line in answer.text.splitlines() if line.startswith("data: {")] or [answer.text]
    return [choice for part in parts for choice in orjson.loads(part)["choices"]]


@EACH_ROUTE
@STREAMED
async def test_by_default_they_are_named_and_without_effect(
    start: Start, path: str, least: dict[str, Any], stream: bool
) -> None:
    """An answer does not become inexact by what no engine ever saw."""
    async with working(start) as (client, engine):
        body = {**least, "return_token_ids": True, "stream": stream}
        plain = await client.post(path, json=body)
        odd = {"max_token": 5, "kv_transfer_params": {"a": 1}, "truncate_prompt_tokens": 10, "text": "Ho"}
        answer = await client.post(path, json={**body, **odd})
    assert HEADER not in plain.headers
    assert answer.headers[HEADER] == "max_token, kv_transfer_params, truncate_prompt_tokens, text"
    assert [choices_of(each)[-1]["exact"] for each in (plain, answer)] == [True, True]
    first, second = ({**body, "rid": None} for body in engine.asked)
    assert first == second


@EACH_ROUTE
async def test_they_may_be_refused(start: Start, path: str, least: dict[str, Any]) -> None:
    async with working(start, "--unknown-parameters", "refuse") as (client, engine):
        answer = await client.post(path, json={**least, "max_token": 5, "Stop": "x"})
        known = await client.post(path, json={**least, "max_tokens": 5, "max_token": None})
    error = answer.json()["error"]
    assert (answer.status_code, error["param"], error["code"]) == (400, "max_token", "unknown_parameter")
    assert "'max_token', 'Stop'" in error["message"]
    assert (known.status_code, len(engine.asked)) == (200, 1)


@EACH_ROUTE
@STREAMED
async def test_they_may_go_to_the_engine(
    start: Start, path: str, least: dict[str, Any], stream: bool
) -> None:
    """A parameter that may have changed the answer makes it inexact by name; one that only asks for more does not."""
    async with working(start, "--unknown-parameters", "pass") as (client, engine):
        body = {**least, "return_token_ids": True, "stream": stream}
        asks = await client.post(path, json={**body, "return_something": True})
        odd = await client.post(path, json={**body, "mystery": {"x": [1]}, "text": "Ho"})
    assert [answer.headers[HEADER] for answer in (asks, odd)] == ["return_something", "mystery, text"]
    told = [choices_of(answer)[-1] for answer in (asks, odd)]
    assert [choice["inexact_reason"] for choice in told] == [None, "unknown_field:mystery"]
    assert engine.asked[0]["return_something"] is True
    assert engine.asked[1]["mystery"] == {"x": [1]}
    assert "text" not in engine.asked[1]


@EACH_ROUTE
@STREAMED
async def test_fields_of_sglang_are_handed_on(
    start: Start, path: str, least: dict[str, Any], stream: bool
) -> None:
    harmless = {
        "bootstrap_host": "10.0.0.1",
        "bootstrap_port": 8998,
        "bootstrap_room": 7,
        "custom_labels": {"run": "7"},
        "return_hidden_states": True,
        "routed_dp_rank": 0,
        "routed_experts_start_len": 1,
    }
    async with working(start) as (client, engine):
        body = {**least, "return_token_ids": True, "stream": stream}
        answer = await client.post(path, json={**body, **harmless})
        doubtful = {"custom_logit_processor": "p", "custom_params": {"x": 1}}
        other = await client.post(path, json={**body, **doubtful})
    assert not {HEADER} & {*answer.headers, *other.headers}
    first, second = engine.asked
    assert harmless.items() <= first.items()
    assert (second["custom_logit_processor"], second["sampling_params"]["custom_params"]) == ("p", {"x": 1})
    told = [choices_of(each)[-1] for each in (answer, other)]
    assert told[0]["hidden_states"] == [[0.5]]
    assert [choice["inexact_reason"] for choice in told] == [None, "unknown_field:custom_logit_processor"]


@EACH_ROUTE
async def test_names_of_vllm_are_mapped(start: Start, path: str, least: dict[str, Any]) -> None:
    vllm = {
        "request_id": "mine",
        "cache_salt": "s",
        "extra_key": "k",
        "priority": 3,
        "include_stop_str_in_output": True,
        "spaces_between_special_tokens": False,
        "stop": ["STOP"],
    }
    async with working(start) as (client, engine):
        answer = await client.post(path, json={**least, **vllm})
    assert HEADER not in answer.headers
    [body] = engine.asked
    assert (body["rid"], body["extra_key"], body["priority"]) == ("mine", "sk", 3)
    assert "cache_salt" not in body
    sampling = body["sampling_params"]
    assert (sampling["no_stop_trim"], sampling["spaces_between_special_tokens"]) == (True, False)


async def test_a_stop_string_stays_in_the_text_under_vllms_name(start: Start) -> None:
    async with chatting(start, "One STOP two.", family=QWEN2_5) as chat:
        body: dict[str, Any] = {"stop": ["STOP"], "include_stop_str_in_output": True, "max_tokens": 60}
        question = [{"role": "user", "content": "Hi"}]
        [choice] = (await chat.post(messages=question, **body))["choices"]
        [legacy] = (await chat.post("/v1/completions", prompt="Hi", **body))["choices"]
    assert choice["message"]["content"] == legacy["text"] == "One STOP"


WRONG: list[dict[str, Any]] = [
    {"temperature": "hot"},
    {"top_p": 7},
    {"n": 1.5},
    {"stop": 5},
    {"audio": {"voice": "x"}},
    {"input_ids": []},
    {"session_params": {"id": "s"}},
    {"stop_regex": "x+"},
    {"routed_dp_rank": "first"},
]


@pytest.mark.parametrize("mode", ["warn", "refuse", "pass"])
async def test_wrong_values_of_known_parameters_are_refused_in_every_mode(start: Start, mode: str) -> None:
    async with working(start, "--unknown-parameters", mode) as (client, engine):
        for path, least in ROUTES:
            for wrong in WRONG:
                answer = await client.post(path, json={**least, **wrong})
                told = (answer.status_code, answer.json()["error"]["param"])
                assert told == (400, next(iter(wrong))), f"{path} {wrong}"
                assert engine.asked == [], f"{path} {wrong}"
