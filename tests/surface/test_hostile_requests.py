"""Bytes that are no request, and requests that mean harm: told so, in the shape of every error."""

from __future__ import annotations

import gzip
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import orjson
import pytest

from slime_control.calls.endpoints import CALLS
from surface.description import DOCUMENT, documents, operations

if TYPE_CHECKING:
    import httpx

    from routers import Start

pytestmark = pytest.mark.anyio

POSTS = [path for method, path, _ in operations() if method == "POST" and path not in CALLS]
USER = b'[{"role": "user", "content": "Hi"}]'
#: The field that may not be left out, as it stands in the body; and the schema of that body.
LEAST: dict[str, tuple[dict[str, bytes], str]] = {
    "/v1/chat/completions": ({"messages": USER, "max_tokens": b"2"}, "ChatCompletionRequest"),
    "/v1/completions": ({"prompt": b'"Hi"', "max_tokens": b"2"}, "CompletionRequest"),
    "/retrieve_from_text": ({"text": b'"Hi"'}, "TextQuestion"),
    "/retrieve_from_messages_template": ({"messages": USER}, "MessagesQuestion"),
}
#: No JSON, or none that is an object.
NO_REQUESTS = [
    *(
        b"",
        b"{",
        b"Hi",
        b'"Hi"',
        b"null",
        b"true",
        b"1",
        b"[]",
        b'[{"messages": []}]',
        b"{}{}",
        b"{} x",
        b"\0",
    ),
    *(b"{'messages': 1}", b'{"messages": 1,}', b'{"a": 1 /* 2 */}', b"a=1&b=2", b"--x\r\n\r\n--x--\r\n"),
    *(b'{"a": NaN}', b'{"a": Infinity}', b'{"a": -Infinity}', b'{"a": 1e999}', b'{"a": 01}', b'{"a": 1.}'),
    *(
        b'{"a": "\xff"}',
        b'{"a": "\xed\xa0\x80"}',
        b'{"a": "\\ud800"}',
        b'{"a": "\\udc00\\ud800"}',
        b'{"a": "\n"}',
    ),
    *(b"\xef\xbb\xbf{}", '{"a": 1}'.encode("utf-16"), gzip.compress(b"{}")),
    *(b"[" * 100_000, b"[" * 100_000 + b"]" * 100_000, b'{"a": ' * 100_000 + b"1" + b"}" * 100_000),
]

#: For control calls: of the right form, but what stands in them cannot be, or means nobody.
WRONG_CALLS = [
    *(
        b'{"workers": %b}' % value
        for value in (b"1", b"{}", b"[]", b'{"": {}}', b'{"http://127.0.0.1:1": {}}')
    ),
    *(b'{"workers": {"http://127.0.0.1:1": %b}}' % value for value in (b"1", b"null", b"[]")),
    b'{"workers": {"http://127.0.0.1:1": {}}, "workers ": 1}',
    *(
        b'{"rank_offset": %b}' % value
        for value in (b"-1", b"1.5", b"true", b"null", b'"0"', b"1e400", b"9" * 40)
    ),
    *(b'{"rid": %b}' % value for value in (b"1", b"null", b"[]", b"{}", b'""', b'"' + b"a" * 100_000 + b'"')),
    *(b'{"abort_all": %b}' % value for value in (b"1", b"null", b"[]", b'"true"')),
    b'{"\\u0077orkers": 1}',
    *(
        b'{"rank_offset": %b}' % value
        for value in (b"18446744073709551615", b'0, "x": %b' % (b"[" * 300 + b"]" * 300))
    ),
    *(b'{"weight_version": %b}' % value for value in (b"1.5", b"true", b"[]", b"{}")),
]


def nested(depth: int) -> Iterator[bytes]:
    yield b"[" * depth + b"]" * depth
    yield b'{"a":' * depth + b"1" + b"}" * depth


def body_of(members: dict[str, bytes]) -> bytes:
    return b"{%b}" % b",".join(b'"%b":%b' % (name.encode(), value) for name, value in members.items())


