"""Requests and replies that a plugin breaks: the plugin and the hook are named, where it happened."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from plugged import Recording, routing
from router_core import Exchange, Reply, hookimpl
from routers import Start, answering
from slime_http.serving import serving
from slime_start.owners import Owners

pytestmark = pytest.mark.anyio

BAD_HEADERS: dict[str, Any] = {
    "a header as str": [("x-team", "blue")],
    "a value as str": [(b"x-team", "blue")],
    "a number": [(b"x-tokens", 7)],
    "no pair": [b"x-team: blue"],
    "a dict": {b"x-team": b"blue"},
    "a line break": [(b"x-team", b"blue\r\nx-admin: 1")],
    "nothing": None,
}


class Innocent:
    """Changes headers before and after the plugin that breaks them, as it may."""

    @hookimpl
    def pre_request(self, exchange: Exchange) -> None:
        exchange.request.headers = [*exchange.request.headers, (b"x-seen", b"1")]

    @hookimpl
    def post_response(self, exchange: Exchange) -> None:
        assert exchange.reply is not None
        exchange.reply.headers.append((b"x-seen", b"1"))


class Before:
    def __init__(self, headers: Any) -> None:
        self._headers = headers

    @hookimpl
    async def pre_request(self, exchange: Exchange) -> None:
        if isinstance(self._headers, list):
            exchange.request.headers.extend(self._headers)
        else:
            exchange.request.headers = self._headers


class After:
    def __init__(self, headers: Any) -> None:
        self._headers = headers

    @hookimpl
    async def post_response(self, exchange: Exchange) -> None:
        assert exchange.reply is not None
        exchange.reply.headers = self._headers


class Answers(Before):
    @hookimpl
    async def pre_request(self, exchange: Exchange) -> Reply:  # type: ignore[override]
        return Reply(200, self._headers, b"done")


class Retargets:
    @hookimpl
    def pre_request(self, exchange: Exchange) -> None:
        exchange.request.target = "/other"  # type: ignore[assignment]  # the mistake


@pytest.mark.parametrize("mistake", BAD_HEADERS)
@pytest.mark.parametrize(
    ("kind", "hook"), [(Before, "pre_request"), (Answers, "pre_request"), (After, "post_response")]
)
async def test_headers_that_cannot_be_sent_name_the_plugin_and_the_hook(
    mistake: str, kind: Any, hook: str, caplog: pytest.LogCaptureFixture
) -> None:
    worker = Recording()
    plugins = {"first": Innocent(), "odd": kind(BAD_HEADERS[mistake]), "last": Innocent()}
    async with routing(plugins, worker) as running:
        answer = await running.client.post("/x", content=b"hello")
    assert answer.status_code == 500
    assert answer.json()["error"]["code"] == "PLUGIN_FAILED"
    assert answer.json()["error"]["message"].startswith(f"plugin 'odd' failed in {hook}; ")
    assert "wanted a list of pairs of bytes, without line breaks" in caplog.text
    assert "blue" not in caplog.text  # a header may be a secret
    assert worker.bodies == ([b"hello"] if kind is After else [])


async def test_a_target_that_is_no_bytes_names_the_plugin() -> None:
    async with routing({"odd": Retargets(), "last": Innocent()}, Recording()) as running:
        answer = await running.client.get("/x")
    assert answer.json()["error"]["message"].startswith("plugin 'odd' failed in pre_request; ")


async def test_headers_that_can_be_sent_are_sent() -> None:
    worker = Recording()
    good = [(b"x-team", b"blue")]
    async with routing(
        {"first": Innocent(), "before": Before(good), "after": After(good)}, worker
    ) as running:
        answer = await running.client.get("/x")
    assert (answer.headers["x-team"], answer.headers["x-seen"]) == ("blue", "1")
    ((_, sent, _),) = worker.requests
    assert (sent["x-team"], sent["x-seen"]) == ("blue", "1")


PLUGIN = """
from router_core import Reply, hookimpl
from router_core.request import Request

MISTAKE = "{mistake}"

@hookimpl
def pre_request(exchange):
    request = exchange.request
    if MISTAKE == "method":
        request.method = 5
    if MISTAKE == "name":
        request.headers.append((b"x y", b"z"))
    if MISTAKE == "target":
        request.target = b"/x y"
    if MISTAKE == "json":
        request.replace_json({"ids": {1, 2}})
    if MISTAKE == "reply status":
        return Reply("200", [], b"text")
    if MISTAKE == "reply body":
        return Reply(200, [], "text")

@hookimpl
def post_response(exchange):
    if MISTAKE == "status":
        exchange.reply.status = "200"
    if MISTAKE == "body":
        exchange.reply.replace_body("text")

@hookimpl
def select_worker(exchange, workers):
    if MISTAKE == "chosen":
        exchange.request.headers.append(("x", "y"))
    if MISTAKE == "chosen in place":
        exchange.request.headers[0] = ("x", "y")

