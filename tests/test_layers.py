"""Imports go one way. A failure prints the edge that does not."""

from __future__ import annotations

import ast
import importlib
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from configparser import ConfigParser
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from deadlines import HANG_S
from slime_start.owners import SHIPPED
from statements import statements_in

ROOT = Path(__file__).parent.parent
CORE = ROOT / "router_core"
PLUGINS = ROOT / "plugins"

#: The core's modules, lowest first. A module imports from below, or from beside it, and never in a circle.
LAYERS = (
    ("types", "errors"),
    ("addresses", "flags", "request_ids"),
    (
        "exchange",
        "hooks",
        "hookspecs",
        "registry",
        "reply",
        "request",
        "routes",
        "sender",
        "settings",
        "weights",
        "workers",
    ),
    ("pool",),
    ("worker_urls",),
    ("client", "proxy", "registration"),
    ("life",),
    ("router",),
    ("admin", "loader", "logs"),
    ("app",),
    ("cli",),
    ("__main__",),
)

#: Modules that know the router's type: they pass it to hooks.
KNOW_THE_ROUTER = frozenset(("router_core.hooks", "router_core.hookspecs"))

#: Packages below the core: all may import them, and they import nothing of ours.
FOUNDATIONS = ("slime_fairness", "slime_http", "slime_logging", "slime_start")
#: Packages that any plugin may import; each may import those before it.
LIBRARIES = (*FOUNDATIONS, "slime_journal", "slime_sglang", "slime_resume", "slime_rows", "slime_testing")

#: Parts of large plugins, lowest first. A part imports from itself and from below; what is above them is not listed.
PARTS = {
    "slime_control": ("contracts", "pausing", "calls", "weights"),
    "slime_openai": ("errors", "requests", "parsing", "responses", "prompts"),
    "slime_radix_cache": (
        *(
            "row_contracts",
            "contracts",
            "cold_store",
            "tally",
            "index",
            "tokens",
            "journal",
            "demotion",
            "capture",
            "retrieval",
        ),
    ),
}

#: Directories of tests whose subject is more than one package, or is outside the packages.
ACROSS_SOURCES = (
    "benchmarks", "chaos", "clients", "compatibility", "deploy", "e2e", "examples", "frameworks", "release", "surface",
)  # fmt: skip
#: Directories within those of plugins that do not have the name of a subpackage, and the reason for each.
ACROSS_SUBPACKAGES = {
    "engine/backends": "a contract suite for all backends, and trainers and commands with a real model",
    "openai/chat": "chats over HTTP, from the request to the record: the module chat.py and all that it uses",
    "openai/chat_models": "models of several families with their templates, and the engine that runs them",
    "openai/drift": "all families of models with all habits of clients",
    "radix_cache/machine": "random rollouts through all of the plugin, and the audit of each",
    "sglang/ranks": "the module ranks.py with policies, before engines that have ranks",
}

#: Packages that take a tenth of a second or more to import, and are not always needed. Only these may be imported
#: within a function.
HEAVY = frozenset(
    (
        "cryptography", "huggingface_hub", "jwt", "llguidance", "numpy", "obstore", "opentelemetry", "redis",
        "tokenizers", "torch", "transformers", "yaml", "zmq",
    )
)  # fmt: skip


@dataclass(frozen=True)
class Import:
    """Line ``line`` of module ``by`` imports module ``of``."""

    by: str
    of: str
    line: int
    text: str
    comment: str
    in_function: bool
    for_types: bool

    def __str__(self) -> str:
        return f"{self.by}:{self.line} imports {self.of}: {self.text}"

    @property
    def package(self) -> str:
        """The top-level package that is imported."""
        return self.of.partition(".")[0]


def module_name(path: Path, root: Path) -> str:
    """The dotted name of the module in ``path``; ``root`` is what would be on ``sys.path``."""
    parts = path.relative_to(root).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports_of(path: Path, root: Path) -> Iterator[Import]:
    """Every import of a file; of ``from package import module``, the module."""
    source = path.read_text()
    lines = source.splitlines()
    name = module_name(path, root)

    def walk(node: Any, in_function: bool, for_types: bool) -> Iterator[Import]:
        if isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING"):
            for each in node.body:
                yield from walk(each, in_function, True)
            for other in node.orelse:
                yield from walk(other, in_function, for_types)
            return
        for target in _targets(node, name):
            text = lines[node.lineno - 1].strip()
            above = lines[node.lineno - 2].strip()
            comment = text.partition("#")[2] or above.removeprefix("#") * above.startswith("#")
            yield Import(name, target, node.lineno, text, comment, in_function, for_types)
        inside = in_function or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        for child in statements_in(node):
            yield from walk(child, inside, for_types)

    yield from walk(ast.parse(source), False, False)


