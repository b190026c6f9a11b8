"""The documents say what the code does: hooks, flags, routes, links and command lines."""

from __future__ import annotations

import inspect
import math
import re
import shlex
import subprocess
import sys
from importlib.metadata import entry_points
from itertools import pairwise
from pathlib import Path
from typing import Any, get_args

import httpx
import pytest
from starlette.routing import Route

from deadlines import HANG_S
from plugged import Recording
from router_core import hookspecs
from router_core.admin import admin_routes
from router_core.cli import build, command_line
from router_core.hooks import hook_names
from router_core.loader import installed_plugins
from router_core.workers import WorkerState
from routers import BARE, Start
from slime_control.calls.endpoints import CALLS
from slime_http.serving import serving
from slime_start.default_plugins import DEFAULT_PLUGINS
from slime_start.parsing import LeftOut

ROOT = Path(__file__).parent.parent
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "SECURITY.md",
    *sorted((ROOT / "docs").rglob("*.md")),
    *sorted((ROOT / "examples").rglob("*.md")),
    *sorted((ROOT / "shims").rglob("*.md")),
]
EXAMPLE = ROOT / "examples" / "third_party_plugin"
#: Names that packages in ``examples/`` and one of a page add to the command line, and the modules of plugins.
_EXAMPLE_PLUGINS = {"turns": "slime_turns", "off_policy": "off_policy_metrics", "weighted": "", "newest": ""}

#: The plugins of this distribution, whatever else is installed.
PLUGINS = [
    name
    for name, point in installed_plugins().items()
    if point.dist is not None and point.dist.name == "slime-router"
]
#: Plugins that offer components to others.
_FIRST = ("engine", "radix_cache")

_LINK = re.compile(r"\]\(([^)\s]+)\)")
_BLOCK = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
_INDENTED = re.compile(r"^ {4}(.*)$", re.MULTILINE)
_SPAN = re.compile(r"(?<!`)`([^`\n]+)`")
_COMMAND = re.compile(r"(?:^|&& |PYTHONPATH=\S+ )slime-router(?= |$)(.*)")


def page(name: str) -> str:
    return (ROOT / name).read_text()


def headings(text: str) -> list[str]:
    return re.findall(r"^#+ +(.+?) *$", text, re.MULTILINE)


def test_registrations_by_curl_have_the_type_that_they_need() -> None:
    """Without a key, a body with the type that curl gives it is refused: any web page can send it."""
    lines = [line for path in PAGES for line in path.read_text().splitlines()]
    bodies = [line for line in lines if re.search(r"curl .*/workers .*-d ", line)]
    assert len(bodies) >= 3
    assert [line for line in bodies if "Content-Type: application/json" not in line] == []


# hooks


def test_each_hook_is_a_heading_with_its_arguments() -> None:
    documented = [title for title in headings(page("docs/hooks.md")) if "(" in title]
    specified = [
        f"{name}({', '.join(inspect.signature(getattr(hookspecs, name)).parameters)})"
        for name in hook_names()
    ]
    assert len(documented) == len(set(documented))
    assert sorted(documented) == sorted(specified)


def test_each_hook_says_when_and_what_happens_to_errors() -> None:
    sections = re.split(r"^## ", page("docs/hooks.md"), flags=re.MULTILINE)
    for name in hook_names():
        (section,) = [section for section in sections if section.startswith(f"{name}(")]
        assert "- **When**: " in section, name
        assert "- **Errors**: " in section, name


def test_each_hook_has_a_test() -> None:
    sources = [path.read_text() for path in (ROOT / "tests").rglob("test_*.py")]
    tested = {name for source in sources for name in re.findall(r"def test_hook_(\w+)\(", source)}
    assert tested == set(hook_names())


# flags


def flags(*plugins: str) -> set[str]:
    """The long flags of a command line with ``plugins``, and no others."""
    arguments = [part for name in plugins for part in ("--plugin", name)]
    parser, _ = command_line(["--no-default-plugins", *arguments])
    known = (action for action in parser._actions if not isinstance(action, LeftOut))
    return {flag for action in known for flag in action.option_strings if flag.startswith("--")}


