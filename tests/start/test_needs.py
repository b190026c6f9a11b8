"""Components that plugins require and provide: their order, and the names of what is missing."""

from __future__ import annotations

from pathlib import Path
from textwrap import dedent

import pytest

from router_core.cli import build
from router_core.errors import MissingComponent, PluginError
from slime_start.ordering import Needs, in_order, missing

HEAD = "from router_core import hookimpl\n"


def write(folder: Path, name: str, source: str) -> str:
    (folder / f"{name}.py").write_text(HEAD + dedent(source))
    return name


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def needs(required: str = "", provided: str = "") -> Needs:
    return dict.fromkeys(required.split(), "a cure"), provided.split()


@pytest.mark.parametrize(
    ("plugins", "order"),
    [
        ([needs(), needs(), needs()], [0, 1, 2]),
        ([needs("a"), needs(provided="a"), needs()], [1, 0, 2]),
        ([needs("a"), needs("b", "a"), needs(provided="b")], [2, 1, 0]),
        ([needs("a"), needs(), needs(provided="a"), needs(provided="a")], [2, 3, 0, 1]),
        ([needs("a", "a"), needs(provided="a")], [1, 0]),
        ([needs("a", "b"), needs("b", "a")], [1, 0]),  # a circle
    ],
)
def test_a_plugin_comes_after_those_that_provide_what_it_requires(
    plugins: list[Needs], order: list[int]
) -> None:
    assert in_order(plugins) == order


def test_a_plugin_does_not_provide_for_itself() -> None:
    assert missing([needs("a", "a"), needs("b"), needs(provided="b")]) == (0, "a")
    assert missing([needs("a", "a"), needs(provided="a")]) is None


@pytest.mark.parametrize(
    "order", ["openai radix_cache engine", "radix_cache engine openai", "engine openai radix_cache"]
)
def test_plugins_may_be_named_in_any_order(order: str) -> None:
    router, _ = build([word for name in order.split() for word in ("--plugin", name)])
    assert router.hooks.plugins[-3:] == ["engine", "radix_cache", "openai"]


def test_order_without_needs_is_that_of_the_command_line() -> None:
    names = ["r3", "engine", "radix_cache"]
    router, _ = build([word for name in names for word in ("--plugin", name)])
    assert router.hooks.plugins[-3:] == names


def test_plugin_of_another_distribution_may_require_and_provide(folder: Path) -> None:
    user = write(
        folder,
        "uses_a_judge",
        """
        requires = {"judge": "--plugin judges"}

        def make_plugin(options): return Uses()

        class Uses:
            @hookimpl
            def setup(self, router): self.judge = router.components.get("judge")
        """,
    )
    maker = write(
        folder,
        "judges",
        """
        provides = ["judge"]

        @hookimpl
        def setup(router): router.components.register("judge", object())
        """,
    )
    router, _ = build(["--middleware-paths", user, maker])
    assert router.hooks.plugins[-2:] == [maker, user]
    with pytest.raises(MissingComponent) as caught:
        build(["--middleware-paths", user])
    assert (
        str(caught.value) == "uses_a_judge needs --plugin judges (no plugin provides the component 'judge')"
    )


def test_requirements_that_cannot_be_read_name_the_plugin(folder: Path) -> None:
    path = write(
        folder, "odd_needs", "def requires(options): return options.nothing\n@hookimpl\ndef setup(): ..."
    )
    with pytest.raises(PluginError, match="plugin 'odd_needs' failed in requires: AttributeError"):
        build(["--middleware-paths", path])
