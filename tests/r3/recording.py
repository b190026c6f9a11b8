"""Routers that have recorded the experts of one long answer, in memory or in a store."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from deadlines import until
from r3.replays import PROMPT, Replay
from r3.telling import telling
from radix_cache.scripted import Client
from slime_engine.model import NgramModel
from slime_r3.recorded_rows import RecordedRows
from slime_radix_cache.index.consumed_turns import consumed_turns
from slime_sglang.token_arrays import TokenArray

if TYPE_CHECKING:
    from routers import Start

__all__ = ["EXPERTS", "SHELVED", "always", "on_disk", "overwrite_blocks", "recorded_by", "recording"]

EXPERTS = "routed_experts"
SHELVED = ("--r3-max-bytes", "1", "--middleware-paths", "radix_cache.shelf")
Rows = npt.NDArray[np.uint8]


def on_disk(path: Path, disk_bytes: int = 2 << 20) -> tuple[str, ...]:
    """Flags of a router whose store has memory for one block only."""
    store = ("--middleware-paths", "slime_tiered_store", "--store-memory-bytes", "4096")
    disk = ("--store-ssd", str(path / "disk"), "--store-ssd-bytes", str(disk_bytes))
    return ("--r3-max-bytes", "1", *store, *disk)


def recorded_by(client: Client | Replay) -> RecordedRows:
    rows: RecordedRows = client.running.router.components.get("token_rows")._rows[EXPERTS]
    return rows


async def always(_: bytes) -> bool:
    """Shelf.holds of a store that has not noticed a loss or a failure."""
    return True


@asynccontextmanager
async def recording(
    start: Start, model: NgramModel, checkpoint: str, tokens: int, row: int, *flags: str
) -> AsyncIterator[tuple[Client, dict[str, Any], Rows]]:
    """A router with one answer of so many ``tokens``, and rows of so many values; the question for them, and the rows.

    The engine's answer has no rows, since so many would take long to make. They are given to the recorder instead.
    """
    async with telling(start, checkpoint, model, "--r3-shape", "4", str(row // 4), *flags) as (client, _):
        text = PROMPT + (await client.generate(PROMPT, [*range(5, 5 + tokens)], session="s"))["text"]
        (turn,) = client.running.router.components.get("session_turns").turns("s")
        turns = consumed_turns((turn.response, len(turn.response)))
        count = turns[-1].start + turns[-1].length - 1
        told: Rows = np.frombuffer(np.random.default_rng(1).bytes(count * row), np.uint8)
        rows = recorded_by(client)
        rows.record(turns, {EXPERTS: TokenArray.of(told)}, 0)
        if "--r3-max-bytes" in flags:
            await until(lambda: not rows.turns.size_bytes)
        yield client, {"text": text, "session_id": "s", "return_routed_experts": True}, told


def overwrite_blocks(path: Path) -> None:
    """Overwrite all that the disk of ``on_disk(path)`` has; the file never becomes shorter."""
    with (path / "disk" / "blocks").open("r+b") as blocks:
        blocks.write(bytes((path / "disk" / "blocks").stat().st_size))
