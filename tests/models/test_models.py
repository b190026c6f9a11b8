"""With several models behind a router each request reaches a worker of the model that it names, or is told why not."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import httpx
import orjson
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from compatibility.launching import launched, our_words
from holding import quarantine, ready
from plugged import Recording, until
from ports import free_port
from router_core.cli import build
from router_core.errors import MissingComponent, SettingsError
from routers import Start
from slime_engine.app import make_app
from slime_engine.model import load_model
from slime_engine.settings import Settings as Engine
from slime_http.serving import serving
from slime_models import make_plugin
from slime_sglang.facts import model_id
from slime_testing import Running

pytestmark = pytest.mark.anyio


class ModelServer:
    """An engine that says which model it serves, and keeps what it got; ``status`` is what it answers with.

    It is not a FakeEngine, which parses the bodies of generations and records other calls apart from them.
    """

    def __init__(
        self, path: str, *, served: str | None = None, version: str = "default", status: int = 200
    ) -> None:
        self.served = served
        self.path = path
        self.version = version
        self.status = status
        self.bodies: list[bytes] = []
        self.called: list[str] = []
        self.url = ""
        self.app = Starlette(
            routes=[
                Route("/model_info", self._model_info),
                Route("/get_server_info", self._server_info),
                Route("/{path:path}", self._answer, methods=["GET", "POST", "PUT"]),
            ]
        )

    async def _model_info(self, _: Request) -> Response:
        return JSONResponse({"model_path": self.path, "weight_version": self.version})

    async def _server_info(self, _: Request) -> Response:
        return JSONResponse({"served_model_name": self.served, "model_path": self.path})

    async def _answer(self, request: Request) -> Response:
        if request.url.path == "/server_info":
            return JSONResponse({}, 404)  # as an old one
        if request.method != "GET":  # else it is a probe
            self.called.append(request.url.path)
            self.bodies.append(await request.body())
        return JSONResponse({"success": True, "by": self.url}, self.status)


@asynccontextmanager
async def serving_models(start: Start, servers: Sequence[ModelServer], *flags: str) -> AsyncIterator[Running]:
    """A router with ``--enable-igw``, and ``servers`` that have joined."""
    quick = ("--retry-initial-backoff-ms", "1", "--retry-max-backoff-ms", "2")
    async with start("--enable-igw", *quick, *flags) as running, AsyncExitStack() as stack:
        for server in servers:
            server.url = await stack.enter_async_context(serving(server.app))
            (await running.client.post("/workers", json={"url": server.url})).raise_for_status()
        yield running


async def by(
    running: Running,
    server: ModelServer | Sequence[ModelServer],
    body: Any,
    path: str = "/generate",
    **more: Any,
) -> None:
    """``body`` is answered by ``server``, or by all of these in turn, and by nobody else."""
    answers = [await running.client.post(path, json=body, **more) for _ in range(4)]
    wanted = [server] if isinstance(server, ModelServer) else server
    assert {answer.json().get("by", answer.text) for answer in answers} == {each.url for each in wanted}


async def refused(running: Running, body: Any, path: str = "/generate") -> tuple[int, str, str]:
    answer = await running.client.post(path, json=body)
    error = answer.json()["error"]
    return answer.status_code, error["code"], error["message"]


def alphas_and_beta() -> list[ModelServer]:
    return [
        ModelServer("/models/alpha"),
        ModelServer("/models/alpha"),
        ModelServer("/models/beta", served="beta"),
    ]


# which worker


@pytest.mark.parametrize(
    "path", ["/generate", "/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/rerank"]
)
async def test_a_request_goes_to_the_workers_of_the_model_that_it_names(start: Start, path: str) -> None:
    servers = first, second, beta = alphas_and_beta()
    async with serving_models(start, servers, "--policy", "round_robin") as running:
        await by(running, (first, second), {"model": "/models/alpha", "text": "x"}, path)
        await by(running, beta, {"model": "beta", "text": "x"}, path)
        assert {"model": "beta", "text": "x"}.items() <= orjson.loads(beta.bodies[-1]).items()


async def test_the_name_of_the_registration_wins(start: Start) -> None:
    servers = [ModelServer("/models/alpha", served="alpha"), ModelServer("/models/beta", served="beta")]
    async with serving_models(start, servers[:1]) as running, serving(servers[1].app) as servers[1].url:
        await running.client.post("/workers", json={"url": servers[1].url, "model_id": "judge"})
        await by(running, servers[1], {"model": "judge"})
        assert (await refused(running, {"model": "beta"}))[:2] == (404, "model_not_found")
        shown = (await running.client.get("/workers")).json()["workers"]
        assert [worker["model_id"] for worker in shown] == ["alpha", "judge"]


@pytest.mark.parametrize("back", ["registered again", "readmitted"])
async def test_a_server_that_comes_back_with_another_model_is_asked_for_that_one(
    start: Start, back: str
) -> None:
    servers = changed, named = [ModelServer("/alpha", served="alpha"), ModelServer("/alpha", served="alpha")]
    async with serving_models(start, servers, "--disable-health-check") as running:
        await running.client.post("/workers", json={"url": named.url, "model_id": "judge"})
        for server in servers:
            server.served = "beta"
            if back == "readmitted":
                worker = running.router.pool.find(server.url)
                quarantine(running.router.pool, worker, "it was restarted")
                ready(running.router.pool, worker)
            else:
                await running.client.post("/workers", json={"url": server.url})
        await until(lambda: model_id(running.router.pool.find(changed.url)) == "beta")
        await by(running, changed, {"model": "beta"})
        await by(running, named, {"model": "judge"})  # as its registration said
        assert (await refused(running, {"model": "alpha"}))[:2] == (404, "model_not_found")


async def test_a_server_keeps_its_name_when_its_weights_come_from_elsewhere(start: Start) -> None:
    async with serving_models(start, [alpha := ModelServer("/alpha")]) as running:
        alpha.path = "/checkpoints/2"  # as SGLang says it after an update from disk
        await running.client.post("/workers", json={"url": alpha.url})
        await by(running, alpha, {"model": "/alpha"})


async def test_a_session_that_asks_two_models_gets_both(start: Start) -> None:
    servers = first, second, beta = alphas_and_beta()
    session: dict[str, Any] = {"headers": {"x-session-id": "s"}}
    async with serving_models(start, servers) as running:
        for _ in range(3):
            await by(running, beta, {"model": "beta"}, **session)
            answers = [
                await running.client.post("/generate", json={"model": "/models/alpha"}, **session)
                for _ in range(4)
            ]
            assert {answer.json()["by"] for answer in answers} in ({first.url}, {second.url}), (
                "it keeps its worker"
            )


@pytest.mark.parametrize(
    "policy", ["auto", "least_inflight", "round_robin", "random", "power_of_two", "cache_aware", "manual"]
)
async def test_no_policy_leaves_the_model(start: Start, policy: str) -> None:
    servers = [*alphas_and_beta(), ModelServer("/models/beta", served="beta")]
    async with serving_models(start, servers, "--policy", policy) as running:
        for number in range(12):
            headers = {"x-smg-routing-key": str(number)}
            body = {"model": ("/models/alpha", "beta")[number % 2], "text": "the same long prompt " * 20}
            await running.client.post("/generate", json=body, headers=headers)
    assert all(b"alpha" in body for server in servers[:2] for body in server.bodies)
    assert all(b"beta" in body for server in servers[2:] for body in server.bodies)
    assert sum(len(server.bodies) for server in servers) == 12


async def test_failed_request_is_retried_within_its_model(start: Start) -> None:
    bad, good, beta = ModelServer("/alpha", status=503), ModelServer("/alpha"), ModelServer("/beta")
    async with serving_models(start, (bad, good, beta), "--disable-circuit-breaker") as running:
        await by(running, good, {"model": "/alpha"})
        good.status = 500
        assert (await running.client.post("/generate", json={"model": "/alpha"})).status_code in (500, 503)
        assert bad.bodies
        assert beta.bodies == []


async def test_a_model_whose_only_worker_fails_is_tried_there_again(start: Start) -> None:
    bad, other = ModelServer("/alpha", status=503), ModelServer("/beta")
    async with serving_models(
        start, (bad, other), "--disable-circuit-breaker", "--retry-max-retries", "3"
    ) as running:
        assert (await running.client.post("/generate", json={"model": "/alpha"})).status_code == 503
    assert len(bad.bodies) == 3
    assert other.bodies == []


async def test_prefill_and_decode_are_of_the_model_that_is_named(start: Start) -> None:
    kinds = {
        name: ModelServer(name.rpartition(" ")[0])
        for name in ("/a prefill", "/a decode", "/b prefill", "/b decode")
    }
    async with start("--enable-igw", "--pd-disaggregation") as running, AsyncExitStack() as stack:
        for name, server in kinds.items():
            server.url = await stack.enter_async_context(serving(server.app))
            await running.client.post(
                "/workers", json={"url": server.url, "worker_type": name.rpartition(" ")[2]}
            )
        for _ in range(4):
            await by(running, kinds["/b decode"], {"model": "/b", "text": "x"})
        assert (await refused(running, {"text": "x"}))[:2] == (400, "BAD_REQUEST")
    assert {name: len(server.bodies) for name, server in kinds.items()} == {
        "/a prefill": 0, "/a decode": 0, "/b prefill": 16, "/b decode": 16,
    }  # fmt: skip


# no model, or none there


async def test_without_a_name_a_single_model_is_meant_and_of_several_none(start: Start) -> None:
    alpha, beta = ModelServer("/alpha"), ModelServer("/beta")
    async with serving_models(start, [alpha]) as running:
        for body in (
            {"text": "x"},
            {"model": None, "text": "x"},
            {"metadata": {"model": "/beta"}},
            ["model"],
        ):
            await by(running, alpha, body)
        async with serving(beta.app) as beta.url:
            await running.client.post("/workers", json={"url": beta.url})
            for path in ("/generate", "/v1/chat/completions", "/tokenize"):
                status, code, message = await refused(running, {"text": "x"}, path)
                assert (status, code) == (400, "BAD_REQUEST")
                assert message.endswith(": /alpha, /beta")
            assert (await running.client.put("/generate", json={"text": "x"})).status_code == 400
            assert (await running.client.get("/ping")).status_code == 200
    assert beta.bodies == []


@pytest.mark.parametrize(
    "body", [b'{"model": "/alpha"', b'"model"', b'--x\r\nname="model"\r\n\r\n/beta', b""]
)
async def test_a_body_that_is_no_object_names_no_model(start: Start, body: bytes) -> None:
    """The worker says what is wrong with it; of several, none can be chosen."""
    async with serving_models(start, [alpha := ModelServer("/alpha")]) as running:
        assert (await running.client.post("/generate", content=body)).json()["by"] == alpha.url
        async with serving((beta := ModelServer("/beta")).app) as beta.url:
            await running.client.post("/workers", json={"url": beta.url})
            assert (await running.client.post("/generate", content=body)).status_code == 400


@pytest.mark.parametrize(
    ("body", "named"),
    [
        (b'{"\\u006dodel": "/beta"}', "beta"),
        (b'{"mod\\u0065l": "\\u002fbeta"}', "beta"),
        (b'{"model": "/alpha", "m\\u006Fdel": "/beta"}', "beta"),  # the last one counts, as for the engine
        (b'{"model": "/beta", "model": "/alpha"}', "alpha"),
        (b'{"model": "/gamma", "text": "x"}', None),
        (b'{"\\u006dodel": "/gamma"}', None),
    ],
)
@pytest.mark.parametrize("method", ["POST", "PUT"])
async def test_a_name_is_read_however_it_is_written(
    method: str, body: bytes, named: str | None, start: Start
) -> None:
    alpha, beta = ModelServer("/alpha"), ModelServer("/beta")
    async with serving_models(start, [alpha, beta]) as running:
        wanted = {"alpha": alpha.url, "beta": beta.url, None: 404}[named]
        for _ in range(3):
            answer = await running.client.request(method, "/generate", content=body)
            assert answer.json().get("by", answer.status_code) == wanted
    async with serving_models(
        start, [alpha]
    ) as running:  # who serves the only model is asked for no other one
        answer = await running.client.request(method, "/generate", content=body)
        assert answer.status_code == (200 if named == "alpha" else 404)


async def test_a_model_that_nobody_serves_is_told_at_once_and_once(start: Start) -> None:
    async with serving_models(start, alphas_and_beta()) as running:
        for name in ("alpha", "Beta", "beta ", ""):
            status, code, message = await refused(running, {"model": name})
            assert (status, code) == (404, "model_not_found")
            assert message.endswith("known: /models/alpha, beta")


async def test_a_worker_that_never_says_its_model_holds_up_nobody(start: Start) -> None:
    """It is no SGLang server, and is asked for no model."""
    silent, alpha = Recording("silent"), ModelServer("/alpha")
    async with serving_models(start, [alpha]) as running, serving(silent) as url:
        await running.client.post("/workers", json={"url": url})
        await by(running, alpha, {"model": "/alpha"})
        await by(running, alpha, {"text": "x"})
        assert (await refused(running, {"model": "x"}))[:2] == (404, "model_not_found")
        assert "/generate" not in [path for path, _, _ in silent.requests]
        running.router.pool.remove(running.router.pool.find(alpha.url))
        answer = await running.client.post("/generate", json={"text": "x"})
        assert answer.json() == {"worker": "silent"}, "there is no other"


async def test_a_model_that_may_come_yet_is_a_503(start: Start) -> None:
    late = f"http://127.0.0.1:{free_port()}"
    async with serving_models(start, []) as running:
        assert (await refused(running, {"model": "x"}))[:2] == (503, "NO_WORKER")
        async with serving((alpha := ModelServer("/alpha")).app) as alpha.url:
            await running.client.post("/workers", json={"url": alpha.url})
            assert (await refused(running, {"model": "x"}))[0] == 404
            await running.client.post("/workers", json={"url": late})
            assert (await refused(running, {"model": "x"}))[:2] == (503, "NO_WORKER")
            await by(running, alpha, {"model": "/alpha"})
            running.router.pool.remove(running.router.pool.find(late))
            await running.client.post("/workers", json={"url": late, "model_id": "x"})
            assert (await refused(running, {"model": "x"}))[:2] == (503, "NO_WORKER")


async def test_a_single_model_stays_the_one_that_was_meant_while_a_request_waits(start: Start) -> None:
    """Another model's worker joins during a pause; what waits goes on to its own."""
    alpha, beta = ModelServer("/alpha"), ModelServer("/beta")
    answered: list[str] = []
    async with serving_models(start, [alpha]) as running, serving(beta.app) as beta.url:

        async def ask() -> None:
            answered.append((await running.client.post("/generate", json={"text": "x"})).json()["by"])

        await running.client.post("/pause_generation", json={})
        async with anyio.create_task_group() as tasks:
            for _ in range(8):
                tasks.start_soon(ask)
            await anyio.sleep(0.2)
            assert answered == []
            await running.client.post("/workers", json={"url": beta.url})
            await running.client.post("/continue_generation", json={})
        assert answered == [alpha.url] * 8


