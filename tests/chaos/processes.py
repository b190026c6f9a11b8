"""``slime-router`` and its engines as processes of their own, which end when the test does, however it ends."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import anyio
import httpx

from deadlines import HANG_S

__all__ = ["Program"]

_libc = ctypes.CDLL(None)
_PR_SET_PDEATHSIG = 1


def _die_with_the_test() -> None:
    """A time-out ends the test process without a word, and nobody would be left to clean up."""
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


class Program:
    """``python -m router_core ...``, a process group that can be started again; ``log`` has what it said.

    ``variables`` are added to the environment.
    """

    def __init__(
        self, arguments: Sequence[str], log: Path, variables: Mapping[str, str] | None = None
    ) -> None:
        self.log = log
        self._variables = variables or {}
        self._command = [sys.executable, "-m", "router_core", *arguments]
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it; ``arguments`` of the last time are used again."""
        path = os.pathsep.join(path for path in sys.path if path)
        environment = {**os.environ, "PYTHONPATH": path, **self._variables}
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=environment,
                start_new_session=True,
                preexec_fn=_die_with_the_test,  # all it needs is loaded
            )

    async def serve(self, client: httpx.AsyncClient) -> None:
        """Start a router, and wait until it serves. ``client``: its base URL is the router's."""
        self.start()
        with anyio.fail_after(HANG_S):
            while True:
                assert not self.ended, self.said()
                with suppress(httpx.TransportError):
                    if (await client.get("/readiness")).status_code == 200:
                        return
                await anyio.sleep(0.02)

    @property
    def pid(self) -> int:
        assert self._process is not None, "not started"
        return self._process.pid

    @property
    def ended(self) -> bool:
        return self._process is None or self._process.poll() is not None

    @property
    def code(self) -> int | None:
        """Its exit code; None while it runs."""
        return self._process.poll() if self._process is not None else None

    def send(self, which: signal.Signals) -> None:
        """Send a signal to the whole group."""
        with suppress(ProcessLookupError):
            os.killpg(self.pid, which)

    def kill(self) -> None:
        """End it at once, stopped or not."""
        if self._process is not None:
            self.send(signal.SIGKILL)
            self._process.wait(HANG_S)

    def said(self) -> str:
        """Its log so far."""
        return self.log.read_text(errors="replace")

    def open_files(self) -> int:
        """File descriptors, sockets included."""
        return len(os.listdir(f"/proc/{self.pid}/fd"))

    def resident_bytes(self) -> int:
        """Memory in use."""
        pages = int(Path(f"/proc/{self.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")
