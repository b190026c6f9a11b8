"""From names on the command line to plugins: what is found, in which order, and what is refused."""

from __future__ import annotations

import logging
import sys
from importlib.metadata import EntryPoint
from pathlib import Path
from textwrap import dedent

import pytest

from router_core import loader
from router_core.cli import build, command_line, main
from router_core.errors import PluginError
from router_core.loader import installed_plugins, load
from routers import Start
from slime_start.default_plugins import DEFAULT_PLUGINS

HEAD = "from router_core import Reply, hookimpl\n"

#: A factory, and a plugin that does nothing.
QUIET = """
    def make_plugin(options):
        return Quiet()

    class Quiet:
        @hookimpl
        async def pre_request(self, exchange): ...
"""


class Module:
    """Writes plugin modules where Python finds them; each test uses names of its own."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __call__(self, name: str, *sources: str) -> str:
        (self._folder / f"{name}.py").write_text(HEAD + "".join(map(dedent, sources)))
        return name


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Module:
    monkeypatch.syspath_prepend(tmp_path)
    return Module(tmp_path)


def line_of(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The one line on stderr with which ``slime-router`` ends with exit code 2."""
    nowhere = ("--host", "192.0.2.1")  # RFC 5737: should it start after all, it cannot listen, and ends
    assert main([*arguments, *nowhere]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("slime-router: ")
    assert err.count("\n") == 1
    assert err.endswith("\n")
    return err.removeprefix("slime-router: ").rstrip("\n")


# what is found


@pytest.mark.anyio
async def test_hook_add_options(start: Start, module: Module) -> None:
    """A plugin's flag reaches its factory, and the router of everybody."""
    path = module(
        "greets",
        """
        @hookimpl
        def add_options(parser):
            parser.add_argument("--greeting", default="hello")

        def make_plugin(options):
            return Greets(options.greeting)

        class Greets:
            def __init__(self, greeting):
                self.greeting = greeting

            @hookimpl
            async def pre_request(self, exchange):
                return Reply.from_json({"greeting": self.greeting})
        """,
    )
    async with start("--middleware-paths", path, "--greeting", "moin") as running:
        assert (await running.client.get("/")).json() == {"greeting": "moin"}
        assert running.router.options.greeting == "moin"
    async with start("--middleware-paths", path) as running:
        assert (await running.client.get("/")).json() == {"greeting": "hello"}


@pytest.mark.anyio
async def test_plugins_and_middleware_follow_command_line_order(start: Start, module: Module) -> None:
    layers = [
        module(
            name,
            f"""
            @hookimpl
            async def pre_request(exchange):
                exchange.notes.setdefault("layers", []).append("{name}")
                if len(exchange.notes["layers"]) == 3:
                    return Reply.from_json(exchange.notes["layers"])

            @hookimpl
            async def post_response(exchange):
                exchange.notes["layers"].append("{name}")
                exchange.reply.headers.append((b"x-layer", b"{name}"))
            """,
        )
        for name in ("layer_c", "layer_a", "layer_b")
    ]
    module(
        "wraps",
        """
        class Layer:
            name = b"?"

            def __init__(self, app, *, router):
                self.app, self.router = app, router

            async def __call__(self, scope, receive, send):
                async def stamped(message):
                    if message["type"] == "http.response.start":
                        message["headers"] = [*message["headers"], (b"x-layer", self.name)]
                    await send(message)
                await self.app(scope, receive, stamped)

        class Inner(Layer):
            name = b"inner"

        class Outer(Layer):
            name = b"outer"
        """,
    )
    async with start("--middleware-paths", "wraps.Outer", *layers, "wraps.Inner") as running:
        answer = await running.client.get("/")
        assert answer.json() == ["layer_c", "layer_a", "layer_b"]
        assert answer.headers.get_list("x-layer") == ["layer_b", "layer_a", "layer_c", "inner", "outer"]


def test_a_middleware_class_finds_its_flags_as_slime_wrote_them(module: Module) -> None:
    path = module(
        "slimes",
        """
        class Middleware:
            def __init__(self, app, *, router):
                Middleware.port = router.args.port

            async def __call__(self, scope, receive, send): ...
        """,
    )
    build(["--no-default-plugins", "--port", "7", "--slime-router-middleware-paths", f"{path}.Middleware"])
    assert sys.modules[path].Middleware.port == 7


def test_the_default_plugins_come_first_and_can_be_left_out() -> None:
    def names(*arguments: str) -> list[str]:
        """Of the plugins, in the order in which they were loaded."""
        _, loaded = command_line(arguments)
        return [source.name for source in loaded.sources]

    assert names("--plugin", "r3", "--plugin", "health", "--plugin", "r3") == [*DEFAULT_PLUGINS, "r3"]
    assert names("--no-default-plugins", "--plugin", "r3") == ["r3"]
    named = [part for name in ("r3", "metrics", "limits", "sessions") for part in ("--plugin", name)]
    assert names("--no-default-plugins", *named) == ["limits", "sessions", "metrics", "r3"]
    assert set(DEFAULT_PLUGINS) <= set(installed_plugins())


def test_flags_are_found_in_the_modules_of_entry_point_and_factory(
    module: Module,
) -> None:
    module(
        "inner_of_two",
        """
        @hookimpl
        def add_options(parser):
            parser.add_argument("--inner")
        """,
        QUIET,
    )
    module(
        "outer_of_two",
        """
        from inner_of_two import make_plugin

        @hookimpl
        def add_options(parser):
            parser.add_argument("--outer")
        """,
    )
    module("outer_without_flags", "from inner_of_two import make_plugin")
    router, _ = build(["--middleware-paths", "outer_of_two:make_plugin", "--outer", "1"])
    assert router.options.outer == "1"
    router, _ = build(["--middleware-paths", "outer_without_flags:make_plugin", "--inner", "1"])
    assert router.options.inner == "1"


def test_flags_are_added_in_the_order_of_hooks(module: Module) -> None:
    for name, mark in (("last", "(trylast=True)"), ("middle", ""), ("first", "(tryfirst=True)")):
        module(
            f"{name}_to_add",
            f"""
            @hookimpl{mark}
            def add_options(parser):
                parser.add_argument("--{name}", default=len(parser._actions))
            """,
            QUIET,
        )
    router, _ = build(["--middleware-paths", "last_to_add", "middle_to_add", "first_to_add"])
    options = router.options
    assert options.first < options.middle < options.last


def test_a_class_is_a_factory_of_itself(module: Module) -> None:
    module(
        "selfmade",
        """
        class Selfmade:
            def __init__(self, options):
                self.port = options.port

            @hookimpl
            async def pre_request(self, exchange): ...
        """,
    )
    router, _ = build(["--no-default-plugins", "--middleware-paths", "selfmade.Selfmade"])
    assert [name for name, _ in router.hooks.pre_request] == ["selfmade.Selfmade"]


def test_two_routers_share_no_plugin(module: Module) -> None:
    path = module("apart", QUIET)
    one, two = (
        build(["--no-default-plugins", "--middleware-paths", path])[0].hooks.pre_request for _ in range(2)
    )
    assert [name for name, _ in one] == [name for name, _ in two] == ["apart"]
    assert getattr(one[0][1], "__self__") is not getattr(two[0][1], "__self__")  # noqa: B009  # bound methods


# what is refused, in one line


def test_an_unknown_plugin_is_told_with_the_known_ones(capsys: pytest.CaptureFixture[str]) -> None:
    line = line_of(capsys, "--plugin", "radix_cash")
    known = ", ".join(installed_plugins())
    assert line == f"no plugin 'radix_cash': did you mean radix_cache? (installed: {known})"


def test_two_distributions_with_one_plugin_name_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    points = [EntryPoint("twin", f"{package}:make_plugin", "slime_router") for package in ("one", "two")]
    monkeypatch.setattr(loader, "entry_points", lambda group: points)
    with pytest.raises(PluginError, match="'twin' is installed twice: one:make_plugin and two:make_plugin"):
        load(["twin"], [])


@pytest.mark.parametrize(
    ("path", "reason"),
    [
        ("nowhere", "ModuleNotFoundError: No module named 'nowhere'"),
        ("nowhere.Plugin", "ModuleNotFoundError: No module named 'nowhere'"),
        ("router_core.Nothing", "AttributeError: module 'router_core' has no attribute 'Nothing'"),
        ("router_core:Nothing", "AttributeError: module 'router_core' has no attribute 'Nothing'"),
        (".", "TypeError: "),
        ("", "ValueError: Empty module name"),
    ],
)
def test_a_path_that_leads_nowhere_is_told(
    path: str, reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert line_of(capsys, "--middleware-paths", path).startswith(f"--middleware-paths {path}: {reason}")


def test_a_path_to_something_else_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    line = line_of(capsys, "--middleware-paths", "router_core.hookspecs.PROJECT")
    assert line.endswith("wanted a plugin module, a factory or a middleware class, got str")


def test_a_factory_of_none_has_nothing_to_do(module: Module, caplog: pytest.LogCaptureFixture) -> None:
    path = module("idle", "def make_plugin(options): return None")
    with caplog.at_level(logging.INFO):
        router, _ = build(["--no-default-plugins", "--middleware-paths", path])
    assert not router.hooks.pre_request
    assert [record.getMessage() for record in caplog.records] == ["plugin 'idle' has nothing to do"]


SOURCES = {
    "broken_import": ("import not_installed_anywhere", "No module named 'not_installed_anywhere'"),
    "broken_syntax": ("def (", "SyntaxError"),
    "two_lines": ("raise ValueError('one\\ntwo')", "ValueError: one two"),
    "broken_factory": ("def make_plugin(options): return options.nothing", "its factory: AttributeError: "),
    "flag_of_the_core": (
        "@hookimpl\ndef add_options(parser): parser.add_argument('--port')",
        "add_options: ArgumentError: argument --port: conflicting option string: --port",
    ),
    "help_flag": (
        "@hookimpl\ndef add_options(parser): parser.add_argument('-h')",
        "add_options: ArgumentError: argument -h: conflicting option string: -h",
    ),
    "broken_flag": (
        "@hookimpl\ndef add_options(parser): parser.add_argument('--x', kind=int)",
        "add_options: TypeError: ",
    ),
    "hookless": ("pre_request_too = 1", "has no hooks; known: add_options, asgi_middleware, "),
    "unmarked": ("async def pre_request(exchange): ...", "pre_request lacks @hookimpl"),
    "misspelt": ("@hookimpl\nasync def pre_requset(exchange): ...", "no such hook: pre_requset (known: "),
    "removed_hook": (
        "@hookimpl\nasync def forward(exchange, request): ...",
        "no such hook: forward; sender(inner, router) replaces forward (known: add_options, ",
    ),
    "half_misspelt": (
        "@hookimpl\nasync def pre_request(exchange): ...\n@hookimpl\nasync def post_respnse(exchange): ...",
        "no such hook: post_respnse (known: add_options, asgi_middleware, ",
    ),
    "wrong_argument": (
        "@hookimpl\nasync def pre_request(request): ...",
        "Argument(s) {'request'} are declared in the hookimpl but can not be found in the hookspec",
    ),
    "sync_hook": (
        "@hookimpl\ndef on_weight_update(update): ...",
        "on_weight_update must be an async function",
    ),
    "async_hook": ("@hookimpl\nasync def routes(router): ...", "routes must not be an async function"),
    "needs_a_component": (
        "@hookimpl\ndef setup(router): router.components.get('tokeniser')",
        "component 'tokeniser' is missing (registered: ",
    ),
    "options_in_the_class": (
        "def make_plugin(options): return P()\nclass P:\n  @hookimpl\n  def add_options(self, parser): ...",
        "add_options must be a function beside its factory",
    ),
    "route_of_the_core": (
        "from starlette.routing import Route\n"
        "@hookimpl\ndef routes(): return [Route('/weight_version', None, methods=['POST'])]",
        "plugin 'route_of_the_core' and the core both claim the route POST /weight_version",
    ),
    "socket_route": (
        "from starlette.routing import WebSocketRoute\n"
        "@hookimpl\ndef routes(): return [WebSocketRoute('/ws', None)]",
        "plugin 'socket_route' offers a WebSocketRoute",
    ),
}


@pytest.mark.parametrize("name", SOURCES)
def test_a_plugin_that_cannot_work_is_told_in_one_line(
    name: str, module: Module, capsys: pytest.CaptureFixture[str]
) -> None:
    source, reason = SOURCES[name]
    line = line_of(capsys, "--middleware-paths", module(name, source))
    assert reason in line
    if name != "needs_a_component":
        assert name in line


def test_a_middleware_class_that_cannot_be_made_is_told(
    module: Module, capsys: pytest.CaptureFixture[str]
) -> None:
    source = "class M:\n  def __init__(self, app, *, router): router.args.nothing"
    line = line_of(capsys, "--middleware-paths", f"{module('torn_layer', source)}.M")
    assert line.startswith("plugin 'torn_layer.M' failed in its constructor: AttributeError: ")


def test_two_plugins_with_one_flag_are_told(module: Module, capsys: pytest.CaptureFixture[str]) -> None:
    source = "@hookimpl\ndef add_options(parser): parser.add_argument('--shared')"
    paths = [module("flag_first", source), module("flag_second", source)]
    line = line_of(capsys, "--middleware-paths", *paths)
    assert line.startswith(
        "plugin 'flag_second' failed in add_options: ArgumentError: argument --shared: conflicting"
    )


def test_two_plugins_with_one_route_are_told(module: Module, capsys: pytest.CaptureFixture[str]) -> None:
    source = "from starlette.routing import Route\n@hookimpl\ndef routes(): return [Route('/x', None, methods=['PUT'])]"
    paths = [module("route_first", source), module("route_second", source)]
    line = line_of(capsys, "--middleware-paths", *paths)
    assert line == "plugin 'route_second' and plugin 'route_first' both claim the route PUT /x"


def test_plugin_under_two_names_is_an_error(module: Module, capsys: pytest.CaptureFixture[str]) -> None:
    module(
        "once",
        "class Once:\n  @hookimpl\n  async def pre_request(self): ...\nonce = Once()\ndef make(o): return once",
    )
    module("twice", "from once import make")
    line = line_of(capsys, "--middleware-paths", "once.make", "twice.make")
    assert line == "plugin 'twice.make' is loaded twice, once under another name"
