"""Real servers of remote stores on loopback ports: Redis or Valkey, and an S3 server."""

from __future__ import annotations

import importlib.util
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

import pytest

from deadlines import HANG_S
from ports import free_port
from programs import program

__all__ = ["redis_server", "s3_server"]

#: moto's server without its dispatcher, which looks through the folders of all services at each request.
_S3 = """
import logging, sys
from moto.moto_server.werkzeug_app import create_backend_app
from werkzeug.serving import run_simple

logging.getLogger("werkzeug").setLevel(logging.ERROR)
run_simple("127.0.0.1", int(sys.argv[1]), create_backend_app("s3"), threaded=True)
"""


@contextmanager
def running(command: list[str], port: int, log: IO[bytes]) -> Iterator[subprocess.Popen[bytes]]:
    """Run a server, and wait until it listens."""
    with subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT) as process:
        try:
            give_up = time.monotonic() + HANG_S
            while True:
                with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
                    break
                assert process.poll() is None, f"{command[0]} ended: see {log.name}"
                assert time.monotonic() < give_up
                time.sleep(0.02)
            yield process
        finally:
            process.kill()


@contextmanager
def redis_server(
    directory: Path, *options: str, port: int = 0
) -> Iterator[tuple[int, subprocess.Popen[bytes]]]:
    """Run a server that writes each change to disk before it answers. Yields its port and its process."""
    pytest.importorskip("redis", reason="redis is not installed: pip install redis")
    port = port or free_port()
    command = [
        program("redis-server"), "--port", str(port), "--bind", "127.0.0.1", "--dir", str(directory), "--save", "",
        "--appendonly", "yes", "--appendfsync", "always", *options,
    ]  # fmt: skip
    with (directory / "redis.log").open("ab") as log, running(command, port, log) as process:
        yield port, process


@contextmanager
def s3_server(directory: Path, port: int = 0) -> Iterator[str]:
    """Run moto's S3 server, which keeps everything in memory. Yields its URL."""
    if importlib.util.find_spec("moto") is None:  # its import takes long, and only the server needs it
        pytest.skip("moto is not installed: pip install 'moto[s3]' flask flask-cors")
    pytest.importorskip("obstore", reason="obstore is not installed: pip install obstore")
    port = port or free_port()
    command = [sys.executable, "-W", "ignore", "-c", _S3, str(port)]
    with (directory / "s3.log").open("ab") as log, running(command, port, log):
        yield f"http://127.0.0.1:{port}"
