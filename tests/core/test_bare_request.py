"""The layers that a plain request passes: few coroutines, and no sender of a plugin that has nothing to say."""

from __future__ import annotations

import asyncio
import inspect
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any

import anyio
import httpx
import pytest

from core.servers import Wire, answer, scripted
from deadlines import HANG_S
from http_.conversations import connected, watch_server
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
async def test_a_request_without_plugins_runs_five_coroutines() -> None:
    async with scripted(echo) as worker:
        router, _ = build([*NO_PLUGINS, "--worker-urls", worker.url])
        ran = await coroutines_of_a_request(make_app(router))
    assert ran == ["_proxied", "request", "respond", "run", "send"]


@pytest.mark.skipif(is_compiled(), reason="a compiled coroutine has no frame")
async def test_default_plugins_add_a_coroutine_for_hooks_and_for_retries() -> None:
    async with scripted(echo) as worker:
        router, _ = build(["--worker-urls", worker.url])
        ran = await coroutines_of_a_request(make_app(router))
    assert ran == [
        "_proxied", "call_post_response", "call_pre_request", "request", "respond", "run", "send", "send",
    ]  # fmt: skip


async def test_plugins_with_nothing_to_say_add_no_sender() -> None:
    bare, _ = build(NO_PLUGINS)
    assert bare.sender is bare.proxy
    router, _ = build([])
    assert {"policies", "sglang", "health", "control"} <= {*router.hooks.plugins}
    retrying = router.sender
    assert retrying._inner is router.proxy  # type: ignore[attr-defined]  # the only layer of the default plugins


@pytest.mark.parametrize(
    ("flags", "expected"),
    [(NO_PLUGINS, ["_App"]), ([], ["SessionPaths", "KeptFromPages", "_App"])],
    ids=["no plugins", "default plugins"],
)
async def test_server_calls_the_application_without_layers_that_only_pass_on(
    monkeypatch: pytest.MonkeyPatch, flags: Sequence[str], expected: list[str]
) -> None:
    """The layers of the default plugins look at each request: at the session in its path, and at its web page."""
    router, _ = build(flags)
    seen = watch_server(monkeypatch)
    async with serving(make_app(router)) as url, connected(url) as client:
        await client.say(b"GET /liveness HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert (await client.answer()).status == 200
        layer: Any = seen.connections[0]._app
    layers = [type(layer).__name__]
    while (layer := getattr(layer, "_app", None)) is not None:
        layers.append(type(layer).__name__)
    assert layers == expected


async def test_a_layer_that_hands_on_the_attributes_of_receive_and_send_is_called() -> None:
    """Libraries for wrappers, such as wrapt, make objects with all attributes of what they wrap."""

    class Delegating:
        def __init__(self, inner: Any, change: Any) -> None:
            self._inner, self._change = inner, change

        def __getattr__(self, name: str) -> Any:
            return getattr(self._inner, name)

        async def __call__(self, *message: Any) -> Any:
            return self._change(await self._inner(*map(self._change, message)))

    def upper(message: Any) -> Any:
        return message and {**message, "body": message.get("body", b"").upper()}

    async with scripted(echo) as worker:
        router, _ = build([*NO_PLUGINS, "--worker-urls", worker.url])
        app = make_app(router)

        async def layered(scope: Any, receive: Any, send: Any) -> None:
            if scope["type"] == "http":
                receive, send = Delegating(receive, upper), Delegating(send, upper)
            await app(scope, receive, send)

        async with serving(layered) as url, connected(url) as client:
            with anyio.fail_after(HANG_S):
                status = 0
                while status != 200:
                    await client.say(b"POST /x HTTP/1.1\r\nHost: localhost\r\nContent-Length: 5\r\n\r\nhello")
                    answer = await client.answer()
                    status = answer.status
    assert worker.arrived[-1].body == b"HELLO"


async def test_a_router_that_does_not_serve_refuses_requests() -> None:
    async with scripted(echo) as worker:
        router, _ = build([*NO_PLUGINS, "--worker-urls", worker.url])
        app = make_app(router)
        for _ in range(2):
            transport = httpx.ASGITransport(app)
            async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
                assert (await client.post("/x", content=b"hello")).status_code == 500
            async with router.running():
                pass
        assert worker.arrived == []
        assert router.proxy.open_connections == 0