# what clients see


async def test_the_models_of_all_workers_are_listed_as_openai_lists_them(start: Start) -> None:
    async with serving_models(start, alphas_and_beta()) as running:
        listed = (await running.client.get("/v1/models")).json()
        assert listed["object"] == "list"
        assert [model["id"] for model in listed["data"]] == ["/models/alpha", "beta"]
        for model in listed["data"]:
            assert (await running.client.get(f"/v1/models/{model['id']}")).json() == model
            assert (model["object"], model["owned_by"], type(model["created"])) == ("model", "sglang", int)
        missing = await running.client.get("/v1/models/gamma")
        assert (missing.status_code, missing.json()["error"]["code"]) == (404, "model_not_found")


async def test_real_engines_of_two_models(start: Start) -> None:
    async with start("--enable-igw") as running, AsyncExitStack() as stack:
        urls = [await stack.enter_async_context(serving(make_app(Engine(), load_model))) for _ in "ab"]
        for url, model in zip(urls, ("policy", "judge"), strict=True):
            await running.client.post("/workers", json={"url": url, "model_id": model})
        await until(lambda: running.router.pool.healthy == 2)
        for model, url in (("policy", urls[0]), ("judge", urls[1])):
            body = {
                "model": model,
                "text": "Hi",
                "rid": f"r-{model}",
                "sampling_params": {"max_new_tokens": 4, "ignore_eos": True},
            }
            answer = (await running.client.post("/generate", json=body)).json()
            assert answer["meta_info"]["completion_tokens"] == 4
            async with httpx.AsyncClient(base_url=url, trust_env=False) as engine:
                entries = (await engine.get("/journal")).json()["entries"]
            assert [entry["rid"] for entry in entries] == [f"r-{model}"]