def mentioned(text: str) -> set[str]:
    return set(re.findall(r"(?<![\w-])--[a-z0-9][a-z0-9-]*", text))


def test_each_flag_of_the_core_is_in_the_operations_page() -> None:
    core = flags() - {"--help", "--version"}
    assert "--worker-urls" in core
    assert core - mentioned(page("docs/operations.md")) == set()


@pytest.mark.parametrize("plugin", PLUGINS)
def test_each_flag_of_a_plugin_is_in_the_page_of_the_plugin(plugin: str) -> None:
    own = flags(plugin) - flags()
    assert own - mentioned(page(f"docs/plugins/{plugin}.md")) == set()


# the README


def test_the_readme_is_a_screen_and_a_half() -> None:
    """Rows of 120 columns, as a browser wraps them: links without their targets."""
    lines = re.sub(r"\]\([^)]*\)", "", page("README.md")).splitlines()
    assert sum(max(1, math.ceil(len(line) / 120)) for line in lines) <= 80


def test_the_readme_names_each_plugin_of_the_router() -> None:
    named = re.findall(r"\[`(\w+)`\]\(docs/plugins/\1\.md\)", page("README.md"))
    assert sorted(named) == sorted(PLUGINS)


# links


def anchors(text: str) -> set[str]:
    """As GitHub makes them."""
    plain = (re.sub(r"[^\w\- ]", "", title.lower()) for title in headings(text))
    return {title.replace(" ", "-") for title in plain}


def links() -> list[tuple[Path, str]]:
    """Page and target of every link that stays within the repository."""
    found = [(source, target) for source in PAGES for target in _LINK.findall(source.read_text())]
    return [(source, target) for source, target in found if not target.startswith(("http://", "https://"))]


def test_there_are_links() -> None:
    assert len(links()) > 20


@pytest.mark.parametrize(("source", "target"), links(), ids=lambda value: str(value).removeprefix(f"{ROOT}/"))
def test_each_link_leads_somewhere(source: Path, target: str) -> None:
    path, _, anchor = target.partition("#")
    destination = (source.parent / path).resolve() if path else source
    assert destination.exists()
    if anchor:
        assert anchor in anchors(destination.read_text())


# the site


def pages_of_the_site() -> list[str]:
    return [
        path.relative_to(ROOT / "docs").as_posix() for path in PAGES if path.is_relative_to(ROOT / "docs")
    ]


def test_each_page_is_once_in_the_navigation_of_the_site() -> None:
    listed = re.findall(r"^ +- [^:\n]+: (\S+\.md)$", page("mkdocs.yml"), re.MULTILINE)
    assert len(listed) == len(set(listed))
    assert [name for name in pages_of_the_site() if name not in listed] == []


