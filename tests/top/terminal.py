"""``slime-router top`` in a terminal of its own."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from collections.abc import Iterator
from contextlib import contextmanager

import anyio

from deadlines import HANG_S

__all__ = ["COLUMNS", "LINES", "Terminal", "terminal"]

COLUMNS, LINES = 80, 24
_HOME = "\x1b[H"
_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


class Terminal:
    """A terminal of 80 columns and 24 lines, with the command in it."""

    def __init__(self, process: subprocess.Popen[bytes], descriptor: int) -> None:
        self.process = process
        self._descriptor = descriptor
        self._output = ""

    def frames(self) -> list[str]:
        """Return all whole frames so far, without colours."""
        try:
            while True:
                self._output += os.read(self._descriptor, 1 << 16).decode()
        except (BlockingIOError, OSError):
            pass  # all is read, or the command has ended
        parts = self._output.split(_HOME)[1:-1]
        return [_ESCAPES.sub("", part).replace("\r\n", "\n") for part in parts]

    async def shows(self, *texts: str) -> str:
        """Wait for a later frame with all ``texts``, and return it."""
        seen = len(self.frames())
        with anyio.fail_after(HANG_S):
            while True:
                for frame in self.frames()[seen:]:
                    if all(text in frame for text in texts):
                        return frame
                assert self.process.poll() is None, self._output
                await anyio.sleep(0.02)

    async def press(self, key: str) -> int:
        """Press ``key``, and return the exit code of the command, which ends."""
        os.write(self._descriptor, key.encode())
        return await self.ends()

    async def ends(self) -> int:
        """Wait for the end of the command, and return its exit code."""
        with anyio.fail_after(HANG_S):
            while self.process.poll() is None:
                self.frames()
                await anyio.sleep(0.02)
        return self.process.returncode


@contextmanager
def terminal(*arguments: str) -> Iterator[Terminal]:
    """Run ``slime-router top`` with ``arguments`` and a frame every 0.1 s."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", LINES, COLUMNS, 0, 0))
    os.set_blocking(ours, False)
    program = "import sys; from slime_top import main; sys.exit(main(sys.argv[1:]))"
    environment = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")}
    process = subprocess.Popen(
        [sys.executable, "-c", program, "--interval", "0.1", *arguments],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env={**environment, "TERM": "xterm-256color"},
    )
    os.close(theirs)
    try:
        yield Terminal(process, ours)
    finally:
        process.kill()
        process.wait()
        os.close(ours)
