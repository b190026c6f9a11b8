"""The systemd unit: systemd reads it, and its times and flags are the router's."""

from __future__ import annotations

import configparser
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