# weights


UPDATES = {
    "/update_weights_from_disk": {"model_path": "/new", "weight_version": "7"},
    "/update_weights_from_tensor": {"serialized_named_tensors": []},
    "/update_weights_from_distributed": {"names": []},
    "/update_weights_from_ipc": {},
    "/update_weight_version": {"new_version": "7"},
    "/init_weights_update_group": {"rank_offset": 1},
    "/destroy_weights_update_group": {},
    "/weight_version": {"weight_version": "7"},
}


@pytest.mark.parametrize(("path", "body"), UPDATES.items(), ids=UPDATES)
async def test_weights_of_several_models_are_not_taken_for_one_anothers(
    start: Start, path: str, body: dict[str, Any]
) -> None:
    servers = [ModelServer("/alpha"), ModelServer("/beta")]
    async with serving_models(start, servers) as running:
        status, code, message = await refused(running, body, path)
        assert (status, code) == (400, "BAD_REQUEST")
        assert "(/alpha, /beta)" in message
        assert [server.called for server in servers] == [[], []]
        assert running.router.weights.current == "default"
        paused = await running.client.post("/pause_generation", json={})
        assert paused.status_code == 200
        assert [server.called for server in servers] == [["/pause_generation"]] * 2


async def test_weights_of_one_model_are_updated_as_ever(start: Start) -> None:
    servers = [ModelServer("/alpha"), ModelServer("/alpha")]
    async with serving_models(start, servers) as running:
        body = UPDATES["/update_weights_from_disk"]
        assert (await running.client.post("/update_weights_from_disk", json=body)).status_code == 200
        assert running.router.weights.current == "7"


