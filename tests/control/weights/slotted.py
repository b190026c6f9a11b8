"""Engines whose weights a test can see: they have slots, and each piece of an update fills one of them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anyio
import orjson
from anyio.abc import TaskGroup, TaskStatus

from slime_http.serving import serving
from slime_testing import Call, FakeEngine

__all__ = ["SLOTS", "Slotted", "up"]

SLOTS = 3


class Slotted(FakeEngine):
    """A fake engine at one URL, whose process may be replaced (:meth:`restart`).

    A piece is ``{"slot": 1, "round": 8}``: that slot has the weights of round 8 then. What it generates says what was
    in the slots, and ``version``, which is what it was told; one that is paused says nothing. Before the next update
    it does ``next_up``: ``refuse`` it (as no such request), ``fail`` it (done or not), answer it ``late``, or do it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.answers["/health"] = 200, b""
        self.rest = self._generated
        self.other = self._answer
        self.url = ""
        self.next_up = ""
        self.lateness_s = 0.0
        self.got: list[str] = []
        self._boots = 0
        self._scope: anyio.CancelScope | None = None
        self._ended = anyio.Event()
        self.restart()

    def restart(self) -> None:
        """Another process, with the weights of the beginning."""
        self._boots += 1
        self.slots = [0] * SLOTS
        self.version = "default"
        self.paused = False
        self._lock = anyio.Lock()

    @property
    def is_up(self) -> bool:
        return self._scope is not None

    @property
    def is_whole(self) -> bool:
        """It has the weights of one round."""
        return len(set(self.slots)) == 1

    async def serve(self, *, task_status: TaskStatus[None]) -> None:
        """Until :meth:`kill`; each time at the same URL."""
        port = int(self.url.rpartition(":")[2]) if self.url else 0
        self._ended = anyio.Event()
        with anyio.CancelScope() as self._scope:
            async with serving(self.app, port=port, grace_s=0.02) as self.url:
                task_status.started()
                await anyio.sleep_forever()
        self._ended.set()

    async def kill(self) -> None:
        """End the process."""
        assert self._scope is not None
        self._scope.cancel()
        self._scope = None
        self.restart()
        await self._ended.wait()

    def _generated(self, _: dict[str, Any]) -> tuple[int, bytes]:
        if self.paused:
            return 503, b""
        return 200, orjson.dumps({"slots": self.slots, "version": self.version, "url": self.url})

    async def _answer(self, call: Call) -> tuple[int, bytes]:
        if call.path == "/model_info":
            return 200, orjson.dumps({"weight_version": self.version})
        if call.method != "POST":
            return 405, b""
        body, path, boot = call.body, call.path, self._boots
        self.got.append(path)
        given = orjson.loads(body) if body else {}
        if path in ("/pause_generation", "/continue_generation"):
            self.paused = path == "/pause_generation"
            return 200, b'{"status":"ok"}'
        up = ""
        if path.startswith(("/update_weights_from", "/post_process")):
            up, self.next_up = self.next_up, ""
        if up == "refuse":
            return 400, b'{"error":{"message":"no such request"}}'
        async with self._lock:  # one after another, as they came
            if up == "late":
                await anyio.sleep(self.lateness_s)
            if boot != self._boots:
                return 500, b""  # to whom? the process is gone
            if up != "fail before":
                self._take(path, given)
        done = not up.startswith("fail")
        return 200 if done else 400, orjson.dumps({"success": done, "message": up})

    def _take(self, path: str, given: dict[str, Any]) -> None:
        if path == "/update_weights_from_disk":
            self.slots = [given["round"]] * SLOTS
        elif path.startswith("/update_weights_from"):
            self.slots[given["slot"]] = given["round"]
        self.version = given.get("weight_version", given.get("new_version", self.version))


@asynccontextmanager
async def up(*engines: Slotted) -> AsyncIterator[TaskGroup]:
    """``engines`` serve."""
    async with anyio.create_task_group() as tasks:
        for engine in engines:
            await tasks.start(engine.serve)
        try:
            yield tasks
        finally:
            tasks.cancel_scope.cancel()