def _targets(node: ast.AST, by: str) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        assert node.level == 0, f"{by}:{node.lineno}: imports are absolute here"
        assert node.module is not None  # narrowing: only a relative import has none
        return [_target(node.module, alias.name) for alias in node.names]
    return []


def _target(module: str, name: str) -> str:
    inner = Path(*module.split("."), name)
    is_module = any(
        (root / inner).with_suffix(".py").is_file() or (root / inner / "__init__.py").is_file()
        for root in (ROOT, PLUGINS)
    )
    return f"{module}.{name}" if is_module else module


@cache
def core_imports() -> list[Import]:
    """All but those by which hooks know what the router is."""
    found = [each for path in sorted(CORE.rglob("*.py")) for each in imports_of(path, ROOT)]
    return [
        each
        for each in found
        if not (each.for_types and each.by in KNOW_THE_ROUTER and each.of == "router_core.router")
    ]


@cache
def plugin_imports() -> list[Import]:
    return [each for path in sorted(PLUGINS.rglob("*.py")) for each in imports_of(path, PLUGINS)]


def told(offences: list[Import]) -> str:
    return "\n" + "\n".join(map(str, offences))


def test_each_module_of_the_core_has_its_layer() -> None:
    listed = [name for layer in LAYERS for name in layer]
    modules = [module_name(path, CORE) for path in CORE.rglob("*.py") if path.stem != "__init__"]
    assert sorted(listed) == sorted(modules)


def test_the_core_imports_downwards() -> None:
    height = {f"router_core.{name}": level for level, layer in enumerate(LAYERS) for name in layer}
    within = [each for each in core_imports() if each.package == "router_core" and each.by != "router_core"]
    assert len(within) > 20
    # The package itself is what plugins import from; it is above every layer but the entry points of a process.
    offences = [each for each in within if height.get(each.of, len(LAYERS)) > height[each.by]]
    assert not offences, told(offences)


def test_the_core_imports_along_the_arrows_of_the_architecture_diagram() -> None:
    diagram = (
        (ROOT / "docs" / "architecture.md").read_text().partition("subgraph core")[2].partition(" end\n")[0]
    )
    boxes = [set(re.findall(r"\w+", box)) for box in re.findall(r"\w\[([^]]+· [^]]+)\]", diagram)]
    arrows = re.findall(r"(\w+)(?:\[.*?\])? --> (\w+)", diagram)
    assert len(boxes) == len(arrows) + 1
    assert all(before[1] == after[0] for before, after in pairwise(arrows))
    place = {f"router_core.{name}": number for number, box in enumerate(boxes) for name in box}
    offences = [
        each
        for each in core_imports()
        if each.by in place and each.of in place and place[each.of] < place[each.by]
    ]
    assert not offences, told(offences)


def test_the_core_knows_no_plugin() -> None:
    plugins = {path.parent.name for path in PLUGINS.glob("*/__init__.py")} - set(FOUNDATIONS)
    assert "slime_radix_cache" in plugins
    offences = [each for each in core_imports() if each.package in plugins or each.package == "plugins"]
    assert not offences, told(offences)


def test_what_is_below_the_core_imports_nothing_of_ours() -> None:
    ours = {path.parent.name for path in PLUGINS.glob("*/__init__.py")} | {"router_core"}
    found = [each for each in plugin_imports() if each.by.partition(".")[0] in FOUNDATIONS]
    offences = [each for each in found if each.package in ours - {each.by.partition(".")[0]}]
    assert len(found) > 20
    assert not offences, told(offences)


def test_the_core_knows_no_engine_and_no_scheme() -> None:
    """``decode(`` is a method of bytes and tokenizers."""
    words = re.compile(r"sglang|dp_|bootstrap|jwt|model_id|lora|rank|prefill|\bdecode\b(?!\()", re.IGNORECASE)
    lines = [
        f"{path.name}:{number}: {line.strip()}"
        for path in sorted(CORE.rglob("*.py"))
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if words.search(line)
    ]
    assert lines == []


