"""Records a frame of ``slime-router top``: ``python -m docs.record_top`` writes docs/images/top.svg.

A router with three embedded engines has conversations for twelve seconds; a fourth worker is not up.
"""

from __future__ import annotations

import io
import time
from pathlib import Path

import anyio
from rich.console import Console

from docs.record_demo import SVG_FORMAT
from slime_radix_cache.client import AsyncClient
from slime_testing import started
from slime_top.figures import History
from slime_top.scrape import RouterClient
from slime_top.screen import frame

_PICTURE = Path(__file__).parent / "images" / "top.svg"
_COLUMNS = 100
_ROUTER = (
    "--plugin", "engine", "--engine-workers", "3", "--engine-tokens-per-second", "60", "--engine-weight-version", "12",
    "--plugin", "radix_cache", "--max-concurrent-requests", "16", "--worker-urls", "http://127.0.0.1:30009",
)  # fmt: skip


async def _converse(url: str, number: int) -> None:
    """Have conversations of four turns, one after the other, without end; retrieve each."""
    async with AsyncClient(url) as client:
        while True:
            text, session = f"Tell me of the number {number}. ", f"{number}.{time.monotonic()}"
            for _ in range(4):
                answer = await client.generate(text, {"max_new_tokens": 32}, session=session)
                text += f"{answer['text']} More. "
            await client.retrieve(text.removesuffix(" More. "), session=session)


def _frame(url: str) -> None:
    history = History()
    with RouterClient(url, None) as client:
        for _ in range(6):
            history.add(client.scrape())
            time.sleep(2)
    console = Console(record=True, width=_COLUMNS, file=io.StringIO(), force_terminal=True)
    console.print(frame(history.figures(time.time()), url))
    _PICTURE.write_text(console.export_svg(title="slime-router top", code_format=SVG_FORMAT, unique_id="top"))


async def _record() -> None:
    async with started(*_ROUTER) as running, anyio.create_task_group() as tasks:
        for number in range(20):
            tasks.start_soon(_converse, running.url, number)
        await anyio.to_thread.run_sync(_frame, running.url)
        tasks.cancel_scope.cancel()


def main() -> None:
    """Run the router and the conversations, and write the picture."""
    anyio.run(_record)


if __name__ == "__main__":
    main()
