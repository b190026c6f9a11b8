"""The lifespan of applications under the server."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager

import anyio
import httpx
import pytest
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from deadlines import HANG_S, until
from slime_http.asgi import ASGIApp, Receive, Scope, Send
from slime_http.errors import RouterError, StartupError
from slime_http.lifespan import APP
from slime_http.serving import serving

pytestmark = pytest.mark.anyio


def failing(*errors: Exception) -> ASGIApp:
    """An application whose lifespan raises ``errors`` in task groups, as a router's does."""

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        async with anyio.create_task_group(), anyio.create_task_group():
            raise errors[0] if len(errors) == 1 else ExceptionGroup("several", errors)
        yield

    return Starlette(lifespan=lifespan)


async def reason_of(app: ASGIApp) -> BaseException:
    server: AbstractAsyncContextManager[str] = serving(app)
    with anyio.fail_after(5), pytest.raises(ExceptionGroup) as failure:
        async with server:
            raise AssertionError("it does not start")
    (error,) = failure.value.exceptions
    return error


async def test_reason_of_a_failed_start_is_raised_and_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    error = StartupError("no disk")
    assert await reason_of(failing(error)) is error
    assert not caplog.records


@pytest.mark.parametrize("errors", [[ValueError("odd")], [StartupError("odd"), ValueError("even")]])
async def test_other_errors_of_a_start_are_logged_once(
    errors: list[Exception], caplog: pytest.LogCaptureFixture
) -> None:
    assert str(await reason_of(failing(*errors))) == "the application cannot start; the log says why"
    (record,) = caplog.records
    assert record.getMessage() == "the application's lifespan failed"
    assert record.exc_info is not None


async def test_error_that_ends_a_running_application_is_one_line_in_the_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    fails = anyio.Event()

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        async def fail() -> None:
            await fails.wait()
            raise RouterError("the disk is gone")

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(fail)
            yield

    async with serving(Starlette(lifespan=lifespan)):
        fails.set()
        await until(lambda: "the disk is gone" in caplog.text)
    (record,) = [one for one in caplog.records if one.levelname == "ERROR"]
    assert record.getMessage() == "the application ends: the disk is gone"
    assert record.exc_info is None


async def test_application_may_say_that_it_cannot_start() -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "lifespan.startup.failed", "message": "no disk"})

    assert str(await reason_of(app)) == "the application cannot start: no disk"


async def test_application_without_a_lifespan_is_served() -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        assert scope["type"] == "lifespan"

    async with serving(app) as url:
        assert url


@pytest.mark.parametrize("leaves", [True, False])
async def test_outermost_layer_may_leave_requests_to_its_inner_application(leaves: bool) -> None:
    inner = Starlette(routes=[Route("/", PlainTextResponse("served"))])
    called: list[str] = []

    async def outer(scope: Scope, receive: Receive, send: Send) -> None:
        called.append(scope["type"])
        if scope["type"] == "lifespan":
            assert scope["extensions"][APP] is outer
            if leaves:
                scope["extensions"][APP] = inner
        await inner(scope, receive, send)

    async with serving(outer) as url, httpx.AsyncClient(base_url=url, trust_env=False) as client:
        assert (await client.get("/")).text == "served"
    assert called == (["lifespan"] if leaves else ["lifespan", "http"])


ASKS_ANYIO_IN_A_CALLBACK = """
import asyncio, os, signal
import anyio
from slime_http.serving import bind, run

async def app(scope, receive, send):
    await receive()
    done = asyncio.Event()

    def ask():
        os.kill(os.getpid(), signal.SIGTERM)
        done.set()
        print(anyio.current_time() > 0)

    await send({"type": "lifespan.startup.complete"})
    await anyio.sleep(0.1)  # until signals are handled
    asyncio.get_running_loop().call_soon(ask)
    await done.wait()
    await receive()
    await send({"type": "lifespan.shutdown.complete"})

run(app, bind("127.0.0.1", 0), grace_s=1)
"""


def test_anyio_knows_the_event_loop_in_callbacks_of_the_server_process() -> None:
    command = [sys.executable, "-c", ASKS_ANYIO_IN_A_CALLBACK]
    done = subprocess.run(command, capture_output=True, text=True, timeout=HANG_S, check=False)
    assert (done.stdout, done.stderr) == ("True\n", "")
