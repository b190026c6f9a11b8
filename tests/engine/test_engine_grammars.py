"""Answers that a grammar binds: what is sampled, what is told of it, and what is refused."""

from __future__ import annotations

import json
import re
import sys
from typing import Any

import anyio
import numpy as np
import pytest

from engine.served import CHAT, Serve, Served
from routers import Start
from slime_engine.model import NgramModel, log_softmax

pytest.importorskip("llguidance", reason="the extra grammar is not installed")

pytestmark = pytest.mark.anyio

WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "units": {"enum": ["C", "F"]},
        "near": {"type": "array", "items": {"$ref": "#/$defs/place"}, "maxItems": 2},
    },
    "required": ["city", "days", "units", "near"],
    "additionalProperties": False,
    "$defs": {"place": {"type": ["string", "null"]}},
}
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}


def bound(**params: Any) -> dict[str, Any]:
    return {"text": CHAT, "sampling_params": {"sampling_seed": 1, **params}, "return_logprob": True}


async def test_answers_are_what_the_schema_wants(engine: Served) -> None:
    answers = await engine.generate(**bound(json_schema=json.dumps(WEATHER), n=8))
    documents = [json.loads(answer["text"]) for answer in answers]
    for document in documents:
        assert list(document) == ["city", "days", "units", "near"]
        assert isinstance(document["city"], str)
        assert isinstance(document["days"], int)
        assert document["units"] in ("C", "F")
        assert len(document["near"]) <= 2
    assert len({document["city"] for document in documents}) > 2, "the model still says what it likes"
    assert {answer["meta_info"]["finish_reason"]["type"] for answer in answers} == {"stop"}


@pytest.mark.parametrize("schema", ['{"type":"object"}', '{"type":"array","minItems":1}', "$$ANY$$"])
async def test_unbounded_grammar_is_closed_in_time(engine: Served, schema: str) -> None:
    for most in (48, 128):
        for answer in await engine.generate(**bound(json_schema=schema, n=4, max_new_tokens=most)):
            assert answer["meta_info"]["finish_reason"]["type"] == "stop"
            json.loads(answer["text"])


@pytest.mark.parametrize(
    ("params", "pattern"),
    [
        ({"regex": "(yes|no), [0-9]{3}"}, "(yes|no), [0-9]{3}"),
        ({"regex": "[é京 ]{2,4}"}, "[é京 ]{2,4}"),
        ({"regex": "[a-z ]*", "max_new_tokens": 30}, "[a-z ]*"),
        ({"ebnf": 'root ::= "left" | "right"'}, "left|right"),
        ({"regex": "yes", "min_new_tokens": 50}, "yes"),
        ({"regex": "yes", "ignore_eos": True}, "yes"),
        ({"regex": "ab", "temperature": 0, "repetition_penalty": 0.1, "logit_bias": {"5": 1e6}}, "ab"),
    ],
)
async def test_answers_are_in_the_language_of_the_grammar(
    engine: Served, params: dict[str, Any], pattern: str
) -> None:
    answer = await engine.generate(**bound(**params))
    assert re.fullmatch(pattern, answer["text"])
    assert answer["meta_info"]["finish_reason"]["type"] == "stop"


async def test_logprobs_are_those_among_the_allowed_tokens(engine: Served, model: NgramModel) -> None:
    answer = await engine.generate(**bound(regex="a|b", temperature=0.7), rid="two")
    (entry,) = await engine.journal("two")
    told = answer["meta_info"]["output_token_logprobs"]
    assert [one[:2] for one in told] == [
        list(one) for one in zip(entry["output_logprobs"], entry["output_ids"], strict=True)
    ]
    logits = model.next_logits(entry["input_ids"], "default") / 0.7
    letters = [model.tokenizer.token_bytes.index(letter) for letter in (b"a", b"b")]
    wanted = dict(zip(letters, log_softmax(logits[letters]), strict=True))
    assert told[0][0] == pytest.approx(wanted[told[0][1]])
    ends = sorted(model.tokenizer.eos_ids)
    logits = model.next_logits([*entry["input_ids"], told[0][1]], "default") / 0.7
    wanted = dict(zip(ends, log_softmax(logits[ends]), strict=True))
    assert np.isclose(told[1][0], wanted[told[1][1]])


@pytest.mark.parametrize(
    ("params", "told"),
    [
        ({"json_schema": '{"type":"odd"}'}, "Failed to compile json_schema grammar: Invalid type: odd"),
        ({"json_schema": "nonsense"}, "Failed to compile json_schema grammar"),
        ({"regex": "(a"}, "Failed to compile regex grammar"),
        ({"ebnf": "root ::= ]"}, "Failed to compile ebnf grammar"),
    ],
)
async def test_invalid_grammar_is_refused(engine: Served, params: dict[str, Any], told: str) -> None:
    for stream in (False, True):
        answer = await engine.generate(400, **bound(**params), stream=stream)
        assert answer["error"]["message"].startswith(told)


