"""Mistakes in each hook: the error at the start, the answer or the log names the plugin and the hook."""

from __future__ import annotations

from pathlib import Path

import pytest

from plugged import Recording
from router_core.cli import build
from router_core.errors import PluginError
from router_core.hooks import hook_names
from routers import Start
from slime_http.serving import serving

pytestmark = pytest.mark.anyio

HEAD = """
from contextlib import asynccontextmanager
from router_core import Reply, hookimpl
from starlette.routing import Route

class Wrapper:
    def __init__(self, inner):
        self.inner = inner
    def choose(self, exchange, but=()):
        self.inner.choose(exchange, but)
    async def send(self, exchange, request, body=None):
        return await self.inner.send(exchange, request, body)

@hookimpl
"""

#: By hook: mistakes, each with the code of the hook.
AT_START = {
    "add_options": {"raises": "def add_options(parser): raise ValueError('a')"},
    "setup": {"raises": "def setup(router): raise ValueError('a')"},
    "routes": {
        "raises": "def routes(router): raise ValueError('a')",
        "no list": "def routes(router): return None",
        "no route": "def routes(router): return ['/mine']",
    },
    "asgi_middleware": {
        "raises": "def asgi_middleware(app, router): raise ValueError('a')",
        "nothing": "def asgi_middleware(app, router): return None",
    },
    "lifespan": {
        "raises": "def lifespan(router): raise ValueError('a')",
        "raises on entering": "@asynccontextmanager\nasync def lifespan(router):\n raise ValueError('a')\n yield",
        "no context manager": "def lifespan(router): return 7",
    },
    "sender": {
        "raises": "def sender(inner, router): raise ValueError('a')",
        "nothing": "def sender(inner, router): return None",
        "no sender": "def sender(inner, router): return 7",
    },
}

_ROUTE = "def routes(router):\n async def page(request): {}\n return [Route('/page', page, methods=['POST'])]"
_SENDER = "def sender(inner, router):\n class Mine(Wrapper):\n  {}\n return Mine(inner)"
_LAYER = """def asgi_middleware(app, router):
 async def layer(scope, receive, send):
  async def stamped(message):
   if message['type'] == 'http.response.start': message['headers'] = [*message['headers'], ('x', 'y')]
   await send(message)
  async def received():
   raise ValueError('a')
  if scope['type'] != 'http': return await app(scope, receive, send)
  {}
 return layer"""
#: By hook: mistakes, each with the code of the hook, and the words in brackets after the hook.
AT_REQUEST = {
    "pre_request": {
        "raises": ("def pre_request(exchange): raise ValueError('a')", ""),
        "raises in async code": ("async def pre_request(exchange): raise ValueError('a')", ""),
        "no reply": ("def pre_request(exchange): return 'done'", ""),
        "a header as str": ("def pre_request(exchange): exchange.request.headers.append(('x', 'y'))", ""),
        "a body that JSON cannot hold": ("def pre_request(exchange): exchange.request.replace_json({1})", ""),
    },
    "select_worker": {
        "raises": ("def select_worker(exchange, workers): raise ValueError('a')", ""),
        "no worker": ("def select_worker(exchange, workers): return 'a'", ""),
        "a header as str": ("def select_worker(exchange): exchange.request.headers.append(('x', 'y'))", ""),
    },
    "post_response": {
        "raises": ("async def post_response(exchange): raise ValueError('a')", ""),
        "no reply": ("def post_response(exchange): exchange.reply = 'done'", ""),
        "a header as str": ("def post_response(exchange): exchange.reply.headers.append(('x', 'y'))", ""),
        "a tap that is a function": ("def post_response(exchange): exchange.reply.tap(print)", ""),
        "a tap that raises": (
            "def post_response(exchange):\n"
            " class Tap:\n"
            "  def feed(self, piece): raise ValueError('a')\n"
            "  def close(self, complete): pass\n"
            " exchange.reply.tap(Tap())",
            " (Tap.feed)",
        ),
    },
    "sender": {
        "raises in choose": (
            _SENDER.format("def choose(self, exchange, but=()): raise ValueError('a')"),
            " (Mine.choose)",
        ),
        "raises in send": (
            _SENDER.format("async def send(self, exchange, request, body=None): raise ValueError('a')"),
            " (Mine.send)",
        ),
        "no reply": (_SENDER.format("async def send(self, exchange, request, body=None): return None"), ""),
        "a str": (_SENDER.format("async def send(self, exchange, request, body=None): return 'done'"), ""),
        "a header as str": (
            _SENDER.format(
                "async def send(self, exchange, request, body=None):\n"
                "   reply = await self.inner.send(exchange, request, body)\n"
                "   reply.headers.append(('x', 'y'))\n"
                "   return reply"
            ),
            "",
        ),
    },
    "routes": {
        "raises": (_ROUTE.format("raise ValueError('a')"), " (page)"),
        "no response": (_ROUTE.format("return 'done'"), " (page)"),
    },
    "asgi_middleware": {
        "raises": (_LAYER.format("raise ValueError('a')"), " (layer)"),
        "a header as str": (_LAYER.format("await app(scope, receive, stamped)"), " (stamped)"),
        "receive raises": (_LAYER.format("await app(scope, received, send)"), " (received)"),
    },
}  # fmt: skip
#: Hooks whose mistakes are logged, or the answer of another call; test_hooks.py has them.
ELSEWHERE = {"attempt_failed", "client_gone", "on_weight_update", "weights_confirmed", "worker_changed"}