def is_told(answer: httpx.Response) -> bool:
    """Return True when ``answer`` refuses the request, with a reason."""
    return answer.status_code == 400 and bool(answer.json()["error"]["message"])


@asynccontextmanager
async def client_of(start: Start) -> AsyncIterator[httpx.AsyncClient]:
    plugins = [part for name in ("engine", "radix_cache", "openai") for part in ("--plugin", name)]
    async with start(*plugins) as running:
        yield running.client


async def test_malformed_request_is_refused(start: Start) -> None:
    async with client_of(start) as client:
        for path in POSTS:
            for content in NO_REQUESTS:
                if not content and path.startswith(
                    "/sessions"
                ):  # which takes an empty body for an empty object
                    continue
                answer = await client.post(path, content=content)
                assert is_told(answer), f"{path} {content[:40]!r}: {answer.text}"


@pytest.mark.parametrize("path", CALLS)
async def test_a_control_call_is_answered_as_described_whatever_its_body_is(start: Start, path: str) -> None:
    """Engines may take what the router refuses elsewhere; no fault of a caller's is one of the router."""
    async with client_of(start) as client:
        (worker,) = (await client.get("/list_workers")).json()["urls"]
        deep = b'{"workers": {"%b": {"x": %b}}}' % (worker.encode(), b"[" * 300 + b"]" * 300)
        for content in (*NO_REQUESTS, *WRONG_CALLS, deep):
            answer = await client.post(path, content=content)
            assert answer.status_code < 500, f"{content[:60]!r}: {answer.text}"
            documents("POST", path, answer.status_code, answer.headers["content-type"], answer.content)
        assert (await client.post("/continue_generation")).status_code == 200


@pytest.mark.parametrize("path", LEAST)
async def test_any_parameter_may_be_nested_deep(start: Start, path: str) -> None:
    """orjson reads 1,024 levels and writes 254, Python's own recursion ends somewhere between."""
    least, schema = LEAST[path]
    async with client_of(start) as client:
        for name in [*DOCUMENT["components"]["schemas"][schema]["properties"], "unheard_of"]:
            for depth in (253, 1000):
                for value in nested(depth):
                    answer = await client.post(path, content=body_of({**least, name: value}))
                    assert answer.status_code == 200 or is_told(answer), f"{name}, {depth}: {answer.text}"


#: Places in a chat at which anything may stand.
ANYTHING = {
    "messages": [
        b'[{"role": "user", "content": "Hi", "annotations": %b}]',
        b'[{"role": "user", "content": [{"type": "text", "text": "Hi", "x": %b}]}]',
        b'[{"role": "user", "content": [{"type": "image", "x": %b}]}]',
        b'[{"role": "assistant", "tool_calls": [{"x": %b, "function": {"name": "f", "arguments": ""}}]}]',
        b'[{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": {"x": %b}}}]}]',
    ],
    "tools": [
        b'[{"type": "function", "x": %b, "function": {"name": "f"}}]',
        b'[{"type": "function", "function": {"name": "f", "parameters": {"x": %b}}}]',
    ],
    "response_format": [b'{"type": "json_schema", "json_schema": {"name": "x", "schema": {"x": %b}}}'],
    "chat_template_kwargs": [b'{"x": %b}'],
    "metadata": [b'{"x": %b}'],
}


@pytest.mark.parametrize("more", [{}, {"tool_choice": b'"required"'}], ids=["", "calls are forced"])
async def test_the_parts_of_a_chat_may_be_nested_deep(start: Start, more: dict[str, bytes]) -> None:
    least, _ = LEAST["/v1/chat/completions"]
    places = [(name, place) for name, values in ANYTHING.items() for place in values]
    async with client_of(start) as client:
        for name, place in places:
            for value in (deep for depth in (240, 253, 900) for deep in nested(depth)):
                members = {**least, **(more if name == "tools" else {}), name: place % value}
                answer = await client.post("/v1/chat/completions", content=body_of(members))
                assert answer.status_code == 200 or is_told(answer), f"{place!r}: {answer.text}"