class Layer:
    def __init__(self, inner):
        self.inner = inner

    def choose(self, exchange, but=()):
        self.inner.choose(exchange, but)
        if MISTAKE == "layer request":
            exchange.request.headers.append(("x", "y"))

    async def send(self, exchange, request, body=None):
        if MISTAKE == "layer raises":
            raise ValueError(MISTAKE)
        if MISTAKE == "layer name":
            request.headers.append((b"x y", b"z"))
        if MISTAKE == "layer line break":
            request.headers.append((b"x", b"y" + bytes([10])))
        if MISTAKE == "layer new request":
            request = Request("POST", b"/x", [("x", "y")])
        if MISTAKE == "layer new method":
            request = Request(None, b"/x", [])
        if MISTAKE == "layer body":
            body = "text"
        reply = await self.inner.send(exchange, request, body)
        if MISTAKE == "layer reply":
            reply.headers.append(("x", "y"))
        return reply

@hookimpl
def sender(inner, router):
    return Layer(inner)

@hookimpl
def asgi_middleware(app, router):
    async def wrapped(scope, receive, send):
        async def stamped(message):
            if MISTAKE == "middleware reply" and message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], ("x", "y")]
            await send(message)

        if MISTAKE == "middleware raises" and scope["type"] == "http":
            raise ValueError(MISTAKE)
        await app(scope, receive, stamped)

    return wrapped
"""

CLASS = """
class Layer:
    def __init__(self, app):
        self.app = app

    async def __call__(self, scope, receive, send):
        if scope["type"] == "http":
            raise ValueError("boom")
        await self.app(scope, receive, send)