START = [(hook, mistake) for hook, mistakes in AT_START.items() for mistake in mistakes]
REQUEST = [(hook, mistake) for hook, mistakes in AT_REQUEST.items() for mistake in mistakes]


def written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str) -> str:
    name = f"blamed_{abs(hash(code))}"
    (tmp_path / f"{name}.py").write_text(HEAD + code)
    monkeypatch.syspath_prepend(tmp_path)
    return name


async def started_and_ended(*flags: str) -> None:
    router, _ = build(flags)
    async with router.running():
        pass


def test_each_hook_has_mistakes() -> None:
    assert {*AT_START, *AT_REQUEST, *ELSEWHERE} == {*hook_names()}


@pytest.mark.parametrize(("hook", "mistake"), START)
async def test_mistake_at_the_start_names_plugin_and_hook(
    hook: str, mistake: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = written(tmp_path, monkeypatch, AT_START[hook][mistake])
    with pytest.raises((PluginError, ExceptionGroup)) as caught:
        await started_and_ended("--no-default-plugins", "--middleware-paths", name)
    error: BaseException = caught.value
    while isinstance(error, ExceptionGroup):
        (error,) = error.exceptions
    assert isinstance(error, PluginError)
    assert f"plugin {name!r}" in str(error)
    assert hook in str(error)


@pytest.mark.parametrize(("hook", "mistake"), REQUEST)
async def test_mistake_of_a_request_names_plugin_and_hook(
    hook: str,
    mistake: str,
    start: Start,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    code, function = AT_REQUEST[hook][mistake]
    name = written(tmp_path, monkeypatch, code)
    path = "/page" if hook == "routes" else "/x"
    async with serving(Recording()) as url:
        flags = ("--no-default-plugins", "--middleware-paths", name, "--worker-urls", url)
        async with start(*flags) as running:
            answer = await running.client.post(path, content=b"hello")
    named = f"plugin {name!r} failed in {hook}{function}"
    assert (answer.status_code, answer.json()["error"]["code"]) == (500, "PLUGIN_FAILED"), answer.text
    assert answer.json()["error"]["message"].startswith(named + "; ")
    assert named in caplog.text


@pytest.mark.parametrize(
    "others", [("--no-default-plugins",), ("--plugin", "r3")], ids=["alone", "with others"]
)
async def test_large_body_that_json_cannot_hold_names_the_plugin_that_made_it(
    others: tuple[str, ...], start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A large body is encoded after the hooks, when it is sent."""
    code = "def pre_request(exchange): exchange.request.replace_json({**exchange.request.json(), 'x': {1}})"
    name = written(tmp_path, monkeypatch, code)
    other = written(tmp_path, monkeypatch, "def pre_request(exchange): exchange.request.json()")
    flags = (*others, "--middleware-paths", name, other)
    body = b'{"text":"%b"}' % (b"a" * (1 << 18))
    async with serving(Recording()) as url, start(*flags, "--worker-urls", url) as running:
        answer = await running.client.post("/generate", content=body)
    assert answer.status_code == 500
    assert answer.json()["error"]["message"].startswith(f"plugin {name!r} failed in pre_request; ")
