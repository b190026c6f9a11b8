"""Each flag of the SGLang gateway means the same here, or is taken and said to be idle, or is refused."""

from __future__ import annotations

import argparse
import logging
import re
from pathlib import Path

import pytest

from compatibility.gateway import GATEWAY, TheirFlag
from router_core.cli import build, command_line
from router_core.errors import SettingsError
from slime_sglang.gateway_flags import FLAGS, GatewayFlag

#: The plugin that has flags of the gateway and is not loaded by default.
PLUGINS = ("--plugin", "openai")
#: Defaults of flags that mean the same with us and begin elsewhere. The page on operations says why.
OTHER_DEFAULTS = {
    "--host": "127.0.0.1",
    "--policy": "auto",
    "--worker-startup-check-interval": 1,
    "--health-check-interval-secs": 10,
    "--health-check-timeout-secs": 20,
    "--chat-template": "",
    "--reasoning-parser": "auto",
    "--tool-call-parser": "auto",
    "--prometheus-port": None,
    "--cache-threshold": None,
    "--balance-abs-threshold": None,
    "--balance-rel-threshold": None,
}

IDLE = {flag.name for flag in FLAGS if not flag.refused}
REFUSED = {flag.name for flag in FLAGS if flag.refused}


def actions(*arguments: str) -> dict[str, argparse.Action]:
    parser, _ = command_line(arguments)
    return {flag: action for action in parser._actions for flag in action.option_strings}


@pytest.fixture(scope="module")
def ours() -> dict[str, argparse.Action]:
    return actions(*PLUGINS)


def values(theirs: TheirFlag) -> list[str]:
    """Something that the flag takes."""
    if theirs.nargs == 0:
        return []
    value = theirs.choices[0] if theirs.choices else str(theirs.default or 7)
    return [value] if theirs.nargs == 1 else [value, value]


# the three classes


def test_each_flag_of_theirs_is_in_one_class(ours: dict[str, argparse.Action]) -> None:
    assert IDLE.isdisjoint(REFUSED)
    assert (IDLE | REFUSED).issubset(GATEWAY)
    dests = {flag.name: flag.dest for flag in FLAGS}
    real = {name for name in GATEWAY if name in ours and ours[name].dest != dests.get(name)}
    assert set(GATEWAY) == real | IDLE | REFUSED
    assert real & REFUSED == set()
    # Flags of a plugin that is not always loaded are idle without it.
    assert real & IDLE == {"--chat-template", "--reasoning-parser", "--tool-call-parser"}


@pytest.mark.parametrize("theirs", GATEWAY.values(), ids=GATEWAY)
def test_a_flag_takes_as_many_values_as_theirs(theirs: TheirFlag, ours: dict[str, argparse.Action]) -> None:
    nargs = ours[theirs.flag].nargs
    assert (1 if nargs is None else nargs) == theirs.nargs


@pytest.mark.parametrize(
    "theirs",
    [theirs for name, theirs in GATEWAY.items() if name not in REFUSED | IDLE],
    ids=lambda theirs: theirs.flag,
)
def test_a_flag_with_a_meaning_begins_where_theirs_does_or_the_page_tells(
    theirs: TheirFlag, ours: dict[str, argparse.Action]
) -> None:
    action = ours[theirs.flag]
    assert action.default == OTHER_DEFAULTS.get(theirs.flag, theirs.default)
    assert set(theirs.choices) <= set(action.choices or theirs.choices)


# taken


