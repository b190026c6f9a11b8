"""The engines, what the router says of them, and a trainer that gives them new weights through the router."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import aiohttp
import orjson

from chaos.oracle import JournalReader
from chaos.processes import Program
from chaos.relay import Relay
from ports import free_port

__all__ = ["FIRST", "EngineProcess", "Trainer", "Update", "Watch", "until"]

#: The weights with which an engine starts, and comes back.
FIRST = "1"


class EngineProcess:
    """An embedded engine in its own process; ``url`` is where the router reaches it: directly, or through ``relay``."""

    def __init__(self, name: str, directory: Path, *, relayed: bool) -> None:
        self.name = name
        self.port = free_port()
        self.relay = Relay(free_port(), self.port) if relayed else None
        self.url = f"http://127.0.0.1:{self.relay.port if self.relay is not None else self.port}"
        self.direct_url = f"http://127.0.0.1:{self.port}"
        journal = directory / f"{name}.journal"
        self.journal = JournalReader(journal)
        arguments = ["engine", "--port", str(self.port), "--journal-file", str(journal)]
        arguments += ["--weight-version", FIRST, "--latency-ms", "60", "--tokens-per-second", "80"]
        self.program = Program(arguments, directory / f"{name}.log")

    async def serves(self, http: aiohttp.ClientSession) -> bool:
        """Return True when the engine answers, asked directly."""
        try:
            async with http.get(f"{self.direct_url}/health") as answer:
                return answer.status == 200
        except (aiohttp.ClientError, TimeoutError):
            return False

    async def running(self, http: aiohttp.ClientSession) -> int:
        """Sequences that it generates, or would; -1 while it does not say."""
        try:
            async with http.get(f"{self.direct_url}/v1/loads") as answer:
                (load,) = (await answer.json())["loads"]
                return int(load["num_total_reqs"])
        except (aiohttp.ClientError, TimeoutError, KeyError):
            return -1


async def until(condition: Callable[[], bool], seconds: float) -> bool:
    """Wait for something to become true; false when it has not."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + seconds
    while not condition():
        if loop.time() > deadline:
            return False
        await asyncio.sleep(0.02)
    return True


class Watch:
    """The last answer of ``GET /workers``, polled, and every change of a state: ``(time, url, state)``."""

    def __init__(self, http: aiohttp.ClientSession) -> None:
        self._http = http
        self.workers: dict[str, dict[str, Any]] = {}
        self.changes: list[tuple[float, str, str]] = []

    def state(self, url: str) -> str:
        return str(self.workers.get(url, {}).get("state", "unknown"))

    def count(self, state: str) -> int:
        """Count the changes of a worker into ``state``."""
        return sum(one == state for _, _, one in self.changes)

    async def look(self) -> None:
        """Ask once."""
        async with self._http.get("/workers") as answer:
            workers = (await answer.json())["workers"]
        now = asyncio.get_running_loop().time()
        for worker in workers:
            if self.state(worker["url"]) != worker["state"]:
                self.changes.append((now, worker["url"], worker["state"]))
            self.workers[worker["url"]] = worker

    async def run(self) -> None:
        """Ask ten times a second."""
        while True:
            await self.look()
            await asyncio.sleep(0.1)


@dataclass(frozen=True, slots=True)
class Update:
    """New weights; ``succeeded`` when at least one engine took them, and the fleet has moved; ``whole``: all did.

    ``takers``: the URLs of the engines that took them.
    """

    version: int
    began: float
    ended: float
    succeeded: bool
    whole: bool = True
    takers: frozenset[str] = frozenset()


@dataclass
class Trainer:
    """Pauses, updates, continues, through the router only. ``statuses`` counts what its calls were answered."""

    http: aiohttp.ClientSession
    random: Random
    updates: list[Update] = field(default_factory=lambda: [Update(int(FIRST), 0.0, 0.0, succeeded=True)])
    answers: list[tuple[str, int, str]] = field(default_factory=list)

    async def run(self, over: asyncio.Event) -> None:
        """An update every few seconds, until it is ``over``."""
        while not over.is_set():
            await asyncio.sleep(self.random.uniform(1.5, 3.5))
            await self.update()

    async def update(self, *, from_disk: bool = False) -> Update:
        """One update, whatever becomes of it: from disk, or a new name, which leaves behind who was behind."""
        loop = asyncio.get_running_loop()
        version = self.updates[-1].version + 1
        mode = self.random.choice(("abort", "retract", "in_place"))
        await self._call("/pause_generation", {"mode": mode})
        began = loop.time()
        # Noted before it is done: answers of the new weights come as soon as the first engine has them.
        self.updates.append(Update(version, began, float("inf"), succeeded=False))
        if from_disk or self.random.random() < 0.7:
            body = {"model_path": f"/weights/{version}", "weight_version": str(version)}
            status, told = await self._call("/update_weights_from_disk", body)
        else:
            body = {"new_version": str(version)}
            status, told = await self._call("/update_weight_version", body)
        succeeded = status in (200, 207)
        takers = _takers(told) if succeeded else frozenset[str]()
        self.updates[-1] = update = Update(version, began, loop.time(), succeeded, status == 200, takers)
        for _ in range(100):
            if (await self._call("/continue_generation", {}))[0] in (200, 207):
                break
            await asyncio.sleep(0.5)
        return update

    async def _call(self, path: str, body: dict[str, Any]) -> tuple[int, bytes]:
        try:
            async with self.http.post(path, json=body) as answer:
                told = await answer.read()
                self.answers.append((path, answer.status, told[:1000].decode(errors="replace")))
                return answer.status, told
        except (aiohttp.ClientError, TimeoutError) as error:
            self.answers.append((path, 0, repr(error)))
            return 0, b""

    def allowed(self, began: float, ended: float) -> tuple[int, int]:
        """The oldest and the newest weights that a request from ``began`` to ``ended`` may have met."""
        newest = max(update.version for update in self.updates if update.began <= ended)
        return self.last_before(began).version, newest

    def last_before(self, time: float) -> Update:
        """Return the last update that had succeeded at ``time``."""
        done = [update for update in self.updates if update.succeeded and update.ended <= time]
        return max(done, key=lambda update: update.version)


def _takers(told: bytes) -> frozenset[str]:
    workers: dict[str, dict[str, Any]] = orjson.loads(told)["workers"]
    return frozenset(url for url, answer in workers.items() if answer["status"] == 200)
