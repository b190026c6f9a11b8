"""Rollout code that knows what the engine consumed and sampled, for tests with a store in each tier."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import anyio
import httpx

from deadlines import HANG_S
from radix_cache.scripted import ScriptedEngine, bits
from store_flags import tier_flags

__all__ = ["PROMPT", "SMALL", "JournalledRollout", "flags_of", "roll"]

PROMPT = "<|im_start|>user\nWhy?<|im_end|>\n<|im_start|>assistant\n"


class JournalledRollout:
    """Rollout code: it remembers its texts, and what the engine's journal says of each answer."""

    def __init__(self, http: httpx.AsyncClient, engine: ScriptedEngine) -> None:
        self.http = http
        self.engine = engine
        self.texts: dict[str, str] = {}
        self.journal: dict[str, list[tuple[list[int], list[int], bytes]]] = {}

    async def turn(self, session: str, ids: list[int]) -> None:
        """One turn of ``session``, in which the engine samples ``ids``."""
        text = self.texts.get(session, "") + PROMPT
        self.engine.script.append(ids)
        body = {"text": text, "session_id": session}
        reply = await self.http.post("/generate", json=body)
        assert reply.status_code == 200, reply.text
        consumed, (sampled, logprobs) = self.engine.consumed[-1], self.engine.sampled[-1]
        turns = self.journal.setdefault(session, [])
        before, mask, known = turns[-1] if turns else ([], [], b"")
        assert consumed[: len(before)] == before, "the engine consumed what it had sampled"
        rest = len(consumed) - len(before)
        turns.append(
            (
                consumed + sampled,
                mask + [0] * rest + [1] * len(sampled),
                known + bits([0.0] * rest + logprobs),
            )
        )
        self.texts[session] = text + reply.json()["text"]

    async def shown(self, session: str) -> dict[str, Any]:
        """``/trajectories`` of a session; a session that is not known is not complete."""
        reply = await self.http.get(f"/trajectories/{session}")
        if reply.status_code == 404:
            return {"complete": False, "trajectories": []}
        assert reply.status_code == 200, reply.text
        document: dict[str, Any] = reply.json()
        return document

    async def check(self, session: str) -> bool:
        """Compare all that the router says of ``session`` with the journal; returns ``complete``."""
        turns, shown = self.journal[session], await self.shown(session)
        for leaf in shown["trajectories"]:
            found = leaf["tokens"], leaf["loss_mask"], bits(leaf["rollout_logp"])
            assert found in turns
            assert leaf["exact"]
        if shown["complete"]:
            (leaf,) = shown["trajectories"]
            assert leaf["tokens"] == turns[-1][0]
            body = {"text": self.texts[session], "session_id": session}
            found = (await self.http.post("/retrieve_from_text", json=body)).json()
            assert (found["tokens"], found["loss_mask"], bits(found["rollout_logp"])) == turns[-1]
            assert found["exact"]
        return bool(shown["complete"])

    async def idle(self) -> None:
        """Wait until nothing is over the limits."""
        with anyio.fail_after(HANG_S):
            while (await self.http.get("/cache_stats")).json()["tokens"] > 60:  # noqa: ASYNC110  # over HTTP
                await anyio.sleep(0.01)
            await anyio.sleep(0.1)  # the note that the last session is settled follows


#: A router that has room for 60 tokens in memory.
SMALL = ("--plugin", "radix_cache", "--plugin", "tiered_store", "--radix-tree-max-size", "60")


def flags_of(tier: str, path: Path) -> tuple[str, ...]:
    """The flags of a store in ``path``."""
    return (*SMALL, "--store-memory-bytes", "40960", *tier_flags(tier, path))


async def roll(rollout: JournalledRollout) -> None:
    """Four sessions of three turns, which are demoted; and one that is in memory only."""
    for turn in range(3):
        for number in range(4):
            await rollout.turn(f"s{number}", [70 + number, 80 + turn, *range(90, 90 + 5 * number)])
    await rollout.turn("late", [75, 76])
    await rollout.idle()
