"""The embedded engine as a worker: a process of its own, on the load's core."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import httpx
from tokenizers import Tokenizer

from benchmarks.processes import LOAD_CORE, child, free_port
from slime_engine.model import load_model

__all__ = ["save_engine_tokenizer", "serving_engine"]

_START_DEADLINE_S = 30.0


def save_engine_tokenizer(directory: Path) -> Tokenizer:
    """Save the engine's tokenizer to ``directory``, in the files that transformers reads, and return the tokenizer."""
    load_model().tokenizer.save(directory)
    return Tokenizer.from_file(str(directory / "tokenizer.json"))


@asynccontextmanager
async def serving_engine(directory: Path, *flags: str) -> AsyncIterator[str]:
    """Run ``slime-router engine`` with ``flags``; yields its URL.

    Raises RuntimeError if the engine ends before it is healthy, and TimeoutError if it is not healthy after 30 seconds.
    """
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "router_core", "engine", "--port", str(port), *flags]
    with child("engine", command, core=LOAD_CORE, directory=directory) as engine:
        async with httpx.AsyncClient(base_url=url, trust_env=False) as client:
            with anyio.fail_after(_START_DEADLINE_S):
                while not await _is_healthy(client):
                    if engine.process.poll() is not None:
                        raise RuntimeError(f"the engine does not start: {engine.last_words()}")
                    await anyio.sleep(0.1)
        yield url


async def _is_healthy(client: httpx.AsyncClient) -> bool:
    try:
        return (await client.get("/health")).is_success
    except httpx.TransportError:
        return False
