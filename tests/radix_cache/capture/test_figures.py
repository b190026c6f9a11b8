"""Each figure of an answer is evidence: where one is wrong, the router calls nothing of the answer exact."""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING, Any

import pytest

from radix_cache.claims import NEXT, PROMPT, STREAMED, ask, session_of
from radix_cache.machine.lies import LIES, NOTHING_LEFT, can_be_told, tell

if TYPE_CHECKING:
    from radix_cache.scripted import Client

pytestmark = pytest.mark.anyio

MINE, LAST = [5, 6, 7], [8, 9]


@STREAMED
@pytest.mark.parametrize("lie", [*(one for one in LIES if one != NOTHING_LEFT), "logprob"])
async def test_an_answer_with_a_wrong_figure_is_not_exact(client: Client, lie: str, streamed: bool) -> None:
    """Nor is what goes on from it as its client does, with the text that it got."""

    def edit(output: dict[str, Any], is_last: bool) -> None:
        if lie == "logprob":
            output["meta_info"]["output_token_logprobs"][-1][0] = 0.5
        else:
            assert not is_last or can_be_told(lie, output, named=True)
            tell(lie, output, Random(1), last=is_last)

    honest, client.engine.edit = client.engine.edit, edit
    await ask(client, PROMPT, MINE, "a", streamed=streamed, rid="mine")
    client.engine.edit = honest
    document = await session_of(client, "a")
    assert not document["complete"]
    reasons = {record["inexact_reason"] for record in document["trajectories"]}
    assert reasons == {"engine_contradicts_itself"}
    text = PROMPT + client.engine.tokenizer.decode(MINE) + NEXT
    await ask(client, text, LAST, "a", rid="last")
    assert client.engine.consumed[-1] == client.engine.tokenizer.encode(text)
    assert not (await session_of(client, "a"))["complete"]
