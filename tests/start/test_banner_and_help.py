"""Output of a start: the banner, ``--help`` and ``--version``."""

from __future__ import annotations

import argparse
import logging
import re
from importlib.metadata import version
from pathlib import Path

import pytest

from router_core import cli
from router_core.cli import main
from routers import Start
from slime_start.banner import banner
from slime_start.help_page import about, grouped


def told(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, *arguments: str) -> list[str]:
    """The banner of a router with ``arguments``."""

    def run(_: object, sock: object, *, on_start: object, **__: object) -> None:
        assert callable(on_start)
        on_start("http://127.0.0.1:30000")
        sock.close()  # type: ignore[attr-defined]  # it is a socket

    monkeypatch.setattr(cli, "run", run)
    with caplog.at_level(logging.INFO):
        assert main(["--port", "0", *arguments]) == 0
    return [record.getMessage() for record in caplog.records if record.name == "router_core.cli"]


def test_banner_tells_version_plugins_policy_and_the_next_step(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    lines = told(monkeypatch, caplog, "--plugin", "r3", "--policy", "random")
    assert lines[0] == f"slime-router {version('slime-router')}"
    plain = [re.sub(" +", " ", line).strip() for line in lines]
    assert "plugin health Health checks of workers: probes, quarantine, return" in plain
    assert any(line.startswith("plugin r3 Routed experts") for line in plain)
    assert not any(line.startswith("plugin pd ") for line in plain)  # it has nothing to do
    assert "policy random" in plain
    assert plain[-2:] == [
        "workers none yet; add one: curl -X POST 'http://127.0.0.1:30000/add_worker?url=http://HOST:PORT'",
        "dashboard http://127.0.0.1:30000/ui",
    ]


def test_banner_names_the_policy_of_a_plugin_first(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    (tmp_path / "my_policy.py").write_text(
        '"""Takes the first."""\nfrom router_core import hookimpl\n'
        "@hookimpl\ndef select_worker(workers): return workers[0]\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    lines = told(monkeypatch, caplog, "--middleware-paths", "my_policy")
    assert [line.split(maxsplit=1)[1] for line in lines if line.startswith("  policy ")] == [
        "plugin my_policy, then auto"
    ]
    assert any(line.split() == ["plugin", "my_policy", "Takes", "the", "first"] for line in lines)


@pytest.mark.anyio
async def test_log_has_the_address_of_the_router_only(start: Start, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        async with start(
            "--plugin", "engine", "--prometheus-host", "127.0.0.1", "--prometheus-port", "0"
        ) as running:
            url = running.url
    lines = [record.getMessage() for record in caplog.records if record.name == "slime_http.serving"]
    begin, end = lines
    assert begin == f"listening on {url}"
    assert end.startswith("shutting down: ")


def test_banner_names_some_of_many_workers() -> None:
    lines = banner("http://a:1", {}, [], [f"http://w{number}:1" for number in range(10)])
    assert lines[1].split(maxsplit=1)[1] == "least requests in flight"
    assert lines[2].endswith("http://w7:1 and 2 more")


def test_version_is_that_of_the_distribution(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as leaving:
        main(["--version"])
    assert leaving.value.code == 0
    assert capsys.readouterr().out == f"slime-router {version('slime-router')}\n"


def test_help_has_a_group_for_each_plugin_and_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as leaving:
        main(["--plugin", "radix_cache", "--help"])
    assert leaving.value.code == 0
    shown = capsys.readouterr().out
    groups = dict(re.findall(r"^(\w+):\n(.*?)(?=^\S|\Z)", shown, re.MULTILINE | re.DOTALL))
    assert "--worker-urls" in groups["router"]
    assert "--health-check-endpoint" in groups["health"]
    assert "Health checks of workers" in groups["health"]
    assert "--hf-checkpoint" in groups["radix_cache"]
    assert "--policy" not in groups["router"]
    for line in ("  demo     Shows exact rollouts", "  engine   An embedded engine", "  plugins  List the"):
        assert line in shown
    more = shown.partition("plugins that are not loaded")[2]
    assert re.findall(r"^  (\w+)  ", more, re.MULTILINE)[:2] == ["engine", "openai"]
    assert "SLIME_ROUTER_<FLAG>" in more


def test_flags_of_groups_that_a_plugin_makes_itself_are_in_its_group() -> None:
    parser = argparse.ArgumentParser()
    with grouped(parser, "mine", "Does something"):
        parser.add_argument("--loose")
        parser.add_argument_group("own").add_argument("--own")
    with grouped(parser, "nothing"):
        pass
    shown = parser.format_help()
    assert re.search(r"\nmine:\n  Does something\n\n  --loose LOOSE\n  --own OWN\n", shown)
    assert "nothing" not in shown
    assert "\nown:" not in shown


def test_purpose_of_a_module_is_the_first_line_of_its_docstring() -> None:
    class Documented:
        """The ``first`` line.

        Not this one.
        """

    class Bare:
        pass

    assert about(Bare, Documented) == "The first line"
    assert about(Bare) == ""


@pytest.mark.parametrize(
    ("words", "flags"),
    [
        (["help"], ["--help"]),
        (["help", "top"], ["top", "--help"]),
        (["help", "--plugin", "r3"], ["--plugin", "r3", "--help"]),
    ],
)
def test_the_command_help_prints_the_same_as_the_flag(
    words: list[str], flags: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    pages = []
    for arguments in (words, flags):
        with pytest.raises(SystemExit) as ended:
            main(arguments)
        assert ended.value.code == 0
        pages.append(capsys.readouterr().out)
    assert pages[0] == pages[1]
    assert "usage: slime-router" in pages[0]
