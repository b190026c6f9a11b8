"""Updates in pieces while everything else happens: nobody is answered by an engine with a hole in its weights."""

from __future__ import annotations

import os
import random
from typing import Any

import anyio
import httpx
import pytest
from anyio.abc import TaskGroup

from control.weights.slotted import SLOTS, Slotted, up
from deadlines import HANG_S
from own_time import OWN_TIME_UVLOOP, Backend
from plugged import routing, until
from slime_control import Control
from slime_control import Settings as ControlSettings
from slime_health import Health, Settings
from slime_testing import Running

pytestmark = pytest.mark.anyio

PIECE = "/update_weights_from_distributed"
ROUNDS = 8
#: More of them, for a night: the n-th run begins with this seed.
FIRST_SEED = int(os.environ.get("SLIME_ROUTER_FUZZ_SEED", "0"))
RUNS = int(os.environ.get("SLIME_ROUTER_FUZZ_RUNS", "1"))


@pytest.fixture
def anyio_backend() -> Backend:
    """As it serves."""
    return OWN_TIME_UVLOOP


class Trouble:
    """A trainer that goes on when some fail, and gives up when all do; engines to which everything happens; clients
    that want answers.
    """

    def __init__(
        self, seed: int, naming: str, running: Running, tasks: TaskGroup, engines: list[Slotted]
    ) -> None:
        self.random = random.Random(seed)
        self.naming = naming
        self.running = running
        self.tasks = tasks
        self.engines = engines
        self.out: list[Slotted] = []  # not registered
        self.story: list[str] = []
        self.answers = 0
        self.wrong: list[str] = []
        self.updating = False

    async def call(self, path: str, **body: Any) -> int:
        status = (await self.running.client.post(path, json=body)).status_code
        self.story.append(f"{path} {body} -> {status}")
        return status

    async def ask(self) -> None:
        """Clients ask all the time; without a pause, what is answered during an update is the trainer's wish."""
        async with httpx.AsyncClient(base_url=self.running.url, trust_env=False, timeout=20) as client:
            while True:
                asked_in_peace = not self.updating
                answer = await client.post("/generate", json={"text": "x"})
                if answer.status_code == 200 and (self.naming != "unpaused" or asked_in_peace):
                    self._judge(answer.json(), in_peace=asked_in_peace and not self.updating)
                await anyio.sleep(0.002)

    def _judge(self, told: dict[str, Any], *, in_peace: bool) -> None:
        self.answers += 1
        slots, version = set(told["slots"]), told["version"]
        if len(slots) > 1 and (in_peace or self.naming != "unpaused"):
            self.wrong.append(f"a hole: {told}")
        elif self.naming == "each" and version not in ("default", str(*slots)):
            self.wrong.append(f"another label: {told}")

    async def live(self) -> None:
        for round in range(1, ROUNDS + 1):
            await self.update(round)
            self.updating = False
            await anyio.sleep(self.random.random() * 0.1)
            for engine in self.engines:
                if not engine.is_up and engine not in self.out and self.random.random() < 0.6:
                    await self.tasks.start(engine.serve)
                    self.story.append(f"{engine.url} is up")

    async def end_well(self) -> None:
        """One more update, to which nothing happens: all are in use again."""
        await self.register(self.engines[0])
        for engine in self.engines:
            engine.next_up = ""
            if not engine.is_up:
                await self.tasks.start(engine.serve)
        pool = self.running.router.pool
        await until(lambda: not any(worker.state == "quarantined" for worker in pool))
        for round in range(ROUNDS + 1, ROUNDS + 6):
            statuses = [await self.call("/pause_generation")]
            for slot in range(SLOTS):
                statuses.append(await self.call(PIECE, slot=slot, round=round, weight_version=str(round)))
            statuses.append(await self.call("/continue_generation"))
            if set(statuses) == {200}:
                break  # else the machine is busy, and the deadlines are short
        self.updating = False
        await until(lambda: all(worker.state == "ready" for worker in pool))
        assert [engine.slots for engine in self.engines] == [[round] * SLOTS] * len(self.engines)
        assert self.running.router.weights.current == str(round)

    async def update(self, round: int) -> None:
        version = str(round)
        self.updating = True
        if self.naming != "unpaused" and await self.call("/pause_generation") >= 400:
            return  # a trainer does not update what goes on generating
        if self.naming == "session":
            await self.call("/begin_weight_update")
        if self.random.random() < 0.1:
            await self.call("/update_weights_from_disk", round=round, weight_version=version)
        else:
            for slot in range(SLOTS):
                await self.happen()
                last = slot == SLOTS - 1
                named = self.naming in ("each", "unpaused", "session") or (self.naming == "last" and last)
                body = {"slot": slot, "round": round, **({"weight_version": version} if named else {})}
                done = await self.call(PIECE, **body)
                if done >= 400 and self.random.random() < 0.5:
                    done = await self.call(PIECE, **body)
                if done >= 400:
                    break  # as trainers do that look at statuses
            if self.naming == "behind":
                await self.happen()
                await self.call("/update_weight_version", new_version=version)
        if self.naming == "session":
            await self.call("/end_weight_update")
        if self.naming != "unpaused":
            await self.call("/continue_generation")

    async def happen(self) -> None:
        """Something, between two pieces."""
        happens = self.random.choice(
            [self.nothing] * 6 + [self.fail] * 4 + [self.die, self.register, self.leave, self.register_again]
        )
        engine = self.random.choice(self.engines)
        self.story.append(f"{happens.__name__} {engine.url}")
        await happens(engine)

    async def nothing(self, _: Slotted) -> None:
        pass

    async def fail(self, engine: Slotted) -> None:
        engine.next_up = self.random.choice(["fail before", "fail after", "late", "refuse"])

    async def die(self, engine: Slotted) -> None:
        """One that comes back before anybody noticed is the one thing that is not seen: it stays away for a while."""
        if engine.is_up:
            await engine.kill()
            await anyio.sleep(0.3)
            if self.random.random() < 0.5:
                await self.tasks.start(engine.serve)

    async def leave(self, engine: Slotted) -> None:
        if engine not in self.out and len(self.out) + 1 < len(self.engines):
            await self.running.client.post("/remove_worker", json={"url": engine.url})
            self.out.append(engine)
            if engine.is_up:
                await engine.kill()

    async def register(self, _: Slotted) -> None:
        for engine in self.out:
            await self.tasks.start(engine.serve)
            await self.running.client.post("/workers", json={"url": engine.url})
        self.out.clear()

    async def register_again(self, engine: Slotted) -> None:
        """Register ``engine`` again, which declares its weights right; one with missing pieces is restarted first."""
        if engine not in self.out:
            if engine.is_up and (self.random.random() < 0.5 or not engine.is_whole):
                await engine.kill()
                await self.tasks.start(engine.serve)
            await self.running.client.post("/workers", json={"url": engine.url})


@pytest.mark.parametrize("naming", ["each", "last", "behind", "never", "session", "unpaused"])
async def test_no_answer_comes_from_weights_with_a_missing_piece(
    naming: str,
) -> None:
    for seed in range(FIRST_SEED, FIRST_SEED + RUNS):
        engines = [Slotted() for _ in range(3)]
        for engine in engines:
            engine.lateness_s = 0.25
        health = Health(Settings(interval_s=0.03, timeout_s=0.5, failure_threshold=2, success_threshold=1))
        control = Control(ControlSettings(0.2, 10.0))
        async with up(*engines) as tasks, routing({"health": health, "control": control}) as running:
            for engine in engines:
                await running.router.add_worker(engine.url)
            trouble = Trouble(seed, naming, running, tasks, engines)
            async with anyio.create_task_group() as clients:
                for _ in range(3):
                    clients.start_soon(trouble.ask)
                with anyio.fail_after(HANG_S):
                    await trouble.live()
                    await trouble.end_well()
                clients.cancel_scope.cancel()
            assert trouble.wrong == [], "\n".join([f"seed {seed}", *trouble.story, *trouble.wrong[:5]])
            assert trouble.answers > 10
