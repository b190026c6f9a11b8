"""SIGTERM to a router process, in the middle of a stream from a real engine."""

from __future__ import annotations

import re
import signal
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from subprocess import PIPE

import anyio
import anyio.abc
import httpx
import pytest

from deadlines import HANG_S
from slime_engine.app import make_app
from slime_engine.engine import EngineHost
from slime_engine.settings import Settings
from slime_http.serving import serving

#: About 1.5 s of generation.
STREAM = {
    "text": "<|im_start|>user\nTell me a story.<|im_end|>\n<|im_start|>assistant\n",
    "stream": True,
    "sampling_params": {"max_new_tokens": 60, "ignore_eos": True},
}


class EndingRouter:
    """``slime-router`` as a process of its own. ``url`` is where it listens."""

    def __init__(self, process: anyio.abc.Process, url: str) -> None:
        self.process = process
        self.url = url

    async def left(self) -> int:
        with anyio.fail_after(HANG_S):
            return await self.process.wait()


@asynccontextmanager
async def router_process(worker: str, *flags: str) -> AsyncIterator[EndingRouter]:
    command = [sys.executable, "-m", "router_core", "--port", "0", "--worker-urls", worker, *flags]
    async with await anyio.open_process(command, stdin=None, stdout=None, stderr=PIPE) as process:
        assert process.stderr is not None
        said = ""
        try:
            with anyio.fail_after(HANG_S):
                async for chunk in process.stderr:
                    said += chunk.decode()
                    if found := re.search(r"listening on (\S+)\n", said):
                        break
            assert found, said
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(_drain, process.stderr)
                yield EndingRouter(process, found[1])
        finally:
            with suppress(ProcessLookupError):
                process.kill()


async def _drain(stream: anyio.abc.ByteReceiveStream) -> None:
    async for _ in stream:
        pass


@asynccontextmanager
async def slow_engine() -> AsyncIterator[tuple[str, EngineHost]]:
    app = make_app(Settings(tokens_per_second=40))
    async with serving(app, grace_s=1) as url:
        yield url, app.state.host


@pytest.fixture
def heeds_sighup() -> Iterator[None]:
    """A process that begins now does not ignore it, even if this one was started by nohup."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.mark.anyio
@pytest.mark.usefixtures("heeds_sighup")
@pytest.mark.parametrize("told", [signal.SIGTERM, signal.SIGHUP])
async def test_signal_lets_streams_finish_refuses_new_requests_and_exits_0(
    told: signal.Signals,
) -> None:
    async with (
        slow_engine() as (engine, _),
        router_process(engine) as router,
        httpx.AsyncClient(base_url=router.url, trust_env=False, timeout=HANG_S) as client,
        client.stream("POST", "/generate", json=STREAM) as answer,
    ):
        lines = answer.aiter_lines()
        await anext(lines)
        router.process.send_signal(told)
        refused_at, seen = 0, ["data"]
        async for line in lines:
            seen.append(line)
            if not refused_at and not await _answers(router):
                refused_at = len(seen)
        assert seen[-2:] == ["data: [DONE]", ""]
        assert 0 < refused_at < len(seen) - 20, "the stream went on when nothing new was taken any more"
        assert await router.left() == 0


async def _answers(router: EndingRouter) -> bool:
    try:
        async with httpx.AsyncClient(trust_env=False, timeout=HANG_S) as other:
            return (await other.get(f"{router.url}/health")).is_success
    except httpx.ConnectError:
        return False


@pytest.mark.anyio
async def test_stream_past_the_grace_period_is_cut_off_at_router_and_engine() -> None:
    async with (
        slow_engine() as (engine, host),
        router_process(engine, "--shutdown-grace-period-secs", "1") as router,
        httpx.AsyncClient(base_url=router.url, trust_env=False, timeout=HANG_S) as client,
    ):
        endless = {**STREAM, "sampling_params": {"max_new_tokens": 20_000, "ignore_eos": True}}
        async with client.stream("POST", "/generate", json=endless) as answer:
            lines = answer.aiter_lines()
            await anext(lines)
            router.process.send_signal(signal.SIGTERM)
            with pytest.raises(httpx.RemoteProtocolError):
                [line async for line in lines]
        assert await router.left() == 0
        with anyio.fail_after(HANG_S):
            while host.engine.scheduler.running:  # noqa: ASYNC110  # the engine has no event for it
                await anyio.sleep(0.01)


@pytest.mark.anyio
async def test_a_second_signal_does_not_wait() -> None:
    async with (
        slow_engine() as (engine, _),
        router_process(engine, "--shutdown-grace-period-secs", "1000") as router,
        httpx.AsyncClient(base_url=router.url, trust_env=False, timeout=HANG_S) as client,
    ):
        endless = {**STREAM, "sampling_params": {"max_new_tokens": 20_000, "ignore_eos": True}}
        with suppress(httpx.RemoteProtocolError):
            async with client.stream("POST", "/generate", json=endless) as answer:
                lines = answer.aiter_lines()
                await anext(lines)
                router.process.send_signal(signal.SIGTERM)
                while await _answers(router):  # noqa: ASYNC110  # two signals at once may arrive as one
                    await anyio.sleep(0.01)
                router.process.send_signal(signal.SIGTERM)
                assert await router.left() == 0  # long before the stream ends, or the grace period