@pytest.mark.parametrize("flag", [flag for flag in FLAGS if not flag.refused], ids=lambda flag: flag.name)
def test_an_idle_flag_is_taken_and_one_line_says_why(
    flag: GatewayFlag, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        router, _ = build([flag.name, *values(GATEWAY[flag.name]), "--port", "7"])
    assert caplog.messages == [f"{flag.name} has no effect: {flag.why}"]
    assert router.settings.port == 7


def test_a_flag_that_is_given_twice_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        build(["--mcp-config-path", "1", "--mcp-config-path", "2", "--log-level", "info"])
    assert len(caplog.messages) == 1


@pytest.mark.parametrize("line", ["--backend sglang", "--history-backend memory", "--history-backend none"])
def test_a_backend_that_is_no_other_is_taken(line: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        build(line.split())
    assert [message.split()[:4] for message in caplog.messages] == [[line.split()[0], "has", "no", "effect:"]]


def test_secrets_in_a_flag_are_not_told(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG):
        build(["--oracle-password", "hunter2", "--redis-url", "redis://:hunter2@db"])
        with pytest.raises(SettingsError) as refused:
            build(["--history-backend", "hunter2"])
    assert "hunter2" not in caplog.text + str(refused.value)


def test_an_idle_flag_comes_from_the_environment_too(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("SLIME_ROUTER_MCP_CONFIG_PATH", "tools.yaml")
    with caplog.at_level(logging.WARNING):
        build([])
    assert caplog.messages == ["--mcp-config-path has no effect: the router calls no tools"]


def test_idle_flags_come_from_a_file_too(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "router.conf"
    file.write_text(
        "tokenizer-cache-enable-l0 = true\nmcp-config-path = tools.yaml\npd-disaggregation = false\n"
    )
    with caplog.at_level(logging.WARNING):
        build(["--config", str(file)])
    told = ["--tokenizer-cache-enable-l0", "--mcp-config-path"]
    assert [said.split()[0] for said in caplog.messages] == told


# refused


@pytest.mark.parametrize("flag", [flag for flag in FLAGS if flag.refused], ids=lambda flag: flag.name)
def test_a_refused_flag_ends_the_start_with_its_reason(flag: GatewayFlag) -> None:
    given = ["openai"] if flag.unless else values(GATEWAY[flag.name])
    with pytest.raises(SettingsError, match=f"{flag.name} is not supported: ") as refused:
        build([flag.name, *given])
    assert str(refused.value).endswith(flag.why)


def test_a_refused_flag_is_refused_from_the_environment_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLIME_ROUTER_BACKEND", "openai")
    with pytest.raises(SettingsError, match="--backend is not supported"):
        build([])


# a plugin's flag wins


def test_the_flag_of_a_loaded_plugin_wins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "scraped.py").write_text(
        "from router_core import hookimpl\n"
        "@hookimpl\ndef add_options(parser): parser.add_argument('--redis-pool-max', type=int)\n"
        "@hookimpl\ndef setup(router): assert router.options.redis_pool_max == 9\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    router, _ = build(["--middleware-paths", "scraped", "--redis-pool-max", "9"])
    assert router.options.redis_pool_max == 9


def test_the_help_shows_no_flag_that_does_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        build(["--help"])
    shown = capsys.readouterr().out
    assert "--worker-urls" in shown
    assert "--mcp-config-path" not in shown


# the page


def tables() -> list[list[str]]:
    """The rows of each table of the page's section on the gateway."""
    page = (Path(__file__).parents[2] / "docs" / "plugins" / "sglang.md").read_text()
    section = page.partition("## Coming from the SGLang gateway\n")[2].partition("\n## ")[0]
    found = re.findall(r"(?:^\|.*\n)+", section, re.MULTILINE)
    return [table.splitlines()[2:] for table in found]


def named(rows: list[str]) -> set[str]:
    """The flags in the first column."""
    return {flag for row in rows for flag in re.findall(r"--[a-z0-9-]+", row.split("|")[1])}


def test_the_page_tells_all_that_differs() -> None:
    other, idle, refused = tables()
    with_values = {"--backend", "--history-backend"}
    assert named(idle) == IDLE | with_values
    assert named(refused) == REFUSED
    assert set(OTHER_DEFAULTS) - {"--chat-template"} <= named(other)
    for row in other:
        for flag in named([row]) & set(OTHER_DEFAULTS):
            if flag.endswith(("-secs", "-interval", "--host", "--policy")):
                assert str(OTHER_DEFAULTS[flag]) in row.split("|")[3]
                assert str(GATEWAY[flag].default) in row.split("|")[2]