@pytest.mark.parametrize("source", PAGES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_each_page_begins_with_its_only_title(source: Path) -> None:
    text = _BLOCK.sub("", source.read_text())
    assert text.startswith("# ")
    assert len(re.findall(r"^# ", text, re.MULTILINE)) == 1


@pytest.mark.parametrize("source", PAGES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_lists_and_tables_are_read_alike_by_the_site(source: Path) -> None:
    """Its Markdown wants an empty line before a list or a table, and four spaces before an inner list."""
    lines = _BLOCK.sub("", source.read_text()).splitlines()
    item = re.compile(r"(?:[-*]|\d+\.) |\|")
    wrong = [
        line
        for before, line in pairwise(lines)
        if item.match(line) and before.strip() and not before.startswith(" ") and not item.match(before)
    ]
    wrong += [line for line in lines if re.match(r" {1,3}(?:[-*]|\d+\.) ", line)]
    assert wrong == []


# command lines


def command_lines() -> list[tuple[str, str]]:
    """``slime-router ...`` in code blocks and in code spans: page and arguments. ``[...]`` is a form, not a line."""
    found = []
    for source in PAGES:
        text = source.read_text().replace("\\\n", " ")
        fenced = [line for _, block in _BLOCK.findall(text) for line in block.splitlines()]
        for code in [*fenced, *_INDENTED.findall(text), *_SPAN.findall(text)]:
            command = _COMMAND.search(code)
            if command and "[" not in command[1]:
                found.append((source.relative_to(ROOT).as_posix(), command[1].strip()))
    return found


def test_there_are_command_lines() -> None:
    assert len(command_lines()) > 10


@pytest.fixture(scope="module")
def help_of_commands() -> dict[str, str]:
    shown = {"plugins": ""}
    for point in entry_points(group="slime_router.commands"):
        command = [sys.executable, "-m", "router_core", point.name, "--help"]
        shown[point.name] = subprocess.run(
            command, check=True, capture_output=True, text=True, timeout=HANG_S
        ).stdout
    return shown


@pytest.mark.parametrize(("source", "arguments"), command_lines())
def test_each_command_line_can_be_parsed(
    source: str, arguments: str, help_of_commands: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(EXAMPLE)
    monkeypatch.syspath_prepend(ROOT / "examples" / "metrics_plugin")
    words = shlex.split(arguments, comments=True)
    if words and not words[0].startswith("-"):
        assert words[0] in help_of_commands, f"{source}: no such command"
        wanted = {word for word in words if word.startswith("--")}
        assert wanted <= mentioned(help_of_commands[words[0]])
        return
    for name, module in _EXAMPLE_PLUGINS.items():  # as the example's own distribution would have it
        if name in words:
            at = words.index(name)
            words[at - 1 : at + 1] = ["--middleware-paths", module] if module else []
    parser, _ = command_line(words)
    if not {"--help", "--version"} & set(words):
        _, unknown = parser.parse_known_args(words)
        assert unknown == []


# the example


def unindented(text: str) -> str:
    return "".join(f"{line.strip()}\n" for line in text.splitlines())


def test_each_code_block_of_the_walk_through_stands_in_the_example() -> None:
    sources = [path.read_text() for path in EXAMPLE.iterdir() if path.suffix in (".py", ".toml")]
    # The one about router.generate(), which the example does not need, stands in a test.
    sources.append(page("tests/core/test_hooks.py"))
    blocks = _BLOCK.findall(page("docs/writing-a-plugin.md"))
    assert len(blocks) >= 8
    for language, block in blocks:
        assert language in ("python", "toml")
        assert any(unindented(block) in unindented(source) for source in sources), f"nowhere:\n{block}"


def test_the_walk_through_shows_the_whole_plugin() -> None:
    """Every function and class of the example's module."""
    text = page("docs/writing-a-plugin.md")
    source = (EXAMPLE / "slime_turns.py").read_text()
    definitions = re.findall(r"^ *(?:async def|def|class) .*$", source, re.MULTILINE)
    assert len(definitions) > 6
    assert [line for line in definitions if line.strip() not in text] == []


# routes


def documented_routes() -> list[tuple[str, str]]:
    return re.findall(r"^### `(GET|POST|PUT|DELETE) (/\S*)`$", page("docs/http-api.md"), re.MULTILINE)


def routes_of_the_core() -> set[tuple[str, str]]:
    router, _ = build(["--no-default-plugins"])
    return {(method, _plain(route)) for route in admin_routes(router) for method in _methods(route)}


def routes_of_plugins() -> set[tuple[str, str]]:
    # state needs a directory, and has no routes
    names = [*_FIRST, *(name for name in PLUGINS if name not in (*_FIRST, "state"))]
    router, _ = build(["--no-default-plugins", *(part for name in names for part in ("--plugin", name))])
    found = [route for _, routes in router.hooks.routes for route in routes(router)]
    return {(method, _plain(route)) for route in found for method in _methods(route)}


def _methods(route: Route) -> set[str]:
    return (route.methods or {"GET"}) - {"HEAD"}


def _plain(route: Route) -> str:
    return re.sub(r"\{(\w+):\w+\}", r"{\1}", route.path)


def test_each_route_is_documented_and_no_other() -> None:
    documented = documented_routes()
    assert len(documented) == len(set(documented))
    core, plugins = routes_of_the_core(), routes_of_plugins()
    assert len(core) >= 5
    assert ("POST", "/workers") in plugins
    assert set(documented) == core | plugins


def section_of(method: str, path: str) -> str:
    title = f"### `{method} {path}`\n"
    return page("docs/http-api.md").partition(title)[2].partition("\n#")[0]


def test_each_state_of_a_worker_is_told() -> None:
    told = section_of("GET", "/workers")
    assert [state for state in get_args(WorkerState) if f"`{state}`" not in told] == []


def test_each_control_call_is_told() -> None:
    assert [path for path in CALLS if f"`{path}`" not in page("docs/http-api.md")] == []


@pytest.mark.anyio
async def test_each_documented_route_answers_as_documented(start: Start) -> None:
    """With a status and fields that its section names, and without asking a worker, which would answer anything."""
    worker = Recording()
    with_routes = [
        *("--plugin", "engine", "--engine-workers", "1"),
        *("--plugin", "radix_cache", "--plugin", "sessions", "--plugin", "metrics", "--plugin", "dashboard"),
        *("--plugin", "openapi", "--plugin", "tiered_store"),
    ]
    answers: list[tuple[str, str, httpx.Response]] = []
    async with serving(worker) as url, start(*BARE, *with_routes) as running:
        spoken = await running.client.post("/generate", json={"text": "Hi", "session_id": "s"})
        assert spoken.status_code == 200
        messages = [{"role": "user", "content": "Hi"}]
        # Values that any of the routes may want.
        wanted = {"url": url, "weight_version": "7", "text": "Hi", "messages": messages}
        for method, path in documented_routes():
            registered, _ = await running.router.add_worker(url)
            body = wanted if method == "POST" else None
            filled = (
                path.replace("{worker_id}", registered.id)
                .replace("{session}", "s")
                .replace("{name}", "style.css")
            )
            query = {"session": "s"} if path.startswith("/ui/data/trajectory") else None
            answer = await running.client.request(method, filled, json=body, params=query)
            answers.append((method, path, answer))
    assert worker.requests == []
    for method, path, answer in answers:
        told = section_of(method, path)
        names_another = path == "/trajectories"  # of one session
        assert answer.is_error == names_another, f"{method} {path}: {answer.text}"
        assert re.search(rf"\b{answer.status_code}\b", told), f"{method} {path}: {answer.status_code}"
        if answer.headers.get("content-type") != "application/json":
            continue
        untold = [key for key in answer.json() if not re.search(rf'["`]{key}["`]', told)]
        assert untold == [], f"{method} {path}"


# architecture


def test_the_architecture_diagram_has_each_package_and_module() -> None:
    text = page("docs/architecture.md")
    packages = {path.parent.name for path in (ROOT / "plugins").glob("*/__init__.py")}
    assert set(re.findall(r"\bslime_\w+", text)) == packages
    modules = {path.stem for path in (ROOT / "router_core").rglob("*.py")} - {"__init__", "__main__"}
    assert {module for module in modules if not re.search(rf"\b{module}\b", text)} == set()
    default = text.partition("subgraph by_default")[2].partition("end")[0]
    assert set(re.findall(r"slime_(\w+)", default)) == set(DEFAULT_PLUGINS) - {"sglang"}


def test_the_request_flow_has_the_senders_in_their_order() -> None:
    router, _ = build(["--pd-disaggregation", "--dp-aware"])
    found: list[str] = []
    sender: Any = router.sender
    while sender is not router.proxy:
        found.append(type(sender).__module__.partition(".")[0])
        sender = sender._inner
    note = page("docs/architecture.md").partition("Note over S: ")[2].partition("\n")[0]
    assert re.findall(r"slime_\w+", note) == found


def test_the_map_of_the_code_names_what_is_there() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text()
    paths = re.findall(r"`((?:router_core|plugins|tests|docs|benchmarks)/[\w/.]+)`", text)
    assert paths
    assert [path for path in paths if not (ROOT / path).exists()] == []


def test_the_variables_that_make_tests_longer_are_listed() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text() + page("docs/chaos.md")
    tests = "".join(path.read_text() for path in (ROOT / "tests").rglob("*.py"))
    read = set(re.findall(r"environ\.get\(\"(SLIME_ROUTER_\w+)\"", tests))
    assert len(read) > 10
    assert read - set(re.findall(r"SLIME_ROUTER_\w+", text)) == set()
