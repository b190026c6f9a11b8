"""Workers of the routers that launch lines start."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

import pytest

from slime_http.serving import serving
from slime_testing import FakeEngine


@pytest.fixture
async def workers() -> AsyncIterator[dict[str, str]]:
    """The addresses of the published lines, and the address of an engine that echoes the text for each of them."""
    names = [
        f"http://{kind}{number}:800{kind == 'decode':d}"
        for kind in ("prefill", "decode")
        for number in (1, 2)
    ]
    engine = FakeEngine()
    engine.rest = lambda body: {"text": body["text"], "meta_info": {}}
    async with AsyncExitStack() as stack:
        one, two, *pairs = [await stack.enter_async_context(serving(engine.app)) for _ in range(6)]
        yield {
            "http://worker1:8000": one,
            "http://worker2:8001": two,
            "http://worker2:8000": two,
            **dict(zip(names, pairs, strict=True)),
        }
