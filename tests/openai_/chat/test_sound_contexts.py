"""Verdicts on answers of a chat: each depends on all turns before it, however long ago they were recorded."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from openai_.chat.remembered import ASK, said, user
from openai_.chat.scripted import scripted

if TYPE_CHECKING:
    from routers import Start

pytestmark = pytest.mark.anyio

#: "Hi", in the embedded engine's tokens.
HI = [39, 72]


@pytest.mark.parametrize(
    ("flaw", "reason"),
    [(None, None), ("no logprobs", "no_logprobs"), ("unknown field", "unknown_field:odd")],
    ids=str,
)
@pytest.mark.parametrize("flawed", range(3))
async def test_flaw_of_one_turn_makes_it_and_later_turns_inexact(
    start: Start, flaw: str | None, reason: str | None, flawed: int
) -> None:
    flags = ("--unknown-parameters", "pass")
    async with scripted(start, HI, HI, HI, flags=flags) as (running, engine):
        messages = [user("a")]
        told = []
        for turn in range(3):
            engine.meta = {"output_token_logprobs": None} if turn == flawed and flaw == "no logprobs" else {}
            body: dict[str, Any] = {"messages": messages, "session_id": "s", **ASK}
            if turn == flawed and flaw == "unknown field":
                body["odd"] = True
            document = (await running.client.post("/v1/chat/completions", json=body)).json()
            assert document["history"] == ("exact" if turn else "fresh")
            told.append(document["choices"][0]["inexact_reason"])
            messages += [said(document), user("b")]
    assert told == [None] * flawed + [reason] * (3 - flawed)
