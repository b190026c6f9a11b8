"""Routers as processes of their own."""

from __future__ import annotations

import re
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from subprocess import DEVNULL, PIPE

import anyio
import anyio.abc

from deadlines import HANG_S
from routers import BARE

__all__ = ["RouterProcess", "router_process"]


class RouterProcess:
    """A router process: its URL, its peak memory, and its end."""

    def __init__(self, url: str, process: anyio.abc.Process) -> None:
        self.url = url
        self._process = process
        self._status = Path(f"/proc/{process.pid}/status")

    def terminate(self) -> None:
        """Send SIGTERM."""
        self._process.terminate()

    async def left(self) -> int:
        """Its exit code."""
        with anyio.fail_after(HANG_S):
            return await self._process.wait()

    @property
    def peak(self) -> int:
        """The most memory that it ever had, in bytes."""
        found = re.search(r"^VmHWM:\s+(\d+) kB$", self._status.read_text(), re.MULTILINE)
        assert found is not None
        return int(found[1]) * 1024


@asynccontextmanager
async def router_process(*flags: str) -> AsyncIterator[RouterProcess]:
    """``slime-router`` with ``flags`` and nothing by default."""
    command = [sys.executable, "-m", "router_core", *BARE, "--port", "0", *flags]
    async with await anyio.open_process(command, stdin=DEVNULL, stdout=DEVNULL, stderr=PIPE) as process:
        assert process.stderr is not None
        try:
            said = ""
            with anyio.fail_after(HANG_S):
                while not (found := re.search(r"listening on (\S+)\n", said)):
                    said += (await process.stderr.receive()).decode()
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(_drain, process.stderr)
                yield RouterProcess(found[1], process)
                tasks.cancel_scope.cancel()
        finally:
            with suppress(ProcessLookupError):
                process.kill()


async def _drain(stream: anyio.abc.ByteReceiveStream) -> None:
    async for _ in stream:
        pass
