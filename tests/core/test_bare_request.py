"""The layers that a plain request passes: few coroutines, and no sender of a plugin that has nothing to say."""

from __future__ import annotations

import asyncio
import inspect
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

import anyio
import pytest

from core.servers import Wire, answer, scripted
from deadlines import HANG_S
from http_.conversations import connected
from router_core.app import make_app
from router_core.cli import build, is_compiled
from router_core.types import ASGIApp
from slime_http.serving import serving

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.parametrize("anyio_backend", [("asyncio", {"use_uvloop": True})]),
]

REQUEST = b"POST /generate HTTP/1.1\r\nHost: localhost\r\nContent-Length: 2\r\n\r\n{}"
NO_PLUGINS = ("--no-default-plugins",)


@contextmanager
def counted_coroutines() -> Iterator[dict[int, FrameType]]:
    """Yield the frames of all coroutines that requests to the server of this thread run, by identity."""
    frames: dict[int, FrameType] = {}

    def note(frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        if event == "call" and code.co_flags & inspect.CO_COROUTINE:
            task = asyncio.current_task()
            if task is not None and getattr(task.get_coro(), "__qualname__", "") == "ServerRequest.run":
                frames[id(frame)] = frame  # kept, so that no other frame gets its identity

    sys.setprofile(note)
    try:
        yield frames
    finally:
        sys.setprofile(None)


async def echo(wire: Wire) -> None:
    while request := await wire.request():
        await wire.send(answer(request.body))


async def coroutines_of_a_request(app: ASGIApp) -> list[str]:
    async with serving(app) as url, connected(url) as client:

        async def status() -> int:
            await client.say(REQUEST)
            return (await client.answer()).status

        with anyio.fail_after(HANG_S):
            while await status() != 200:  # noqa: ASYNC110  # the worker is being registered
                await anyio.sleep(0.01)
        with counted_coroutines() as frames:
            assert await status() == 200
    return sorted(frame.f_code.co_name for frame in frames.values())


@pytest.mark.skipif(is_compiled(), reason="a compiled coroutine has no frame")
async def test_a_request_without_plugins_runs_seven_coroutines() -> None:
    async with scripted(echo) as worker:
        router, _ = build([*NO_PLUGINS, "--worker-urls", worker.url])
        ran = await coroutines_of_a_request(make_app(router))
    assert ran == ["_proxied", "read_body", "receive", "request", "respond", "run", "send"]


@pytest.mark.skipif(is_compiled(), reason="a compiled coroutine has no frame")
async def test_default_plugins_add_a_coroutine_for_hooks_and_for_retries() -> None:
    async with scripted(echo) as worker:
        _, app = build(["--worker-urls", worker.url])
        ran = await coroutines_of_a_request(app)
    assert ran == [
        "_proxied", "call_post_response", "call_pre_request", "read_body", "receive", "recognised", "request",
        "respond", "run", "send", "send",
    ]  # fmt: skip


async def test_plugins_with_nothing_to_say_add_no_sender() -> None:
    bare, _ = build(NO_PLUGINS)
    assert bare.sender is bare.proxy
    router, _ = build([])
    assert {"policies", "sglang", "health", "control"} <= {*router.hooks.plugins}
    retrying = router.sender
    assert retrying._inner is router.proxy  # type: ignore[attr-defined]  # the only layer of the default plugins