async def test_arguments_may_be_nested_deeper_than_json_is_written(start: Start) -> None:
    async with client_of(start) as client:
        for depth in (253, 1000, 100_000):
            for written in nested(depth):
                call = {"function": {"name": "f", "arguments": written.decode()}}
                messages = [{"role": "assistant", "tool_calls": [call]}, {"role": "tool", "content": "1"}]
                answer = await client.post(
                    "/v1/chat/completions", json={"messages": messages, "max_tokens": 1}
                )
                assert answer.status_code == 200 or is_told(answer), answer.text


@pytest.mark.parametrize(
    "written",
    [
        "[{'function': {'name': {1}, 'arguments': {}}}]",
        "[{'function': {'name': b'f', 'arguments': {}}}]",
        r"[{'function': {'name': '\ud800', 'arguments': {}}}]",
        "[{'function': {'name': 'f', 'arguments': {1: 2}}}]",
        "[{'function': 1}]",
        "[[[1]]]",
        "[" * 5000,
        "-" * 5000 + "1",
        "\0",
    ],
)
async def test_text_of_an_assistant_may_look_like_calls(start: Start, written: str) -> None:
    said = {"role": "assistant", "content": f"Calling tools:\n{written}"}
    body = {"messages": [said, {"role": "user", "content": "And?"}], "max_tokens": 1}
    async with client_of(start) as client:
        answer = await client.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text


HEADERS: list[list[tuple[bytes, bytes]]] = [
    *(
        [(b"content-type", value)]
        for value in (b"text/plain", b"", b"\xff", b"application/json; charset=utf-16")
    ),
    *([(b"content-type", value)] for value in (b"multipart/form-data", b"application/x-www-form-urlencoded")),
    *(
        [(b"x-session-id", value)]
        for value in (b"", b"\xff\xfe", b"a" * 1_024, b"..", b"%00", b"\xe2\x80\xa8")
    ),
    [(b"x-session-id", b"a"), (b"x-session-id", b"b"), (b"x-smg-routing-key", b"c")],
    *([(b"authorization", value)] for value in (b"", b"\xff", b"Bearer", b"Basic Og==")),
    [(b"authorization", b"a"), (b"authorization", b"b")],
    *(
        [(b"accept", value)]
        for value in (b"", b"\xff;q=\xff", b"text/html", b"application/json;q=nan", b",;,=")
    ),
    *([(b"content-encoding", b"gzip")], [(b"expect", b"100-continue")], [(b"range", b"bytes=0-1")]),
    *([(b"host", b"")], [(b"host", b"127.0.0.1:99999")], [(b"cookie", b"\xff=\xff")], [(b"te", b"gzip")]),
    [(b"x-more", b"x")] * 200,
]


async def test_odd_headers_change_no_answer(start: Start) -> None:
    """A body of JSON is read, whatever it is called; gzip is no JSON, whoever says so."""
    async with client_of(start) as client:
        for headers in HEADERS:
            for path, (least, _) in LEAST.items():
                answer = await client.post(path, content=body_of(least), headers=headers)
                assert answer.status_code == 200, f"{path} {headers}: {answer.text}"
                assert orjson.loads(answer.content)
        for path, (least, _) in LEAST.items():
            zipped = gzip.compress(body_of(least))
            assert is_told(await client.post(path, content=zipped, headers={"content-encoding": "gzip"}))


@pytest.mark.parametrize("path", ["/v1/models/", "/trajectories/", "/sessions/", "/workers/"])
async def test_odd_names_are_not_found(start: Start, path: str) -> None:
    names = (
        "%00",
        "%ff",
        "%2f",
        "%2e%2e",
        "..%2f",
        "%",
        "%zz",
        "a" * 50_000,
        "%F0%9F%98%80",
        "%c0%ae",
        "?a=%ff",
        "/",
    )
    async with client_of(start) as client:
        for name in names:
            answer = await client.get(path + name)
            assert answer.status_code == 404, name
            assert answer.json()["error"], name