async def test_versions_of_several_models_are_not_compared(start: Start, tmp_path: Path) -> None:
    """A worker comes back with its own, after a quarantine and after a restart of the router."""
    probes = ("--health-check-interval-secs", "0.05", "--health-check-endpoint", "/probe")
    state = ("--plugin", "state", "--state-dir")
    servers = [ModelServer("/alpha", version="7"), ModelServer("/beta", version="other")]
    async with serving_models(start, servers, *probes, *state, str(tmp_path)) as running:
        beta = running.router.pool.find(servers[1].url)
        servers[1].status = 503
        await until(lambda: beta.state == "quarantined")
        servers[1].status = 200
        await until(lambda: beta.state != "quarantined")
        assert beta.state == "ready"
        async with start("--enable-igw", "--disable-health-check", *state, _copied(tmp_path)) as again:
            assert [worker.state for worker in again.router.pool] == ["ready", "ready"]
            await by(again, servers[1], {"model": "/beta"})


def _copied(directory: Path) -> str:
    copy = directory / "copy"
    copy.mkdir()
    (copy / "workers.json").write_bytes((directory / "workers.json").read_bytes())
    return str(copy)


# the flag


async def test_without_the_flag_a_models_name_means_nothing(start: Start) -> None:
    router, _ = build([])
    assert make_plugin(router.options) is None
    named = [*router.hooks.pre_request, *router.hooks.post_response, *router.hooks.sender]
    assert "models" not in {name for name, _ in named}
    assert router.weights.differ() is None
    alpha = ModelServer("/alpha")
    async with start() as running, serving(alpha.app) as alpha.url:
        await running.client.post("/workers", json={"url": alpha.url})
        await by(running, alpha, {"model": "anything"})


