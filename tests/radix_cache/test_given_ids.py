"""Ids that the router gave away itself, sent back to it: what was sampled stays sampled."""

from __future__ import annotations

import pytest

from radix_cache.scripted import Client, ScriptedEngine, bits

pytestmark = pytest.mark.anyio

PROMPT = "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
NEXT = "<|im_end|>\n<|im_start|>user\nand?<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize("where", [0, 1, 3], ids=["first", "inside", "last"])
@pytest.mark.parametrize("sessions", ["ss", "sf", "s-", "--"], ids=["own", "fork", "nobody", "without"])
async def test_given_ids_keep_the_mask_of_what_a_text_does_not_show(
    client: Client, engine: ScriptedEngine, where: int, sessions: str
) -> None:
    names = [name if name != "-" else "" for name in sessions]
    (start,) = engine.tokenizer.encode("<|im_start|>")
    first = [5, 6, 7]
    first.insert(where, start)
    text = PROMPT + (await client.generate(PROMPT, [*first, engine.eos], names[0]))["text"] + NEXT
    text += (await client.generate(text, [8, 9, 10, engine.eos], names[0]))["text"]
    known = await client.retrieve(text, session_id=names[0])
    assert known["exact"]
    given = known["tokens"] + engine.tokenizer.encode("\n<|im_start|>user\n3<|im_end|>\n")
    engine.script.append([11, 12])
    body = {"input_ids": given, "session_id": names[1]}
    answer = (await client.running.client.post("/generate", json=body)).json()
    whole = engine.tokenizer.decode(given) + answer["text"]
    got = await client.retrieve(whole, session_id=names[1])
    assert (got["exact"], got["tokens"]) == (True, [*given, 11, 12])
    size = len(known["tokens"])
    assert got["loss_mask"][:size] == known["loss_mask"]
    assert bits(got["rollout_logp"][:size]) == bits(known["rollout_logp"])