def test_the_core_and_its_files_stay_small() -> None:
    lines = {
        path: len(path.read_text().splitlines()) for root in (CORE, PLUGINS) for path in root.rglob("*.py")
    }
    assert {str(path): count for path, count in lines.items() if count > 300} == {}
    assert sum(count for path, count in lines.items() if CORE in path.parents) <= 4000


def test_packages_that_ship_with_the_router_are_all_named() -> None:
    assert {path.parent.name for path in PLUGINS.glob("*/__init__.py")} == SHIPPED


def test_plugins_do_not_know_each_other() -> None:
    """But for the types of the components that they offer."""
    plugins = {path.parent.name for path in PLUGINS.glob("*/__init__.py")}

    def may_import(by: str) -> set[str]:
        return {by, *(LIBRARIES[: LIBRARIES.index(by)] if by in LIBRARIES else LIBRARIES)}

    offences = [
        each
        for each in plugin_imports()
        if each.package in (plugins | {"plugins"}) - may_import(each.by.partition(".")[0])
        and not (each.for_types and each.of == f"{each.package}.contracts")
    ]
    assert plugins > set(LIBRARIES)
    assert not offences, told(offences)


def test_authors_of_plugins_are_told_each_library() -> None:
    page = (ROOT / "docs" / "writing-a-plugin.md").read_text()
    (sentence,) = re.findall(r"may also import the libraries (.+?)\. ", page)
    assert set(re.findall(r"`(\w+)`", sentence)) == set(LIBRARIES)


def test_tests_that_one_environment_leaves_out_run_in_another_one() -> None:
    tox = ConfigParser(interpolation=None)
    tox.read(ROOT / "tox.ini")
    left_out = re.findall(r"--ignore=(\S+)", tox["testenv:tests"]["commands"])
    others = ("fleet", "clients", "frameworks", "docs")
    run = [path for name in others for path in re.findall(r"tests/\S+", tox[f"testenv:{name}"]["commands"])]
    assert len(left_out) > 20
    assert sorted(left_out) == sorted(run)
    assert [path for path in (*left_out, *run) if not (ROOT / path).exists()] == []


def test_directories_of_tests_have_the_names_of_their_sources() -> None:
    names = {path.name.removeprefix("slime_") for path in PLUGINS.glob("slime_*")}
    tests = ROOT / "tests"
    directories = {path.relative_to(tests).parts[0] for path in tests.glob("*/**/test_*.py")}
    assert len(directories) > 30
    assert {name.removesuffix("_") for name in directories} - names == {"core", *ACROSS_SOURCES}


def test_each_subpackage_has_a_directory_of_tests_with_its_name() -> None:
    tests = ROOT / "tests"
    within = {path.parent.relative_to(tests).as_posix() for path in tests.glob("*/*/**/test_*.py")}
    subpackages = {path.parent.relative_to(PLUGINS).as_posix() for path in PLUGINS.glob("*/*/**/__init__.py")}
    named = {name.removeprefix("slime_") for name in subpackages}
    assert len(named) > 15
    assert {name.replace("_/", "/") for name in within} == {*named, *ACROSS_SUBPACKAGES}


def test_plugins_import_public_names_of_the_core() -> None:
    """Those that a module has in ``__all__``: they are the API, for plugins of others too."""
    private = [
        f"{path.relative_to(PLUGINS)}:{node.lineno} imports {alias.name} of {node.module}"
        for path in sorted(PLUGINS.rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ImportFrom) and node.module is not None
        if node.module.partition(".")[0] == "router_core"
        for alias in node.names
        if alias.name not in importlib.import_module(node.module).__all__
    ]
    assert private == []


@pytest.mark.parametrize("plugin", PARTS)
def test_the_parts_of_a_plugin_import_downwards(plugin: str) -> None:
    parts = PARTS[plugin]
    folders = {path.parent.name for path in (PLUGINS / plugin).glob("*/__init__.py")}
    assert folders <= set(parts)

    def height(module: str) -> int:
        part = module.split(".")[1] if "." in module else ""
        return parts.index(part) if part in parts else len(parts)

    own = [each for each in plugin_imports() if each.package == plugin == each.by.partition(".")[0]]
    offences = [each for each in own if height(each.of) > height(each.by)]
    assert len(own) > 20
    assert not offences, told(offences)