@pytest.mark.parametrize("plugins", [["radix_cache"], ["radix_cache", "openai"]])
def test_several_models_and_exact_tokens_of_one_do_not_go_together(plugins: list[str]) -> None:
    words = ["--enable-igw", "--plugin", "engine", *(word for name in plugins for word in ("--plugin", name))]
    with pytest.raises(SettingsError, match="a router for each model"):
        build(words)


async def test_the_published_line_serves_two_models(tmp_path: Path) -> None:
    line = (
        "./target/release/sgl-model-gateway --enable-igw --policy cache_aware --max-concurrent-requests 512"
    )
    alpha, beta = ModelServer("/alpha"), ModelServer("/beta", served="beta")
    async with (
        serving(alpha.app) as alpha.url,
        serving(beta.app) as beta.url,
        launched(our_words(line, {}), tmp_path) as router,
    ):
        for server in (alpha, beta):
            answer = await router.client.post("/workers", json={"url": server.url})
            assert answer.status_code == 202
        answers = [
            (await router.client.post("/generate", json={"model": name})).json()
            for name in ("beta", "/alpha")
        ]
        assert [answer["by"] for answer in answers] == [beta.url, alpha.url]


def test_without_workers_that_say_what_they_serve_it_does_not_start() -> None:
    with pytest.raises(MissingComponent, match="'introduction'"):
        build(["--no-default-plugins", "--plugin", "models", "--enable-igw"])
