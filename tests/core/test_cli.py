"""The command ``slime-router``: its flags from everywhere, and its one line when it cannot start."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.metadata import EntryPoint
from pathlib import Path
from types import ModuleType

import pytest

import slime_r3
from deadlines import HANG_S
from router_core import cli
from router_core.cli import build, main
from router_core.errors import PluginError
from router_core.loader import installed_plugins
from slime_http.serving import bind
from slime_start.default_plugins import DEFAULT_PLUGINS
from slime_start.help_page import about

Capture = pytest.CaptureFixture[str]


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """``python -m router_core`` in a process of its own."""
    command = [sys.executable, "-m", "router_core", *arguments]
    seen = os.environ | environment
    return subprocess.run(command, env=seen, capture_output=True, text=True, timeout=HANG_S, check=False)


def line_of(capsys: Capture, *arguments: str) -> str:
    """The one line on stderr with which ``slime-router`` ends with exit code 2."""
    nowhere = ("--host", "192.0.2.1")  # RFC 5737: should it start after all, it cannot listen, and ends
    command = bool(arguments) and not arguments[0].startswith("-")
    assert main(arguments if command else [*nowhere, *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("slime-router: ")
    assert err.endswith("\n")
    assert err.count("\n") == 1
    return err.removeprefix("slime-router: ").rstrip("\n")


# what is refused


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["--port", "many"], "--port: wanted a whole number, got 'many'"),
        (["--port", "65536"], "--port: wanted 0 to 65535, got 65536"),
        (["--port"], "--port: wanted a value after it"),
        (["--plugin"], "--plugin NAME: wanted a value after it"),
        (["--max-payload-size", "0"], "--max-payload-size: wanted a number above 0, got 0"),
        (["--connect-timeout-secs", "-1"], "--connect-timeout-secs: wanted a number above 0, got -1.0"),
        (["--request-timeout-secs", "nan"], "--request-timeout-secs: wanted a number above 0, got nan"),
        (["--health-failure-threshold", "0"], "--health-failure-threshold: wanted 1 or more, got 0"),
        (["--tls-cert-path", "/nowhere"], "--tls-cert-path: no such file: /nowhere"),
        (["--tls-cert-path", __file__], "--tls-cert-path is given without --tls-key-path; give both"),
        (["--tls-key-path", __file__], "--tls-key-path is given without --tls-cert-path; give both"),
        (["--ca-cert-paths", __file__], "--ca-cert-paths, or --client-cert-path with --client-key-path: "),
        (["--client-cert-path", __file__], "--ca-cert-paths, or --client-cert-path with --client-key-path: "),
        (["--client-key-path", "/nowhere"], "--client-key-path: no such file: /nowhere"),
        (["--worker-urls", "10.0.0.1:1"], "--worker-urls: wanted a worker URL such as http://10.0.0.7:30001"),
        (["--config", "/nowhere"], "--config /nowhere: No such file or directory"),
    ],
)
def test_a_value_that_cannot_work_is_told(arguments: list[str], line: str, capsys: Capture) -> None:
    assert line_of(capsys, *arguments).startswith(line)


def test_a_choice_is_told_with_the_known_ones(capsys: Capture) -> None:
    line = line_of(capsys, "--policy", "best")
    assert line.startswith("--policy: no such value 'best'; known: ")
    assert "least_inflight" in line


def test_an_unknown_flag_is_told_with_similar_ones(capsys: Capture) -> None:
    line = line_of(capsys, "--wroker-urls", "http://127.0.0.1:1")
    assert line == "unknown flag --wroker-urls: did you mean --worker-urls?"
    assert "--health-check-endpoint" in line_of(capsys, "--health-check-endpiont", "/")  # a plugin's
    assert line_of(capsys, "--zzz=secret") == "unknown flag --zzz (--help shows all flags)"


@pytest.mark.parametrize(("flag", "plugin"), [("--hf-checkpoint", "radix_cache"), ("--state-dir", "state")])
def test_flag_of_an_installed_plugin_names_the_plugin(flag: str, plugin: str, capsys: Capture) -> None:
    line = f"{flag} belongs to the plugin {plugin}, which is not loaded: add --plugin {plugin}"
    assert line_of(capsys, flag, "/x") == line
    assert line_of(capsys, f"{flag}=/x") == line


def test_flags_are_not_abbreviated(capsys: Capture) -> None:
    line = line_of(capsys, "--worker-url", "http://127.0.0.1:1")
    assert line == "unknown flag --worker-url: did you mean --worker-urls?"


@pytest.mark.parametrize(
    ("flag", "plugin"),
    [
        ("--disable-health-check", "health"),
        ("--api-key=k", "auth"),
        ("--admin-api-key=k", "auth"),
        ("--control-plane-api-keys=ci:CI Job:admin:k", "auth"),
        ("--jwt-issuer=i", "auth"),
        ("--dp-aware", "sglang"),
    ],
)
def test_flag_of_an_omitted_default_plugin_names_the_plugin(
    flag: str, plugin: str, capsys: Capture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A router that nobody asks for the key that it was given would be worse than none."""
    name, _, value = flag.partition("=")
    variable = f"SLIME_ROUTER_{name[2:].upper().replace('-', '_')}"
    line = f"{name} ({variable}) belongs to the plugin {plugin}, which is not loaded: add --plugin {plugin}"
    assert line_of(capsys, "--no-default-plugins", *flag.split("=")) == line
    assert line_of(capsys, "--no-default-plugins", flag) == line
    assert line_of(capsys, "--no-default-plugins", "--cors-allowed-origins", "http://a", flag) == line
    config = tmp_path / "config"
    config.write_text(f"{name[2:]} = {value or 'true'}\n")
    assert line_of(capsys, "--no-default-plugins", "--config", str(config)) == f"{line} (in {config})"
    monkeypatch.setenv(variable, value or "true")
    assert line_of(capsys, "--no-default-plugins") == line


