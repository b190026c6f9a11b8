"""A container without an engine: a read-only root of its own, in which a command runs as another user."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

import router_core
import slime_state
from deadlines import HANG_S
from deploy.deployed import DEPLOY

__all__ = ["STATE", "UID", "Rights", "contained", "rights_of"]

#: The user of the image, and its writable directory.
UID = 10001
STATE = "/var/lib/slime-router"
_SYSTEM = ("/usr", "/bin", "/lib", "/lib64", "/dev", "/proc", "/sys", "/etc/ssl", "/etc/alternatives")
_FILES = ("/etc/hosts", "/etc/resolv.conf", "/etc/nsswitch.conf", "/etc/ld.so.cache", "/etc/passwd")


def _script(root: str, files: Mapping[str, str], command: Sequence[str]) -> str:
    """Build the root in a mount namespace, and replace the shell by the command in it."""
    core, plugins = Path(str(router_core.__file__)).parent, Path(str(slime_state.__file__)).parents[1]
    # Not the repository: an environment in it may be in a directory of root alone.
    python = {sys.prefix, sys.base_prefix, str(core), str(plugins)}
    lines = ["mount --make-rprivate /", f"mount -t tmpfs -o mode=755 tmpfs {root}"]
    # Sources may be below the real /tmp, so this comes first.
    lines.append(f"mkdir {root}/tmp && mount -t tmpfs -o mode=1777 tmpfs {root}/tmp")
    for path in [path for path in (*_SYSTEM, *sorted(python)) if Path(path).is_dir()]:
        lines.append(f"mkdir -p {root}{path} && mount --rbind {path} {root}{path}")
        if path not in ("/dev", "/proc", "/sys"):
            lines.append(f"mount -o remount,bind,ro {root}{path}")
    lines += [f"cp {path} {root}{path}" for path in _FILES if Path(path).is_file()]
    lines.append(f"mkdir -p {root}/opt/slime-router {root}{STATE}")
    lines.append(f"cp {DEPLOY}/healthcheck.py {root}/opt/slime-router/")
    for path, text in files.items():
        name = shlex.quote(f"{root}{path}")
        lines.append(f"mkdir -p $(dirname {name}) && printf %s {shlex.quote(text)} > {name}")
    # The volume.
    lines.append(f"mount -t tmpfs -o uid={UID},gid={UID},mode=700 tmpfs {root}{STATE}")
    lines.append(f"mount -o remount,ro {root}")
    user = f"--reuid {UID} --regid {UID} --clear-groups --no-new-privs --bounding-set=-all"
    lines.append(f"exec chroot {root} setpriv {user} env --chdir={STATE} {shlex.join(command)}")
    return "\n".join(lines)


@contextmanager
def contained(
    command: Sequence[str], files: Mapping[str, str], environment: Mapping[str, str], log: Path
) -> Iterator[subprocess.Popen[bytes]]:
    """Run ``command`` as a container of the image: user, environment, read-only root, no capabilities.

    Only the state directory and /tmp can be written. ``files`` have paths in the container. Its network is this
    machine's. Needs root, and skips the test without it.
    """
    if os.geteuid() != 0:
        pytest.skip("only root can make a mount namespace")
    root = log.parent / "root"
    root.mkdir()
    path = f"{Path(sys.executable).parent}:/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin"
    source = {"PYTHONPATH": os.environ["PYTHONPATH"]} if "PYTHONPATH" in os.environ else {}
    with log.open("wb") as out:
        process = subprocess.Popen(
            ["unshare", "--mount", "sh", "-ec", _script(str(root), files, command)],
            env={"PATH": path, **source, **environment},
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
        )
    try:
        yield process
    finally:
        process.kill()
        process.wait(HANG_S)


@dataclass(frozen=True)
class Rights:
    """The rights of a process. ``capabilities`` is the union of its masks; ``may_gain``: it can gain others."""

    user: int
    capabilities: int
    may_gain: bool
    root_is_read_only: bool


def rights_of(pid: int) -> Rights:
    """Read the rights of the process ``pid`` from the kernel."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    status = {name: value.split() for name, _, value in (line.partition(":") for line in lines)}
    masks = [int(status[name][0], 16) for name in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb")]
    mounts = [line.split() for line in Path(f"/proc/{pid}/mountinfo").read_text().splitlines()]
    options = [mount[5].split(",") for mount in mounts if mount[4] == "/"]
    (user,) = set(status["Uid"])
    return Rights(int(user), max(masks), status["NoNewPrivs"] == ["0"], all("ro" in each for each in options))