def test_imports_in_functions_are_heavy_and_have_a_comment() -> None:
    """Heavy itself, or a module of the own package that needs what the comment names."""

    def excused(each: Import) -> bool:
        if each.package in HEAVY:
            return bool(each.comment)
        own = each.package in (each.by.partition(".")[0], *FOUNDATIONS)
        return own and any(heavy in each.comment for heavy in HEAVY)

    offences = [each for each in core_imports() + plugin_imports() if each.in_function and not excused(each)]
    assert not offences, told(offences)


@pytest.mark.parametrize(
    "imports",
    [core_imports(), [each for each in plugin_imports() if not each.for_types]],
    ids=["core", "plugins"],
)
def test_no_module_imports_itself_in_a_circle(imports: list[Import]) -> None:
    """In the core not even for types."""
    known = {each.by for each in imports}
    needs: dict[str, dict[str, Import]] = {name: {} for name in known}
    for each in imports:
        if each.of in known:
            needs[each.by][each.of] = each
    done: set[str] = set()

    def visit(name: str, way: tuple[Import, ...]) -> None:
        for each in needs[name].values():
            circle = [step for step, passed in enumerate(way) if passed.by == each.of]
            assert not circle, told([*way[circle[0] :], each])
            if each.of not in done:
                visit(each.of, (*way, each))
        done.add(name)

    for name in sorted(known):
        visit(name, ())


def test_importing_is_light() -> None:
    """In a fresh interpreter, since ``--help`` should not wait for transformers."""
    not_in_core = {*HEAVY, "httpx._main"}
    plugins = [path.parent.name for path in sorted(PLUGINS.glob("*/__init__.py"))]
    code = (
        "import importlib, sys\n"
        "import router_core.cli\n"
        f"assert not {not_in_core!r} & {{name for name, module in sys.modules.items() if module}}\n"
        f"for plugin in {plugins!r}:\n"
        "    importlib.import_module(plugin)\n"
        "    assert not {'transformers', 'torch'} & set(sys.modules), plugin\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=HANG_S, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_the_walk_sees_what_it_should(tmp_path: Path) -> None:
    """So that none of the above passes for want of eyes."""
    (tmp_path / "sample.py").write_text(
        "from typing import TYPE_CHECKING\n"
        "from router_core import hooks, Reply\n"
        "if TYPE_CHECKING:\n"
        "    import slime_r3\n"
        "else:\n"
        "    import slime_engine.model as model\n"
        "class A:\n"
        "    async def f(self):\n"
        "        import torch  # heavy\n"
    )
    seen = [
        (each.of, each.in_function, each.for_types, each.comment)
        for each in imports_of(tmp_path / "sample.py", tmp_path)
    ]
    assert seen == [
        ("typing", False, False, ""),
        ("router_core.hooks", False, False, ""),
        ("router_core", False, False, ""),
        ("slime_r3", False, True, ""),
        ("slime_engine.model", False, False, ""),
        ("torch", True, False, " heavy"),
    ]


def test_tests_import_helpers_and_no_other_tests() -> None:
    imports = re.compile(r"^ *(?:from|import) .*\btest_\w+.*$", re.MULTILINE)
    tests = sorted((ROOT / "tests").rglob("*.py"))
    assert {path: found for path in tests if (found := imports.findall(path.read_text()))} == {}


def test_the_pool_alone_sets_the_weight_version_of_a_worker() -> None:
    sets = re.compile(r"\.weight_version = ")
    paths = [*CORE.rglob("*.py"), *PLUGINS.rglob("*.py")]
    assert [path.name for path in paths if sets.search(path.read_text())] == ["pool.py"]


def test_no_compiled_module_defines_an_error_with_a_status() -> None:
    """Compiled, such a class would lose its ``status``, and the client would get a 500."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    compiled = settings["tool"]["hatch"]["build"]["targets"]["wheel"]["hooks"]["custom"]["modules"]
    assert compiled
    classes = [
        (path, node)
        for path in compiled
        for node in ast.walk(ast.parse((ROOT / path).read_text()))
        if isinstance(node, ast.ClassDef) and any(ast.unparse(base).endswith("Error") for base in node.bases)
    ]
    wrong = [f"{path}: {node.name}" for path, node in classes if "status" in ast.unparse(node)]
    assert not wrong
