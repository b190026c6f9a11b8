"""``slime-router top`` at a terminal, over real routers."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager
from pathlib import Path

import anyio
import pytest
from rich.cells import cell_len
from starlette.applications import Starlette
from starlette.responses import HTMLResponse
from starlette.routing import Mount

from ports import free_port
from router_core import SettingsError, Worker
from router_core.cli import build
from routers import BARE, Start, answering
from slime_http.serving import serving
from slime_top import main
from top.terminal import COLUMNS, LINES, terminal

pytestmark = pytest.mark.anyio


@pytest.fixture(autouse=True)
def _wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.delenv("SLIME_ROUTER_ADMIN_API_KEY", raising=False)


async def top(*arguments: str) -> int:
    """Run the command in a thread, and return its exit code."""
    return await anyio.to_thread.run_sync(main, ["--interval", "0.2", *arguments])


async def test_one_frame_has_the_figures_of_the_router(
    start: Start, capsys: pytest.CaptureFixture[str]
) -> None:
    plugins = ("--plugin", "engine", "--engine-weight-version", "7", "--plugin", "radix_cache")
    async with start(*plugins, "--max-concurrent-requests", "4") as running:
        prompt = {"text": "Hello, ", "sampling_params": {"max_new_tokens": 8}}
        answer = (await running.client.post("/generate", json=prompt)).json()
        for text in (f"Hello, {answer['text']}", "never seen"):
            await running.client.post("/retrieve_from_text", json={"text": text})
        await running.client.post("/pause_generation", json={})
        assert (await running.client.get("/nowhere")).status_code == 404
        assert await top("--once", "--url", running.url) == 0
        (worker,) = (await running.client.get("/workers")).json()["workers"]
    shown = capsys.readouterr().out
    assert f"slime-router 0.1.0  {running.url}  up " in shown
    assert "1 of 1 workers ready, weights 7, PAUSED, 0 wait" in shown
    assert "0.0 requests/s, 0 in flight, 0 queued" in shown
    assert "(since the start)" in shown
    assert "sampled    1 exact " in shown
    assert "retrieved  1 exact, 1 not: 1 " in shown
    row = next(line for line in shown.splitlines() if worker["url"].removeprefix("http://") in line)
    assert row.split()[1:] == ["ready", "0", "0.0", "7", "closed"]


async def test_rates_are_those_of_the_interval(start: Start, capsys: pytest.CaptureFixture[str]) -> None:
    async with start("--plugin", "engine", "--engine-tokens-per-second", "200") as running:
        endless = {"text": "Hi", "sampling_params": {"max_new_tokens": 30_000, "ignore_eos": True}}
        async with anyio.create_task_group() as tasks:

            async def generate() -> None:
                await running.client.post("/generate", json=endless)

            tasks.start_soon(generate)
            assert await top("--once", "--url", running.url, "--interval", "1") == 0
            await running.client.post("/abort_request", json={"abort_all": True})
    shown = capsys.readouterr().out
    row = next(line for line in shown.splitlines() if " ready " in line)
    assert row.split()[2] == "1"
    assert 20 < float(row.split()[3]) <= 250
    assert "1 in flight" in shown


async def test_a_key_comes_from_a_file_or_a_variable(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "key").write_text("secret\n")
    monkeypatch.setenv("MY_KEY", "secret")
    async with start("--admin-api-key", "secret") as running:
        for given in (("--api-key-file", str(tmp_path / "key")), ("--api-key-env", "MY_KEY")):
            assert await top("--once", "--url", running.url, *given) == 0
        monkeypatch.setenv("SLIME_ROUTER_ADMIN_API_KEY", "secret")
        assert await top("--once", "--url", running.url) == 0
    assert capsys.readouterr().out.count("0 of 0 workers ready") == 3


@pytest.mark.parametrize("key", [None, "wrong"])
async def test_a_refused_key_is_told_in_one_line(
    start: Start, key: str | None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if key is not None:
        monkeypatch.setenv("SLIME_ROUTER_ADMIN_API_KEY", key)
    async with start("--admin-api-key", "secret") as running:
        assert await top("--once", "--url", running.url) == 1
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith(f"slime-router top: {running.url}: ")
    assert said.err.endswith("; give the admin key by --api-key-file FILE or --api-key-env NAME\n")
    assert said.err.count("\n") == 1


async def test_a_refused_key_ends_the_frames(start: Start) -> None:
    async with start("--admin-api-key", "secret") as running:
        with terminal("--url", running.url) as screen:
            assert await screen.ends() == 1


async def test_a_router_that_is_down_fails_one_frame(capsys: pytest.CaptureFixture[str]) -> None:
    url = f"http://127.0.0.1:{free_port()}"
    assert await top("--once", "--url", url) == 1
    said = capsys.readouterr().err
    assert said.startswith(f"slime-router top: {url}: ")
    assert said.count("\n") == 1


async def test_another_server_is_told_as_such(capsys: pytest.CaptureFixture[str]) -> None:
    async with serving(answering(b'"Hello"')) as url:
        assert await top("--once", "--url", url) == 1
    assert "its answers are not those of a slime-router" in capsys.readouterr().err


async def test_a_router_without_metrics_shows_its_workers(
    start: Start, capsys: pytest.CaptureFixture[str]
) -> None:
    async with serving(answering(b"{}")) as worker, start(*BARE, "--worker-urls", worker) as running:
        assert await top("--once", "--url", running.url) == 0
    shown = capsys.readouterr().out
    assert "none: the router runs without the plugin metrics" in shown
    assert worker.removeprefix("http://") in shown


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--url", "localhost"], "--url: wanted an address such as http://127.0.0.1:30000, got 'localhost'"),
        (
            ["--url", "http://[::1"],
            "--url: wanted an address such as http://127.0.0.1:30000, got 'http://[::1'",
        ),
        (
            ["--url", "http://h:99999"],
            "--url: wanted an address such as http://127.0.0.1:30000, got 'http://h:99999'",
        ),
        (["--interval", "0"], "--interval: wanted 0.1 to 3600 seconds, got 0"),
        (["--api-key-env", "NOWHERE"], "--api-key-env: the variable NOWHERE is not set"),
        (["--api-key-file", "/nowhere"], "--api-key-file: [Errno 2] No such file or directory: '/nowhere'"),
        ([], "wanted a terminal as standard input and output: add --once for one frame"),
    ],
)
def test_a_mistake_is_told_with_its_flag(arguments: list[str], told: str) -> None:
    with pytest.raises(SettingsError) as failure:
        main(arguments)
    assert str(failure.value) == told


@pytest.mark.parametrize("key", ["\u00e4", "two words"])
def test_a_key_that_no_header_can_have_is_told(key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLIME_ROUTER_ADMIN_API_KEY", key)
    with pytest.raises(
        SettingsError, match="the admin key: wanted printable ASCII characters, and no spaces"
    ):
        main(["--once"])


async def test_an_error_page_is_told_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    page = HTMLResponse("<html>\n<h1>404</h1>\n</html>", 404)
    async with serving(Starlette(routes=[Mount("/", page)])) as url:
        assert await top("--once", "--url", url) == 1
    assert capsys.readouterr().err == f"slime-router top: {url}: GET /workers: 404 Not Found\n"


async def test_a_narrow_terminal_shows_what_fits(start: Start) -> None:
    async with start() as running:
        for number in range(40):
            worker = running.router.pool.add(Worker(f"http://10.0.0.{number}:30000"))
            running.router.pool.hold(worker, "health", "three probes failed", "quarantined")
        with terminal("--url", running.url) as screen:
            frame = await screen.shows("0 of 40 workers ready")
            assert await screen.press("q") == 0
    lines = frame.split("\n")
    assert len(lines) == LINES
    assert max(map(cell_len, lines)) <= COLUMNS
    assert "and 29 more" in frame
    assert frame.count("quarantined") == 11
    row = next(line for line in lines if line.startswith("10.0.0.10:30000 "))
    assert row.split()[1:7] == ["quarantined", "0", "-", "-", "closed", "health:"], row
    assert row.endswith("…")


def at_port(port: int) -> AbstractAsyncContextManager[str]:
    """A router at ``port``."""
    router, app = build(["--port", str(port)])
    return serving(app, port=port, on_stop=router.stop, grace_s=0.1)


async def test_a_router_that_comes_back_is_shown_again() -> None:
    port = free_port()
    with terminal("--url", f"http://127.0.0.1:{port}") as screen:
        await screen.shows("no answer for 0 s, asking again: ")
        async with at_port(port):
            assert "no answer" not in await screen.shows("0 of 0 workers ready")
        last = await screen.shows("no answer for ", "0 of 0 workers ready")  # with the last figures
        assert "asking again" in last
        async with at_port(port):
            with anyio.fail_after(30):
                while "no answer" in await screen.shows("0 of 0 workers ready"):
                    pass
        assert await screen.press("q") == 0


async def test_other_keys_do_nothing(start: Start) -> None:
    async with start() as running:
        with terminal("--url", running.url) as screen:
            await screen.shows("0 of 0 workers ready")
            assert await screen.press("xyq") == 0
