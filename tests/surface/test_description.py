"""The description has every route and every parameter, and no other."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from importlib.metadata import version
from typing import TYPE_CHECKING, Any, get_args

import pytest
from starlette.routing import Route

from router_core.admin import admin_routes
from router_core.cli import build
from router_core.errors import BadRequest
from router_core.workers import Worker, WorkerState
from routers import BARE
from slime_control.calls.endpoints import CALLS
from slime_control.calls.overview import QUESTIONS
from slime_openai.requests import chat_request, completion_request
from slime_openai.requests.chat_request import read_chat
from slime_openai.requests.completion_request import read_completion
from slime_openai.requests.options import NO_EFFECT, REFUSED
from slime_sglang.facts import WORKER_TYPES, described
from surface.description import DOCUMENT, documents, jsonschema, operations, unlike
from surface.values import MESSAGES, VALUES

if TYPE_CHECKING:
    from routers import Start

SCHEMAS: dict[str, Any] = DOCUMENT["components"]["schemas"]
ROUTER = [
    part
    for name in (
        "engine",
        "radix_cache",
        "openai",
        "control",
        "sessions",
        "metrics",
        "openapi",
        "tiered_store",
    )
    for part in ("--plugin", name)
]
#: Answered before any route is looked for.
OPENAI = {
    ("GET", "/v1/models"),
    ("GET", "/v1/models/{id}"),
    ("POST", "/v1/chat/completions"),
    ("POST", "/v1/completions"),
}
CONTROL = {(method, path) for path, call in CALLS.items() for method in call.methods}
FLEET = {("GET", path) for path in QUESTIONS}


def test_the_description_is_of_this_version() -> None:
    assert DOCUMENT["info"]["version"] == version("slime-router")


def test_the_description_is_openapi() -> None:
    validator = pytest.importorskip("openapi_spec_validator")
    validator.validate(DOCUMENT)


@pytest.mark.parametrize("name", SCHEMAS)
def test_each_schema_is_one(name: str) -> None:
    jsonschema.Draft202012Validator.check_schema(SCHEMAS[name])


# routes


def test_each_route_is_described_and_no_other() -> None:
    router, _ = build([*BARE, *ROUTER])
    routes = [*admin_routes(router), *(route for _, make in router.hooks.routes for route in make(router))]
    assert all(isinstance(route, Route) for route in routes)
    own = {
        (method, re.sub(r"\{(\w+):\w+\}", r"{\1}", route.path))
        for route in routes
        for method in (route.methods or {"GET"}) - {"HEAD"}
    }
    assert {(method, path) for method, path, _ in operations()} == own | OPENAI | CONTROL | FLEET


@pytest.mark.anyio
async def test_the_router_answers_what_is_described_and_nothing_else(start: Start) -> None:
    described = {(method, path) for method, path, _ in operations()}
    paths = [
        "/v1",
        "/v1/chat",
        "/v1/embeddings",
        "/v1/responses",
        "/generate",
        *(path for _, path in OPENAI),
    ]
    others = {(method, path) for path in paths for method in ("GET", "POST")} - described
    async with start(*BARE, *ROUTER) as running:
        for worker in running.router.pool:
            running.router.pool.remove(worker)
        for method, path in sorted(described | others):
            answer = await running.client.request(method, path)
            was_for_a_worker = "no worker can take requests (registered: none;" in answer.text
            assert was_for_a_worker == ((method, path) in others), f"{method} {path}: {answer.text}"


# keys


@pytest.mark.anyio
async def test_each_operation_asks_for_the_key_that_is_described(start: Start) -> None:
    keys = {"trafficKey": "traffic", "adminKey": "admin"}
    flags = ["--api-key", keys["trafficKey"], "--admin-api-key", keys["adminKey"]]
    in_braces = re.compile(r"\{\w+\}")
    async with start(*BARE, *ROUTER, *flags) as running:
        for method, path, operation in operations():
            security = operation.get("security", DOCUMENT["security"])
            opened_by = {name for choice in security for name in choice}
            for name, key in ((None, None), *keys.items()):
                headers = {} if key is None else {"authorization": f"Bearer {key}"}
                filled = in_braces.sub("x", path)
                answer = await running.client.request(method, filled, headers=headers)
                if not opened_by or name in opened_by:
                    assert answer.status_code not in (401, 403), f"{name}: {method} {path}"
                    continue
                assert answer.status_code == (401 if key is None else 403), f"{name}: {method} {path}"
                documents(method, path, answer.status_code, answer.headers["content-type"], answer.content)


# workers


def test_a_worker_is_described_with_all_that_is_shown_of_it() -> None:
    fields = SCHEMAS["Worker"]["properties"]
    assert set(fields) == set(SCHEMAS["Worker"]["required"]) == described(Worker("http://a")).keys()
    assert fields["state"]["enum"] == list(get_args(WorkerState))
    assert fields["worker_type"]["enum"] == list(WORKER_TYPES)


# parameters


@pytest.mark.parametrize(
    ("schema", "honoured"),
    [
        ("ChatCompletionRequest", chat_request.HONOURED),
        ("CompletionRequest", completion_request.HONOURED),
    ],
)
def test_each_parameter_is_described_and_no_other(schema: str, honoured: Mapping[str, object]) -> None:
    assert set(SCHEMAS[schema]["properties"]) == honoured.keys() | NO_EFFECT.keys()


def test_each_parameter_that_is_refused_is_named() -> None:
    named = set(re.findall(r"`(\w+)`", DOCUMENT["info"]["description"]))
    assert named >= REFUSED.keys() | {"suffix"}


USER = {"role": "user", "content": "Hi"}
#: Other fields that a request needs so that the parameter may be there.
NEEDS: dict[str, dict[str, Any]] = {
    "continue_final_message": {"messages": [USER, {"role": "assistant", "content": "Well"}]},
    "max_tokens": {"echo": True},
    "min_tokens": {"max_tokens": 2**63},
    "stream_options": {"stream": True},
    "tool_choice": {"tools": [{"type": "function", "function": {"name": "find"}}]},
    "top_logprobs": {"logprobs": True},
}


def taken(read: Callable[[Any], object], body: Any) -> bool:
    with suppress(BadRequest):
        read(body)
        return True
    return False


def differences(
    read: Callable[[Any], object], schema: str, least: dict[str, Any], name: str, values: list[Any]
) -> list[tuple[Any, list[str]]]:
    """The values with which the reader and the schema disagree."""
    needs = {key: value for key, value in NEEDS.get(name, {}).items() if key in SCHEMAS[schema]["properties"]}
    found = []
    for value in values:
        body = {**least, **needs, name: value}
        wrong = unlike(SCHEMAS[schema], body)
        if taken(read, body) == bool(wrong):
            found.append((value, wrong))
    return found


@pytest.mark.parametrize("name", [*SCHEMAS["ChatCompletionRequest"]["properties"], "unheard_of", *REFUSED])
def test_a_parameter_of_a_chat_may_be_what_its_schema_says(name: str) -> None:
    values = MESSAGES if name == "messages" else VALUES
    assert differences(read_chat, "ChatCompletionRequest", {"messages": [USER]}, name, values) == []


@pytest.mark.parametrize(
    "name", [*SCHEMAS["CompletionRequest"]["properties"], "unheard_of", "suffix", *REFUSED]
)
def test_a_parameter_of_a_completion_may_be_what_its_schema_says(name: str) -> None:
    assert differences(read_completion, "CompletionRequest", {"prompt": "Hi"}, name, VALUES) == []


@pytest.mark.parametrize("name", ["ChatCompletionRequest", "CompletionRequest"])
def test_the_values_are_of_both_kinds(name: str) -> None:
    """So that the two tests above can fail either way, for each parameter."""
    for parameter, schema in SCHEMAS[name]["properties"].items():
        values = MESSAGES if parameter == "messages" else VALUES
        assert {not unlike(schema, value) for value in values} == {True, False}, parameter
