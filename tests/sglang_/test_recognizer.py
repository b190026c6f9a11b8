"""A server that speaks vLLM's protocol is refused when it registers, and when it comes up later."""

from __future__ import annotations

from contextlib import AsyncExitStack, asynccontextmanager
from typing import TYPE_CHECKING, Any

import pytest
from starlette.applications import Starlette
from starlette.responses import JSONResponse
from starlette.routing import Route

from control.steered import steering
from plugged import until
from slime_http.serving import bind, serving, url_of

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from starlette.requests import Request

    from routers import Start

pytestmark = pytest.mark.anyio

VERSION = {"/version": (200, {"version": "0.11.0"})}


def models(owner: str) -> dict[str, tuple[int, Any]]:
    return {"/v1/models": (200, {"object": "list", "data": [{"id": "m", "owned_by": owner}]})}


VLLM = {"/health": (200, {}), **VERSION, **models("vllm")}
GUARDED = {"/health": (200, {}), **VERSION, "/v1/models": (401, {"error": "Unauthorized"})}


def server(answers: dict[str, tuple[int, Any]]) -> Starlette:
    """A server that answers these, and 404 to everything else."""

    async def answer(request: Request) -> JSONResponse:
        status, content = answers[request.url.path]
        return JSONResponse(content, status)

    return Starlette(routes=[Route(path, answer) for path in answers])


@asynccontextmanager
async def before(answers: dict[str, tuple[int, Any]]) -> AsyncIterator[str]:
    async with serving(server(answers), grace_s=0.1) as url:
        yield url


@pytest.mark.parametrize("route", ["/add_worker", "/workers"])
@pytest.mark.parametrize("answers", [VLLM, GUARDED], ids=["open", "with a key"])
async def test_vllm_is_refused(route: str, answers: dict[str, tuple[int, Any]]) -> None:
    async with before(answers) as url, steering() as running:
        refused = await running.client.post(route, json={"url": url})
        assert refused.status_code == 400
        error = refused.json()["error"]
        assert (error["code"], error["message"]) == (
            "WORKER_REFUSED",
            f"{url} speaks vLLM's protocol; supported: SGLang (with worker_type passthrough, the router only proxies)",
        )
        assert len(running.router.pool) == 0


@pytest.mark.parametrize(
    "answers",
    [
        {"/health": (200, {})},
        VERSION,
        models("sglang"),
        {"/v1/models": (401, {})},
        {"/v1/models": (401, {}), "/version": (200, {"version": "1", "commit": "c"})},
        {"/v1/models": (200, {"data": [1, {"owned_by": 1}]})},
        {**VLLM, "/get_model_info": (200, {"model_path": "m"})},
    ],
)
async def test_others_are_not_taken_for_it(answers: dict[str, tuple[int, Any]]) -> None:
    async with before(answers) as url, steering() as running:
        added = await running.client.post("/add_worker", json={"url": url})
        assert (added.status_code, list(added.json()["worker_urls"])) == (200, [url])
        assert running.router.pool.healthy == 1


async def test_vllm_that_comes_up_after_its_registration_is_removed(
    start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    with bind("127.0.0.1", 0) as reserved:
        url = url_of(reserved)
    async with start("--worker-startup-check-interval", "0.05") as running, AsyncExitStack() as stack:
        assert "warning" in (await running.client.post("/add_worker", json={"url": url})).json()
        port = int(url.rpartition(":")[2])
        await stack.enter_async_context(serving(server(VLLM), port=port, grace_s=0.1))
        await until(lambda: len(running.router.pool) == 0)
    assert f"worker {url} is refused: {url} speaks vLLM's protocol" in caplog.text


async def test_a_router_that_is_told_of_vllm_at_its_start_serves(start: Start) -> None:
    async with before(VLLM) as url, start("--worker-urls", url) as running:
        assert (await running.client.get("/list_workers")).json() == {"urls": []}


async def test_a_worker_that_is_vllm_now_is_no_worker_any_more() -> None:
    answers: dict[str, tuple[int, Any]] = {"/model_info": (200, {}), **VLLM}
    async with before(answers) as url, steering() as running:
        assert (await running.client.post("/add_worker", json={"url": url})).status_code == 200
        answers["/model_info"] = (404, {})
        assert (await running.client.post("/add_worker", json={"url": url})).status_code == 400
        assert len(running.router.pool) == 0