async def test_without_the_library_the_answer_says_how_to_get_it(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    async with serve() as engine:
        answer = await engine.generate(400, **bound(regex="a"))
    assert "pip install 'slime-router[grammar]'" in answer["error"]["message"]


async def test_the_engines_own_chat_binds_its_answers(engine: Served) -> None:
    definitions = {"place": {"type": "string"}}
    trip = {"type": "object", "properties": {"to": {"$ref": "#/$defs/place"}}, "required": ["to"]}
    tools = [
        {"type": "function", "function": {"name": "weather", "parameters": CITY}},
        {"type": "function", "function": {"name": "trip", "parameters": {**trip, "$defs": definitions}}},
        {"type": "function", "function": {"name": "time"}},
    ]
    body = {"messages": [{"role": "user", "content": "Weather?"}], "seed": 2}
    trip_only = {"type": "function", "function": {"name": "trip"}}
    schema = {"type": "json_schema", "json_schema": {"name": "c", "schema": CITY}}

    async def said(**more: Any) -> Any:
        answer = (await engine.post("/v1/chat/completions", **body, **more)).json()
        return json.loads(answer["choices"][0]["message"]["content"])

    calls = await said(tools=tools, tool_choice="required")
    assert {call["name"] for call in calls} <= {"weather", "trip", "time"}
    (call,) = await said(tools=tools, tool_choice=trip_only)
    assert (call["name"], type(call["parameters"]["to"])) == ("trip", str)
    assert isinstance(await said(response_format={"type": "json_object"}), dict)
    assert "city" in await said(response_format=schema)


async def test_tools_that_define_a_name_differently_are_refused(engine: Served) -> None:
    tools = [
        {"type": "function", "function": {"name": name, "parameters": {"$defs": {"x": {"type": kind}}}}}
        for name, kind in (("a", "string"), ("b", "null"))
    ]
    body = {"messages": [{"role": "user", "content": "?"}], "tools": tools, "tool_choice": "required"}
    answer = await engine.post("/v1/chat/completions", 400, **body)
    assert "conflicting definitions" in answer.json()["message"]


async def test_a_decode_engine_goes_on_in_the_grammar_of_its_prefill_engine(serve: Serve) -> None:
    async with (
        serve(disaggregation_mode="prefill") as first,
        serve(disaggregation_mode="decode") as second,
    ):
        port = first.client.base_url.port
        body = bound(regex="(ab){6}") | {
            "bootstrap_host": "127.0.0.1", "bootstrap_port": port, "bootstrap_room": 7,
        }  # fmt: skip
        answers: list[Any] = []

        async def ask(engine: Served) -> None:
            answers.append(await engine.generate(**body))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(ask, first)
            tasks.start_soon(ask, second)
    assert "ab" * 6 in {answer["text"] for answer in answers}


@pytest.mark.parametrize("streams", [False, True])
async def test_a_router_makes_calls_of_what_is_bound(start: Start, streams: bool) -> None:
    tool = {"type": "function", "function": {"name": "weather", "parameters": CITY}}
    body = {
        "messages": [{"role": "user", "content": "Weather?"}],
        "tools": [tool],
        "tool_choice": "required",
        "parallel_tool_calls": False,
        "seed": 3,
        "stream": streams,
    }
    plugins = ("--plugin", "engine", "--plugin", "radix_cache", "--plugin", "openai")
    async with start(*plugins) as running:
        answer = await running.client.post("/v1/chat/completions", json=body, headers={"x-session-id": "s"})
        (trajectory,) = (await running.client.get("/trajectories/s")).json()["trajectories"]
        (worker,) = running.router.pool
        (entry,) = (await running.client.get(f"{worker.url}/journal")).json()["entries"]
    if streams:
        lines = [line.removeprefix("data: ") for line in answer.text.split("\n\n") if line]
        deltas = [json.loads(line)["choices"][0]["delta"] for line in lines[:-1]]
        calls = [call["function"] for delta in deltas for call in delta.get("tool_calls", ())]
        name, arguments = calls[0]["name"], "".join(call.get("arguments", "") for call in calls)
    else:
        (call,) = answer.json()["choices"][0]["message"]["tool_calls"]
        name, arguments = call["function"]["name"], call["function"]["arguments"]
    assert name == "weather"
    assert isinstance(json.loads(arguments)["city"], str)
    assert trajectory["exact"] is True
    assert trajectory["tokens"] == [*entry["input_ids"], *entry["output_ids"]]
    assert trajectory["rollout_logp"][-len(entry["output_ids"]) :] == entry["output_logprobs"]