"""


TRACED = ["--enable-trace", "--otlp-traces-endpoint", "WORKER"]


@pytest.mark.parametrize(
    ("mistake", "function"),
    [
        ("method", "pre_request"),
        ("name", "pre_request"),
        ("target", "pre_request"),
        ("json", "pre_request"),
        ("reply status", "pre_request"),
        ("reply body", "pre_request"),
        ("status", "post_response"),
        ("body", "post_response"),
        ("chosen", "select_worker"),
        ("chosen in place", "select_worker"),
        ("layer raises", "sender (Layer.send)"),
        ("layer request", "sender (Layer.send)"),
        ("layer name", "sender (Layer.send)"),
        ("layer line break", "sender (Layer.send)"),
        ("layer new request", "sender (Layer.send)"),
        ("layer new method", "sender (Layer.send)"),
        ("layer body", "sender (Layer.send)"),
        ("layer reply", "sender"),
        ("middleware raises", "asgi_middleware (wrapped)"),
        ("middleware reply", "asgi_middleware (stamped)"),
    ],
)
async def test_mistake_names_the_plugin(
    mistake: str,
    function: str,
    start: Start,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    name = f"odd_{mistake.replace(' ', '_')}"
    (tmp_path / f"{name}.py").write_text(PLUGIN.replace("{mistake}", mistake))
    monkeypatch.syspath_prepend(tmp_path)
    worker = Recording()
    async with serving(worker) as url:
        flags = ("--no-default-plugins", "--middleware-paths", name, "--worker-urls", url)
        async with start(*flags) as running:
            answer = await running.client.post("/x", content=b"hello")
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (500, "PLUGIN_FAILED")
    assert error["message"].startswith(f"plugin {name!r} failed in {function}; ")
    assert f"plugin {name!r} failed in {function}" in caplog.text


async def test_request_that_a_layer_breaks_names_all_layers_that_passed_it_on(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "odd_layer.py").write_text(PLUGIN.replace("{mistake}", "layer name"))
    (tmp_path / "good_layer.py").write_text(PLUGIN.replace("{mistake}", "none"))
    monkeypatch.syspath_prepend(tmp_path)
    async with serving(Recording()) as url:
        flags = ("--no-default-plugins", "--middleware-paths", "good_layer", "odd_layer")
        async with start(*flags, "--worker-urls", url) as running:
            answers = [await running.client.post("/x", content=b"hello") for _ in range(2)]
    for answer in answers:  # on a new connection, and on the same one
        named = "plugin 'odd_layer or good_layer' failed in sender (Layer.send); "
        assert (answer.status_code, answer.json()["error"]["message"].startswith(named)) == (500, True)
    assert "a header is b'x y': bytes; wanted a list of pairs of bytes" in caplog.text


async def test_default_plugins_are_not_blamed_for_a_request_that_a_layer_breaks(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "odd_request.py").write_text(PLUGIN.replace("{mistake}", "layer name"))
    monkeypatch.syspath_prepend(tmp_path)
    async with (
        serving(Recording()) as url,
        start("--middleware-paths", "odd_request", "--worker-urls", url) as running,
    ):
        answer = await running.client.post("/x", json={})
    assert answer.json()["error"]["message"].startswith(
        "plugin 'odd_request' failed in sender (Layer.send); "
    ), answer.text


@pytest.mark.parametrize("mistake", ["layer name", "layer body"])
async def test_request_that_a_layer_breaks_for_a_pair_of_workers_names_the_plugin(
    mistake: str, start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "odd_half.py").write_text(PLUGIN.replace("{mistake}", mistake))
    monkeypatch.syspath_prepend(tmp_path)
    async with serving(Recording()) as prefill, serving(Recording()) as decode:
        pair = ("--pd-disaggregation", "--prefill", prefill, "9001", "--decode", decode)
        async with start(*pair, "--disable-health-check", "--middleware-paths", "odd_half") as running:
            answer = await running.client.post("/generate", json={"text": "a"})
            assert not any(worker.load for worker in running.router.pool)
    assert answer.json()["error"]["message"].startswith(
        "plugin 'odd_half' failed in sender (Layer.send); "
    ), answer.text


async def test_400_of_a_worker_for_a_good_request_is_passed_on(start: Start) -> None:
    async with (
        serving(answering(b"no such field", status=400)) as url,
        start("--no-default-plugins", "--worker-urls", url) as running,
    ):
        answers = [await running.client.post("/x", content=b"hello") for _ in range(2)]
    assert [(answer.status_code, answer.content) for answer in answers] == [(400, b"no such field")] * 2


async def test_class_of_middleware_that_raises_is_named_by_its_path(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "odd_class.py").write_text(CLASS)
    monkeypatch.syspath_prepend(tmp_path)
    async with start("--no-default-plugins", "--middleware-paths", "odd_class.Layer") as running:
        answer = await running.client.get("/x")
    assert answer.json()["error"]["message"].startswith(
        "plugin 'odd_class.Layer' failed in asgi_middleware (Layer.__call__); "
    )


async def test_header_that_two_layers_pass_on_names_both(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "inner_layer.py").write_text(PLUGIN.replace("{mistake}", "middleware reply"))
    (tmp_path / "outer_layer.py").write_text(PLUGIN.replace("{mistake}", "none"))
    monkeypatch.syspath_prepend(tmp_path)
    async with serving(Recording()) as url:
        flags = ("--no-default-plugins", "--middleware-paths", "outer_layer", "inner_layer")
        async with start(*flags, "--worker-urls", url) as running:
            answer = await running.client.get("/x")
    named = "plugin 'outer_layer or inner_layer' failed in asgi_middleware (stamped); "
    assert answer.json()["error"]["message"].startswith(named)


@pytest.mark.parametrize(
    ("name", "mistake", "function", "path", "flags"),
    [
        ("odd_json", "json", "pre_request", "/generate", []),
        ("odd_stamp", "middleware reply", "asgi_middleware (stamped)", "/x", ["--request-id-headers"]),
        ("odd_stamp", "middleware reply", "asgi_middleware (stamped)", "/x", TRACED),
        (
            "odd_stamp",
            "middleware reply",
            "asgi_middleware (stamped)",
            "/flush_cache",
            ["--control-plane-audit-enabled"],
        ),
        ("slime_odd_stamp", "middleware reply", "asgi_middleware (stamped)", "/x", TRACED),
        ("slime_odd_name", "layer name", "sender (Layer.send)", "/x", []),
        ("odd_reply", "layer reply", "sender", "/x", []),
        ("slime_odd_reply", "layer reply", "sender", "/x", []),
    ],
)
async def test_default_plugins_are_not_blamed_for_what_another_one_breaks(
    name: str,
    mistake: str,
    function: str,
    path: str,
    flags: list[str],
    start: Start,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if flags is TRACED:
        pytest.importorskip("opentelemetry.exporter.otlp.proto.http")
    (tmp_path / f"{name}.py").write_text(PLUGIN.replace("{mistake}", mistake))
    monkeypatch.syspath_prepend(tmp_path)
    async with serving(Recording()) as url:
        flags = [url if flag == "WORKER" else flag for flag in flags]
        async with start(*flags, "--middleware-paths", name, "--worker-urls", url) as running:
            answer = await running.client.post(path, json={})
    named = f"plugin {name!r} failed in {function}; "
    assert answer.json()["error"]["message"].startswith(named), answer.text


async def test_plugins_that_ship_with_the_router_are_not_foreign(start: Start) -> None:
    plugins = ("engine", "radix_cache", "openai", "r3")
    async with start(*(word for name in plugins for word in ("--plugin", name))) as running:
        hooks = running.router.hooks
    assert {*plugins} < {*hooks.plugins}
    assert hooks.owners.foreign == set()


def test_exception_in_a_group_has_the_plugin_of_its_first_part() -> None:
    owners = Owners()
    owners.add("odd", Innocent())
    try:
        raise ValueError
    except ValueError as error:
        group = ExceptionGroup("", [error])
    assert owners.culprit(group) == (
        "odd",
        f"asgi_middleware ({test_exception_in_a_group_has_the_plugin_of_its_first_part.__name__})",
    )
    owners.add("other", Innocent())  # both plugins are of this module
    assert owners.culprit(group) is None
