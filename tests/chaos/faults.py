"""Faults, in an order that the seed decides."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from random import Random
from typing import Literal

import aiohttp

from chaos.fleet import EngineProcess, Watch, until
from chaos.relay import TROUBLES, Trouble

__all__ = ["KINDS", "Fault", "Faults", "Kind", "pause"]

Kind = Trouble | Literal["killed (-9)", "stopped (SIGSTOP)"]
_KILLED: Kind = "killed (-9)"
_STOPPED: Kind = "stopped (SIGSTOP)"
KINDS: tuple[Kind, ...] = (_KILLED, _STOPPED, *TROUBLES)


@dataclass(slots=True)
class Fault:
    """One thing that went wrong with ``engine``; ``hit`` are the requests that it happened to.

    ``restarted_at``: when an engine that was killed was started again, with its first weights.
    """

    kind: Kind
    engine: str
    url: str
    began: float
    hit: set[str] = field(default_factory=set)
    quarantined_after_s: float | None = None
    restarted_at: float | None = None


class Faults:
    """Each engine has troubles of its own, one after the other: all kinds it can have, shuffled, again and again.

    ``pace``: factor for the length of a relay's troubles, and of the pauses between them.
    """

    def __init__(self, watch: Watch, direct: aiohttp.ClientSession, seed: int, pace: float) -> None:
        self._watch = watch
        self._pace = pace
        self._direct = direct
        self._seed = seed
        self.done: list[Fault] = []
        self.wrong: list[tuple[str, str]] = []

    async def run(self, engine: EngineProcess, number: int, over: asyncio.Event) -> None:
        """Trouble for ``engine`` until it is ``over``; then it is well."""
        random = Random(f"{self._seed} {engine.name}")
        for kind in _kinds(engine, number, random):
            rest = (
                self._pace * random.uniform(0.5, 2.0)
                if engine.relay is not None
                else random.uniform(2.0, 6.0)
            )
            await pause(over, rest)
            if over.is_set():
                return
            fault = Fault(kind, engine.name, engine.url, asyncio.get_running_loop().time())
            self.done.append(fault)
            if kind == "killed (-9)":
                await self._kill(engine, fault, random)
            elif kind == "stopped (SIGSTOP)":
                await self._stop(engine, fault, random)
            else:
                await self._spoil(engine, fault, kind, random)

    def restarted_between(self, began: float, ended: float) -> bool:
        """True when an engine was started again in that time: what was on the way to it meets its first weights."""
        restarts = (fault.restarted_at for fault in self.done)
        return any(at is not None and began <= at <= ended for at in restarts)

    def all_killed(self, urls: Collection[str], began: float, ended: float) -> bool:
        """True when each of ``urls`` was killed in that time: what these engines had is lost."""
        killed = {fault.url for fault in self.done if fault.kind == _KILLED and began <= fault.began <= ended}
        return bool(urls) and killed.issuperset(urls)

    def _under_way(self, engine: EngineProcess) -> set[str]:
        """Return the rids that the engine works on, without those that an earlier kill hit."""
        killed = [fault.hit for fault in self.done if fault.kind == _KILLED and fault.engine == engine.name]
        return engine.journal.unfinished().difference(*killed)

    async def _kill(self, engine: EngineProcess, fault: Fault, random: Random) -> None:
        was_ready = await self._is_ready(engine)
        fault.began = asyncio.get_running_loop().time()
        engine.program.kill()
        fault.hit = self._under_way(engine)
        noticed = await until(lambda: self._watch.state(engine.url) != "ready", 30)
        if not noticed:
            self.wrong.append(("not quarantined", f"{engine.name} was killed, and is still ready after 30 s"))
        elif was_ready:
            fault.quarantined_after_s = asyncio.get_running_loop().time() - fault.began
        await asyncio.sleep(random.uniform(0, 1))
        fault.restarted_at = asyncio.get_running_loop().time()
        await self._revive(engine)

    async def _is_ready(self, engine: EngineProcess) -> bool:
        """Wait a while for ``engine`` to get requests: trouble without them shows nothing."""
        return await until(lambda: self._watch.state(engine.url) == "ready", 5)

    async def _revive(self, engine: EngineProcess) -> None:
        """Start it again, with its first weights, and wait until it serves."""
        engine.program.start()
        for _ in range(600):
            if await engine.serves(self._direct):
                return
            await asyncio.sleep(0.1)
        self.wrong.append(("no engine", f"{engine.name} does not start"))

    async def _stop(self, engine: EngineProcess, fault: Fault, random: Random) -> None:
        engine.program.send(signal.SIGSTOP)
        fault.hit = self._under_way(engine)
        try:
            await asyncio.sleep(random.uniform(0.3, 4))
        finally:
            engine.program.send(signal.SIGCONT)

    async def _spoil(self, engine: EngineProcess, fault: Fault, trouble: Trouble, random: Random) -> None:
        relay = engine.relay
        assert relay is not None, "only a relay does this"
        await self._is_ready(engine)
        everything = random.random() < 0.3
        before = set(relay.hit)
        relay.trouble, relay.everything = trouble, everything
        try:
            await asyncio.sleep(self._pace * random.uniform(1, 2.5))
            await until(lambda: len(relay.hit) > len(before), 5)
        finally:
            relay.trouble, relay.everything = None, False
            fault.hit = set(relay.hit) - before


def _kinds(engine: EngineProcess, number: int, random: Random) -> Iterator[Kind]:
    kinds: list[Kind] = [_KILLED, _STOPPED]
    if engine.relay is not None:
        half = len(TROUBLES) // 2 * (number % 2)  # two relays begin with other halves
        kinds = [_STOPPED, *TROUBLES[half:], _KILLED, *TROUBLES[:half]]
    while True:
        yield from kinds
        random.shuffle(kinds)


async def pause(over: asyncio.Event, seconds: float) -> None:
    """Sleep, but no longer than until it is ``over``."""
    try:
        async with asyncio.timeout(seconds):
            await over.wait()
    except TimeoutError:
        pass
