"""Streams that fail after their head was sent: the metrics, the logs and ``top`` tell of each."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import anyio
import httpx
import orjson
import pytest

from access_log.lines import fields_of
from deadlines import HANG_S, until
from metrics.scrapes import Numbers, scraped
from openai_.chat.aborted import MESSAGES, TAPE, TOKENIZER, aborting, engine_of, events_of
from openai_.chat.scripted import scripted
from openai_.dying import PATHS, asked_at, die_after, text_of_stream, until_broken
from slime_http.serving import serving
from slime_testing import FakeEngine

if TYPE_CHECKING:
    from pathlib import Path

    from routers import Start

pytestmark = pytest.mark.anyio

IDS = [300, 301, 302, 303, 304, 305]
BROKE = "a reply broke off: "


def failures(found: Numbers) -> dict[str, float]:
    """Return the failed streams by the other labels."""
    return {
        labels: value for (name, labels), value in found.items() if name == "slime_incomplete_answers_total"
    }


def error_in(stream: str) -> dict[str, Any]:
    """Return the error in the last event but one; the last is ``[DONE]``."""
    *_, event, done = stream.strip().split("\n\n")
    assert done == "data: [DONE]"
    error: dict[str, Any] = orjson.loads(event.removeprefix("data: "))["error"]
    return error


@pytest.mark.parametrize("path", PATHS)
async def test_stream_of_a_killed_worker_is_counted_and_logged(
    start: Start, caplog: pytest.LogCaptureFixture, path: str
) -> None:
    async with scripted(start, IDS, flags=("--access-log",)) as (running, engine):
        die_after(engine, 3)
        stream = await text_of_stream(running.client, path)
        (worker,) = running.router.pool
        found = await scraped(running.client)
    if path != "/generate":
        assert error_in(stream)["code"] == "WORKER_BROKE"
    assert failures(found) == {f"error=WORKER_BROKE path={path} worker={worker.url}": 1}
    assert found["slime_requests_total", f"path={path} status=200 worker={worker.url}"] == 1
    line = fields_of(caplog)[0]
    assert (line["status"], line["outcome"], line["error"]) == (200, "broke_off", "WORKER_BROKE")
    (told,) = [message for message in caplog.messages if BROKE in message]
    assert told.startswith(f"[{line['id']}] {BROKE}worker {worker.url} ")


async def test_failed_stream_to_a_client_of_http_1_0_is_counted(start: Start) -> None:
    """nginx speaks HTTP/1.0 with its upstreams by default."""
    path = "/v1/chat/completions"
    async with scripted(start, IDS) as (running, engine):
        die_after(engine, 3)
        body = orjson.dumps(asked_at(path))
        reader, writer = await asyncio.open_connection(*running.url.removeprefix("http://").split(":"))
        writer.write(b"POST %b HTTP/1.0\r\nContent-Length: %d\r\n\r\n%b" % (path.encode(), len(body), body))
        with anyio.fail_after(HANG_S):
            stream = await reader.read()
        writer.close()
        (worker,) = running.router.pool
        found = await scraped(running.client)
    assert error_in(stream.decode())["code"] == "WORKER_BROKE"
    assert failures(found) == {f"error=WORKER_BROKE path={path} worker={worker.url}": 1}
    assert found["smg_router_ttft_seconds_count", "endpoint=chat"] == 1


async def test_resumed_stream_is_no_failure(
    start: Start, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    engine = engine_of("running", "cumulative", 2, None)
    async with aborting(start, tmp_path, engine, "--access-log", "--resume-aborted") as running:
        await events_of(running, "/v1/chat/completions", messages=MESSAGES)
        found = await scraped(running.client)
    assert len(engine.asked) == 2
    assert len(engine.consumed[-1]) > len(TAPE[:2])
    assert not failures(found)
    assert fields_of(caplog)[0]["outcome"] == "complete"
    assert not [message for message in caplog.messages if BROKE in message]


@pytest.mark.parametrize("path", PATHS)
async def test_stream_that_outlasts_the_grace_period_says_why_it_ends(
    start: Start, tmp_path: Path, caplog: pytest.LogCaptureFixture, path: str
) -> None:
    TOKENIZER.save(tmp_path)
    engine = FakeEngine(TOKENIZER)
    engine.script.append(TAPE)
    engine.hold, engine.hold_after = anyio.Event(), 3
    flags = (
        "--plugin",
        "radix_cache",
        "--hf-checkpoint",
        str(tmp_path),
        "--plugin",
        "openai",
        "--access-log",
    )
    async with serving(engine.app) as worker, httpx.AsyncClient(trust_env=False) as client:
        async with start(*flags, "--worker-urls", worker, grace_s=1) as running:
            request = client.build_request("POST", f"{running.url}{path}", json=asked_at(path))
            answer = await client.send(request, stream=True)
            pieces = answer.aiter_text()
            stream = await anext(pieces)
        stream += await until_broken(pieces)
    if path != "/generate":
        assert error_in(stream) == {
            "message": "the router is shutting down",
            "type": "server_error",
            "param": None,
            "code": "SHUTTING_DOWN",
        }
    (line,) = fields_of(caplog)
    assert (line["status"], line["outcome"], line["error"]) == (200, "broke_off", "SHUTTING_DOWN")


async def test_client_that_hangs_up_is_no_failed_stream(
    start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    path = "/v1/chat/completions"
    async with scripted(start, IDS, flags=("--access-log",)) as (running, engine):
        engine.hold, engine.hold_after = anyio.Event(), 1
        async with running.client.stream("POST", path, json=asked_at(path)) as answer:
            await anext(answer.aiter_text())
        await until(lambda: fields_of(caplog) != [])
        (worker,) = running.router.pool
        found = await scraped(running.client)
    assert failures(found) == {f"error=client_gone path={path} worker={worker.url}": 1}
    line = fields_of(caplog)[0]
    assert (line["outcome"], line.get("error")) == ("client_gone", None)
