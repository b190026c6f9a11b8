"""``/sessions/{id}/v1/...`` is ``/v1/...`` with that session, for keys, workers, streams and records alike."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import anyio
import pytest
from starlette.requests import Request
from starlette.responses import Response

from openai_.chat.chatting import chatting
from plugged import Recording, until
from routers import BARE
from sessions.speaking import speak, talk
from slime_http.serving import serving

if TYPE_CHECKING:
    from routers import Start

pytestmark = pytest.mark.anyio

#: Nobody else asks the worker.
ALONE = (*BARE, "--plugin", "sessions")
NAMES = ["a", "harbor/hello-world:0", "50%", "%2F", "é ☔", "a=b&c?d#e", "v1", "x" * 512]


async def test_a_worker_sees_the_path_and_the_header_that_are_meant(start: Start) -> None:
    named: list[list[str]] = []

    class Names(Recording):
        async def _answer(self, request: Request) -> Response:
            named.append(request.headers.getlist("x-session-id"))
            return await super()._answer(request)

    worker = Names()
    async with serving(worker) as url, start(*ALONE, "--worker-urls", url) as running:
        headers = [("x-session-id", "other"), ("x-more", "1"), ("x-smg-routing-key", "key")]
        body = b'{ "as": "it came" }'
        path = "/sessions/mine/v1/a%2Fb/c?d=%20&d=2"
        answer = await running.client.post(path, headers=headers, content=body)
        assert answer.json() == {"worker": "worker"}
        await running.client.post("/sessions/mine/generate", content=body)
    (seen, got, sent), (second, *_) = worker.requests
    assert (seen, second) == ("/v1/a/b/c", "/generate")
    assert (got["x-more"], got["x-smg-routing-key"]) == ("1", "key")
    assert named == [["mine"], ["mine"]]
    assert sent == body


@pytest.mark.parametrize("name", NAMES)
async def test_any_name_is_the_same_in_a_path_and_in_a_header(name: str, start: Start) -> None:
    async with start("--plugin", "engine", "--engine-workers", "1", "--plugin", "radix_cache") as running:
        client, path = running.client, quote(name)
        one = {"text": "One", "sampling_params": {"max_new_tokens": 2}}
        assert (await client.post(f"/sessions/{path}/generate", json=one)).status_code == 200
        headers = [(b"x-session-id", name.encode())]
        assert (
            await client.post("/generate", json={**one, "text": "Two"}, headers=headers)
        ).status_code == 200
        found = (await client.get(f"/trajectories/{path}")).json()
        assert (found["session_id"], len(found["trajectories"])) == (name, 2)
        shown = await client.get(f"/sessions/{quote(name, safe='')}")
        assert shown.json()["session_id"] == name


@pytest.mark.parametrize(
    ("raw", "told"),
    [
        ("/sessions//v1/models", "got 0"),
        ("/sessions/a//b/v1/models", "empty"),
        ("/sessions/%20a/v1/models", "space"),
        ("/sessions/%2e%2E/v1/models", "'..'"),
        ("/sessions/a/%2e/v1/models", "'.'"),
        ("/sessions/a%2F..%2Fb/v1/models", "'..'"),
        ("/sessions/a%/v1/models", "hexadecimal"),
        ("/sessions/a%zz/generate", "hexadecimal"),
        ("/sessions/%ff/v1/models", "UTF-8"),
        ("/sessions/a%0d%0aX-Evil:1/v1/models", "control"),
        ("/sessions/a%00/v1/models", "control"),
        (f"/sessions/{'x' * 513}/v1/models", "got 513"),
        (f"/sessions/{'%E2%98%94' * 400}/v1/models", "got 1200"),
    ],
)
async def test_invalid_name_is_refused_and_reaches_no_worker(raw: str, told: str, start: Start) -> None:
    worker = Recording()
    async with serving(worker) as url, start(*ALONE, "--worker-urls", url) as running:
        stream = await anyio.connect_tcp("127.0.0.1", int(running.url.rpartition(":")[2]))
        async with stream:
            head = f"POST {raw} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 2\r\nConnection: close\r\n\r\n{{}}"
            await stream.send(head.encode())
            answer = b"".join([chunk async for chunk in stream]).decode()
    assert answer.startswith("HTTP/1.1 400 ")
    assert told in answer
    assert worker.requests == []


@pytest.mark.parametrize("path", ["/sessions/a/flush_cache", "/sessions/a/sessions/b/x", "/sessions/a/v12"])
async def test_nothing_else_is_below_a_session(path: str, start: Start) -> None:
    worker = Recording()
    async with serving(worker) as url, start(*ALONE, "--worker-urls", url) as running:
        answer = await running.client.post(path)
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "NOT_FOUND")
        for method, own in (("PUT", "/sessions/a"), ("PUT", "/sessions/a/samples"), ("GET", "/sessions")):
            assert (await running.client.request(method, own)).status_code == 405
    assert worker.requests == []


async def test_a_path_opens_no_more_than_it_does_without_its_session(start: Start) -> None:
    worker = Recording()
    flags = ["--api-key", "traffic", "--admin-api-key", "admin"]
    async with serving(worker) as url, start("--worker-urls", url, *flags) as running:

        async def status(method: str, path: str, key: str | None) -> int:
            headers = {"authorization": f"Bearer {key}"} if key is not None else {}
            return (await running.client.request(method, path, headers=headers)).status_code

        for path in ("/v1/chat/completions", "/v1/load_lora_adapter", "/v1/../add_worker", "/generate"):
            for key in (None, "wrong", "traffic", "admin"):
                raw = path.replace("..", "%2e%2e")
                assert await status("POST", f"/sessions/a{raw}", key) == await status("POST", raw, key)
        for method, path in (("POST", "/sessions"), ("GET", "/sessions/a"), ("DELETE", "/sessions/a")):
            assert await status(method, path, None) == await status(method, path, "wrong") == 401
            assert await status(method, path, "traffic") != 401


async def test_a_stream_below_a_session_is_recorded_as_one_without(start: Start) -> None:
    async with chatting(start, "Well then.") as chat:
        question: list[dict[str, Any]] = [{"role": "user", "content": "Hi"}]
        chunks = await chat.streamed("/sessions/a/v1/chat/completions", messages=question)
        told = "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks)
        assert told == "Well then."
        (entry,) = chat.entries
        (record,) = await chat.trajectories("a")
        assert (record["exact"], record["tokens"]) == (True, [*entry.input_ids, *entry.output_ids])
        # The same conversation goes on by header: one session, whose tokens are gone on from.
        answer: dict[str, Any] = {"role": "assistant", "content": told}
        more = [*question, answer, {"role": "user", "content": "And?"}]
        await chat.post(messages=more, session_id="a")
        (record,) = await chat.trajectories("a")
        assert record["exact"]
        assert record["tokens"][: len(entry.input_ids) + len(entry.output_ids)] == [
            *entry.input_ids,
            *entry.output_ids,
        ]


async def test_a_client_that_hangs_up_below_a_session_stops_the_engine(start: Start) -> None:
    async with chatting(start, "word " * 5000, tokens_per_second=200) as chat:
        body = {"messages": [{"role": "user", "content": "Hi"}], "stream": True}
        async with chat.running.client.stream("POST", "/sessions/a/v1/chat/completions", json=body) as answer:
            async for line in answer.aiter_lines():
                if "word" in line:
                    break
        await until(lambda: chat.entries[0].finish_reason is not None)
        assert (chat.entries[0].finish_reason or {})["type"] == "abort"
        await until(lambda: not any(worker.in_flight for worker in chat.running.router.pool))


async def test_two_sessions_below_their_paths_are_two(start: Start) -> None:
    """Of a group: one prompt, and each sample's turns are its own."""
    async with chatting(start, "same") as chat:
        for name in ("a", "b"):
            await talk(chat, f"/sessions/{name}", "Why?", "And?")
        records = {name: (await chat.trajectories(name))[0] for name in ("a", "b")}
        by_tokens = {(*entry.input_ids, *entry.output_ids) for entry in chat.entries}
        for record in records.values():
            assert record["exact"]
            assert tuple(record["tokens"]) in by_tokens
        await speak(chat, "/sessions/c", [{"role": "user", "content": "Why?"}])
        assert len(await chat.trajectories("c")) == 1