def test_a_router_that_asks_nobody_for_a_key_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(cli, "run", lambda _, sock, **__: sock.close())
    assert main(["--port", "0"]) == 0
    assert "auth" not in caplog.text
    assert main(["--no-default-plugins", "--port", "0"]) == 0
    assert "the plugin auth is not loaded" in caplog.text


def test_the_environment_may_hold_what_no_flag_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a pod beside a service that is called slime-router."""
    monkeypatch.setenv("SLIME_ROUTER_SERVICE_HOST", "10.0.0.1")
    build(["--no-default-plugins"])


def test_a_certificate_that_is_none_is_not_taken_for_a_taken_port() -> None:
    refused = run("--port", "0", "--tls-cert-path", __file__, "--tls-key-path", __file__)
    assert refused.returncode == 2
    assert refused.stderr.startswith("slime-router: --tls-cert-path and --tls-key-path: ")
    assert refused.stderr.count("\n") == 1


def test_a_plugin_that_cannot_come_up_ends_the_start(tmp_path: Path) -> None:
    (tmp_path / "torn_life.py").write_text(
        "from router_core import hookimpl\n@hookimpl\ndef lifespan(router): raise ValueError('no disk')\n"
    )
    environment = {"PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])}
    ended = run("--port", "0", "--middleware-paths", "torn_life", **environment)
    assert ended.returncode == 2
    assert ended.stderr == "slime-router: plugin 'torn_life' failed in lifespan: ValueError: no disk\n"


def test_taken_port_for_metrics_is_told_with_its_flags() -> None:
    with bind("127.0.0.1", 0) as sock:
        port = str(sock.getsockname()[1])
        ended = run("--port", "0", "--prometheus-host", "127.0.0.1", "--prometheus-port", port)
    assert ended.returncode == 2
    assert ended.stderr == (
        f"slime-router: metrics cannot listen on 127.0.0.1:{port}: Address already in use;"
        " give another --prometheus-port or --prometheus-host\n"
    )


def test_a_taken_port_is_told(capsys: Capture) -> None:
    with bind("127.0.0.1", 0) as sock:
        port = str(sock.getsockname()[1])
        line = line_of(capsys, "--host", "127.0.0.1", "--port", port)
    assert line == f"cannot listen on 127.0.0.1:{port}: Address already in use; give another --port or --host"


def test_an_unknown_command_is_told_with_the_known_ones(capsys: Capture) -> None:
    line = line_of(capsys, "serve")
    assert line.startswith("unknown command 'serve'; known: demo, engine, plugins")


def test_a_command_that_cannot_be_imported_is_told(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    point = EntryPoint("torn", "router_core.nothing:main", "slime_router.commands")
    monkeypatch.setattr(cli, "entry_points", lambda group: [point])
    line = line_of(capsys, "torn")
    assert line == (
        "command 'torn' cannot be imported: ModuleNotFoundError: No module named 'router_core.nothing'"
    )


def test_a_command_gets_its_arguments_and_says_how_it_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("counting")
    monkeypatch.setattr(module, "main", len, raising=False)
    monkeypatch.setitem(sys.modules, "counting", module)
    point = EntryPoint("count", "counting:main", "slime_router.commands")
    monkeypatch.setattr(cli, "entry_points", lambda group: [point])
    assert main(["count", "a", "--b", "c"]) == 3


def test_plugins_takes_no_flags(capsys: Capture) -> None:
    assert line_of(capsys, "plugins", "--all") == "plugins takes no flags, got '--all'"


def test_authors_of_plugins_get_the_traceback_in_dev_mode(tmp_path: Path) -> None:
    (tmp_path / "torn.py").write_text("raise ValueError('the reason')")
    environment = {"PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])}
    plain = run("--middleware-paths", "torn", **environment)
    assert (plain.returncode, plain.stdout) == (2, "")
    assert plain.stderr == "slime-router: --middleware-paths torn: ValueError: the reason\n"
    verbose = run("--middleware-paths", "torn", PYTHONDEVMODE="1", **environment)
    assert verbose.returncode == 2
    assert "Traceback" in verbose.stderr
    assert "torn.py" in verbose.stderr
    assert verbose.stderr.endswith(plain.stderr)


# flags from everywhere


def test_flags_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLIME_ROUTER_PORT", "7")
    monkeypatch.setenv("SLIME_ROUTER_WORKER_URLS", "[http://10.0.0.1:1, http://10.0.0.2:2]")
    monkeypatch.setenv("SLIME_ROUTER_PLUGIN", "r3")
    monkeypatch.setenv("SLIME_ROUTER_DISABLE_HEALTH_CHECK", "true")
    monkeypatch.setenv("SLIME_ROUTER_POLICY", "round_robin")
    router, _ = build([])
    assert router.settings.port == 7
    assert router.settings.worker_urls == ("http://10.0.0.1:1", "http://10.0.0.2:2")
    assert "r3" in [name for name, _ in router.hooks.pre_request]
    assert router.options.disable_health_check is True
    assert router.options.policy == "round_robin"


def test_flags_come_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "router.conf"
    file.write_text(
        "# the plugins' flags as well\n"
        "port = 7\n"
        "worker-urls = [http://10.0.0.1:1, http://10.0.0.2:2]\n"
        "plugin = r3\n"
        "disable-health-check = true\n"
    )
    router, _ = build(["--config", str(file)])
    assert router.settings.port == 7
    assert router.settings.worker_urls == ("http://10.0.0.1:1", "http://10.0.0.2:2")
    assert "r3" in [name for name, _ in router.hooks.pre_request]
    assert router.options.disable_health_check is True


def test_an_unknown_name_in_a_file_is_told(tmp_path: Path, capsys: Capture) -> None:
    file = tmp_path / "router.conf"
    file.write_text("prot = 7\n")
    assert line_of(capsys, "--config", str(file)) == f"{file}: unknown key prot: did you mean port?"


def test_command_line_overrides_environment_which_overrides_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "router.conf"
    file.write_text("port = 1\nmax-payload-size = 1\nconnect-timeout-secs = 1\n")
    monkeypatch.setenv("SLIME_ROUTER_PORT", "2")
    monkeypatch.setenv("SLIME_ROUTER_MAX_PAYLOAD_SIZE", "2")
    router, _ = build(["--config", str(file), "--port", "3"])
    settings = router.settings
    assert (settings.port, settings.max_payload_size, settings.connect_timeout_s) == (3, 2, 1.0)


def test_a_bad_value_in_the_environment_is_told(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    # Kubernetes puts this there for a service that is named slime-router.
    monkeypatch.setenv("SLIME_ROUTER_PORT", "tcp://10.96.0.1:30000")
    assert line_of(capsys) == (
        "--port: wanted a whole number, got 'tcp://10.96.0.1:30000' (SLIME_ROUTER_PORT; Kubernetes sets it for a"
        " service of this name: rename the service, or give --port)"
    )


def test_slimes_name_for_the_middleware_paths_is_an_alias() -> None:
    with pytest.raises(PluginError, match="--middleware-paths nowhere: ModuleNotFoundError"):
        build(["--slime-router-middleware-paths", "nowhere"])


def test_lists_of_urls_follow_one_flag_and_are_made_unique() -> None:
    router, _ = build(["--worker-urls", "http://a:1/", "http://b:2", "http://a:1", "--port", "7"])
    assert router.settings.worker_urls == ("http://a:1", "http://b:2")
    assert router.settings.port == 7


# what it tells


def test_plugins_lists_what_is_installed(capsys: Capture) -> None:
    assert main(["plugins"]) == 0
    out = capsys.readouterr().out
    listed = {line.split()[0]: line for line in out.splitlines()}
    assert list(listed) == list(installed_plugins())
    assert listed["r3"].split(maxsplit=2)[1:] == ["(slime-router)", about(slime_r3)]
    assert {name for name, line in listed.items() if " (default) " in line} == set(DEFAULT_PLUGINS)


def test_help_shows_the_flags_of_the_plugins_that_are_loaded(capsys: Capture) -> None:
    with pytest.raises(SystemExit) as leaving:
        main(["--plugin", "radix_cache", "--help"])
    assert leaving.value.code == 0
    shown = capsys.readouterr().out
    for flag in ("--worker-urls", "--health-check-endpoint", "--policy", "--hf-checkpoint", "--config"):
        assert flag in shown
    with pytest.raises(SystemExit):
        main(["--no-default-plugins", "-h"])
    shown = capsys.readouterr().out
    assert "--worker-urls" in shown
    assert "--policy" not in shown


def test_python_m_router_core_is_the_command() -> None:
    assert run("plugins").stdout.split()[0] in installed_plugins()
    refused = run("--port", "many")
    assert (refused.returncode, refused.stdout) == (2, "")
    assert refused.stderr == "slime-router: --port: wanted a whole number, got 'many'\n"
