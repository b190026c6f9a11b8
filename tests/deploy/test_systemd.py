"""The systemd unit: systemd reads it, and its times and flags are the router's."""

from __future__ import annotations

import configparser
import re
import subprocess
import sys
from pathlib import Path

import pytest

from deadlines import HANG_S
from deploy.deployed import DEPLOY, check_flags
from programs import program

FOLDER = DEPLOY / "systemd"
UNIT = (FOLDER / "slime-router.service").read_text()
#: Of 100; systemd's own services have 20 to 95. The network, which the router needs, is 8 of the points.
_EXPOSURE = 20

_ANY, _YES, _SECONDS, _NUMBER, _MODE = r".+", r"yes|no", r"\d+", r"\d+", r"0[0-7]{3}"
#: The settings that a unit of ours may have, by section, each with a pattern of its values: systemd.unit(5),
#: systemd.service(5), systemd.exec(5), systemd.kill(5).
KNOWN = {
    "Unit": {
        "Description": _ANY,
        "After": r"[\w-]+\.target",
        "Wants": r"[\w-]+\.target",
        "StartLimitIntervalSec": _SECONDS,
        "StartLimitBurst": _NUMBER,
    },
    "Service": {
        "Type": r"simple|exec|forking|oneshot|dbus|notify|idle",
        "ExecStart": r"/\S+( \S+)*",
        "EnvironmentFile": r"-?/\S+",
        "Environment": r"[A-Z_]+=\S+( [A-Z_]+=\S+)*",
        "WorkingDirectory": r"/\S+",
        "StateDirectory": r"[\w-]+",
        "StateDirectoryMode": _MODE,
        "Restart": r"no|on-success|on-failure|on-abnormal|on-watchdog|on-abort|always",
        "RestartSec": _SECONDS,
        "RestartPreventExitStatus": r"\d+( \d+)*",
        "KillSignal": r"SIG[A-Z]+",
        "KillMode": r"control-group|mixed|process|none",
        "TimeoutStopSec": _SECONDS,
        "LimitNOFILE": _NUMBER,
        "ProtectSystem": r"yes|no|full|strict",
        "ProtectHome": r"yes|no|read-only|tmpfs",
        "ProtectProc": r"noaccess|invisible|ptraceable|default",
        "RestrictAddressFamilies": r"AF_[A-Z0-9]+( AF_[A-Z0-9]+)*",
        "CapabilityBoundingSet": r"",
        "AmbientCapabilities": r"",
        "SystemCallArchitectures": r"native",
        "SystemCallFilter": r"~?@[a-z-]+",
        "SystemCallErrorNumber": r"E[A-Z]+",
        "UMask": _MODE,
        **dict.fromkeys(
            (
                "DynamicUser", "LockPersonality", "NoNewPrivileges", "PrivateDevices", "PrivateTmp", "PrivateUsers",
                "ProtectClock", "ProtectControlGroups", "ProtectHostname", "ProtectKernelLogs",
                "ProtectKernelModules", "ProtectKernelTunables", "RemoveIPC", "RestrictNamespaces",
                "RestrictRealtime", "RestrictSUIDSGID",
            ),
            _YES,
        ),
    },
    "Install": {"WantedBy": r"[\w-]+\.target"},
}  # fmt: skip


class Unit(configparser.RawConfigParser):
    """A unit file; a key that is given again replaces the value before."""

    def optionxform(self, optionstr: str) -> str:
        return optionstr


@pytest.fixture(scope="module")
def service() -> configparser.SectionProxy:
    unit = Unit(strict=False)
    unit.read_string(UNIT)
    return unit["Service"]


def analysed(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [program("systemd-analyze"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=HANG_S, check=False)


def wrong_lines(unit: str) -> list[str]:
    """Return the lines of ``unit`` that are neither a section nor one of its known settings with a valid value."""
    wrong, known = [], {}
    for line in unit.splitlines():
        name, equals, value = line.partition("=")
        if not line or line.startswith("#"):
            continue
        if line[0] == "[" and line[-1] == "]":
            known = KNOWN.get(line[1:-1], {})
            is_right = bool(known)
        else:
            is_right = bool(equals) and re.fullmatch(known.get(name, "(?!)"), value) is not None
        if not is_right:
            wrong.append(line)
    return wrong


def test_each_line_of_the_unit_is_known() -> None:
    """The other tests need systemd, and are skipped without it; this one always runs."""
    assert wrong_lines(UNIT) == []


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("ProtectSystem=strict", "ProtectSystems=strict"),
        ("ProtectSystem=strict", "ProtectSystem=stricter"),
        ("Type=exec", "Type=execute"),
        ("KillSignal=SIGTERM", "KillSignal=TERM"),
        ("TimeoutStopSec=200", "TimeoutStopSec=many"),
        ("[Install]", "[Instal]"),
    ],
)
def test_a_wrong_line_is_found_without_systemd(right: str, wrong: str) -> None:
    assert wrong_lines(UNIT.replace(right, wrong))[0] == wrong


def test_systemd_takes_the_unit(tmp_path: Path) -> None:
    unit = tmp_path / "slime-router.service"
    # It looks for the program, too.
    unit.write_text(UNIT.replace("/opt/slime-router/bin/slime-router", sys.executable))
    done = analysed("verify", "--man=no", unit)
    assert "slime-router.service" not in done.stderr
    unit.write_text(unit.read_text().replace("ProtectSystem=", "ProtectSystems="))
    assert "ProtectSystems" in analysed("verify", "--man=no", unit).stderr


def test_unit_is_hardened() -> None:
    done = analysed("security", "--offline=true", f"--threshold={_EXPOSURE}", FOLDER / "slime-router.service")
    assert done.returncode == 0, done.stdout + done.stderr


def test_systemd_waits_for_the_drain(service: configparser.SectionProxy, tmp_path: Path) -> None:
    options = check_flags((FOLDER / "slime-router.conf").read_text(), tmp_path / "flags")
    grace_s = options["shutdown_grace_period_secs"]
    assert isinstance(grace_s, float)
    assert float(service["TimeoutStopSec"]) == grace_s + 20
    assert service["KillSignal"] == "SIGTERM"
    # An invalid command line, which a restart does not mend.
    assert service["RestartPreventExitStatus"] == "2"
    assert service["Restart"] == "on-failure"


def test_unit_reads_the_files_that_are_here(service: configparser.SectionProxy) -> None:
    command = service["ExecStart"].split()
    assert command[1:] == ["--config", f"/etc/slime-router/{FOLDER.joinpath('slime-router.conf').name}"]
    assert service["EnvironmentFile"] == f"-/etc/slime-router/{FOLDER.joinpath('keys.env').name}"
    assert f"/var/lib/{service['StateDirectory']}/state" in (FOLDER / "slime-router.conf").read_text()


def test_keys_of_the_example_are_variables_of_the_router(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = [line.removeprefix("# ") for line in (FOLDER / "keys.env").read_text().splitlines()]
    names = [line.removesuffix("=") for line in lines if line.startswith("SLIME_ROUTER_")]
    assert len(names) == 3
    for name in names:
        monkeypatch.setenv(name, "a-key")
    options = check_flags("", tmp_path / "flags")
    assert [options[name.removeprefix("SLIME_ROUTER_").lower()] for name in names] == ["a-key"] * 3
