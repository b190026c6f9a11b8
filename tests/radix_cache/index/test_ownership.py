"""A token has mask 1 for a session only if that session sampled it or demonstrably continued its context."""

from __future__ import annotations

from functools import partial
from typing import Any

import anyio
import pytest

from radix_cache.claims import AS_IDS, NEXT, PROMPT, STREAMED, ask, assert_owned, in_pieces, trained, until
from radix_cache.scripted import Client

pytestmark = pytest.mark.anyio

#: Tokens that no other answer of these tests has.
MINE, LAST = [5, 6], [7, 8]


async def has_been_asked(client: Client, times: int) -> bool:
    return len(client.engine.asked) >= times


def spelt(client: Client, as_ids: bool, words: list[int]) -> Any:
    """The prompt that goes on with ``words``, as a text or as ids."""
    encode = client.engine.tokenizer.encode
    if as_ids:
        return encode(PROMPT) + words + encode(NEXT)
    return PROMPT + client.engine.tokenizer.decode(words) + NEXT


@AS_IDS
@STREAMED
@pytest.mark.parametrize("calls", [0, 15, 16, 45])
async def test_calls_in_between_do_not_make_anothers_answer_its_own(
    client: Client, calls: int, as_ids: bool, streamed: bool
) -> None:
    words = in_pieces(client, "harbour")
    await ask(client, PROMPT, MINE, "a", streamed=streamed)
    await ask(client, PROMPT, words, "b", streamed=streamed)
    for number in range(calls):
        await ask(client, f"call {number} {PROMPT}", MINE, "a", streamed=streamed)
    prompt = spelt(client, as_ids, words)
    await ask(client, prompt, LAST, "a", streamed=streamed)
    text = PROMPT + "harbour" + NEXT + client.engine.tokenizer.decode(LAST)
    if not as_ids:
        assert client.engine.consumed[-1] == client.engine.tokenizer.encode(prompt)
    await assert_owned(client, "a", text, LAST, never=words)


@pytest.mark.parametrize("continued", [False, True], ids=["unspoken", "spoken"])
async def test_retrieval_marks_no_token_of_another_session(client: Client, continued: bool) -> None:
    words = in_pieces(client, "harbour")
    await ask(client, PROMPT, words, "b")
    if continued:
        await ask(client, PROMPT, MINE, "a")
    await ask(client, "elsewhere", LAST, "a")
    answer = await client.retrieve(PROMPT + "harbour", session_id="a")
    assert trained(answer) == []
    assert not any(answer["rollout_logp"])
    assert (answer["exact"], answer["inexact_reason"]) == (False, "other_session")


async def test_retrieval_of_an_unknown_session_marks_no_token_of_another(client: Client) -> None:
    await ask(client, PROMPT, MINE, "b")
    text = PROMPT + client.engine.tokenizer.decode(MINE)
    answer = await client.retrieve(text, session_id="a")
    assert trained(answer) == []
    assert (answer["exact"], answer["inexact_reason"]) == (False, "other_session")


async def test_messages_retrieval_marks_no_token_of_another_session(client: Client) -> None:
    messages = [{"role": "user", "content": "hello"}]
    prompt = client.engine.tokenizer.apply_chat_template(messages, add_generation_prompt=True)
    await ask(client, prompt, [*MINE, client.engine.eos], "b")
    await ask(client, prompt, LAST, "a")
    messages.append({"role": "assistant", "content": client.engine.tokenizer.decode(MINE)})
    path = "/retrieve_from_messages_template"
    answer = (await client.running.client.post(path, json={"messages": messages, "session_id": "a"})).json()
    assert trained(answer) == []
    assert (answer["exact"], answer["inexact_reason"]) == (False, "other_session")


async def test_an_answer_that_nobody_named_is_no_sessions_own(client: Client) -> None:
    await ask(client, PROMPT, MINE)
    await ask(client, "elsewhere", LAST, "a")
    text = PROMPT + client.engine.tokenizer.decode(MINE)
    answer = await client.retrieve(text, session_id="a")
    assert trained(answer) == []
    assert (answer["exact"], answer["inexact_reason"]) == (False, "other_session")
    assert trained(await client.retrieve(text)) == MINE


@AS_IDS
async def test_a_request_in_flight_counts_as_spoken(client: Client, as_ids: bool) -> None:
    words = in_pieces(client, "harbour")
    await ask(client, PROMPT, words, "b")
    prompt = spelt(client, as_ids, words)
    text = PROMPT + "harbour" + NEXT + client.engine.tokenizer.decode(LAST)
    client.engine.delay = anyio.Event()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(ask, client, PROMPT, MINE, "a")
        await until(partial(has_been_asked, client, 2))
        held, client.engine.delay = client.engine.delay, None
        await ask(client, prompt, LAST, "a")
        if not as_ids:
            assert client.engine.consumed[-1] == client.engine.tokenizer.encode(prompt)
        await assert_owned(client, "a", text, LAST, never=words)
        held.set()
    await assert_owned(client, "a", text, LAST, never=words)


async def test_a_stream_in_flight_counts_as_spoken(client: Client) -> None:
    words = in_pieces(client, "harbour")
    await ask(client, PROMPT, words, "b")
    client.engine.hold, client.engine.hold_after = anyio.Event(), 0
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(lambda: ask(client, PROMPT, MINE, "a", streamed=True))
        await until(partial(has_been_asked, client, 2))
        await ask(client, PROMPT + "harbour" + NEXT, LAST, "a")
        client.engine.hold.set()
    assert client.engine.consumed[-1] == client.engine.tokenizer.encode(PROMPT + "harbour" + NEXT)


@AS_IDS
@STREAMED
async def test_a_contradicted_answer_counts_as_spoken(client: Client, as_ids: bool, streamed: bool) -> None:
    words = in_pieces(client, "harbour")
    await ask(client, PROMPT, words, "b")
    client.engine.meta["prompt_tokens"] = 3
    await ask(client, PROMPT, MINE, "a", streamed=streamed)
    client.engine.meta.clear()
    await ask(client, spelt(client, as_ids, words), LAST, "a")
    text = PROMPT + "harbour" + NEXT + client.engine.tokenizer.decode(LAST)
    await assert_owned(client, "a", text, LAST, never=words)


@AS_IDS
async def test_the_very_same_prompt_counts_as_spoken(client: Client, as_ids: bool) -> None:
    words = in_pieces(client, "harbour")
    prompt = spelt(client, False, words)
    await ask(client, prompt, MINE, "a")
    await ask(client, PROMPT, words, "b")
    await ask(client, prompt, MINE, "b")
    await ask(client, spelt(client, as_ids, words), LAST, "a")
    await assert_owned(client, "a", prompt + client.engine.tokenizer.decode(LAST), LAST, never=words)


async def test_what_a_fork_continued_is_all_that_it_may_take(client: Client) -> None:
    """A session that went on from one answer takes no second answer of the same session, however late."""
    words, other = in_pieces(client, "harbour"), in_pieces(client, "wakes")
    await ask(client, PROMPT, words, "b")
    first = PROMPT + "harbour" + NEXT
    await ask(client, first, MINE, "a")
    await ask(client, first, other, "b")
    for number in range(20):
        await ask(client, f"call {number} {PROMPT}", MINE, "a")
    await ask(client, first + "wakes" + NEXT, LAST, "a")
    text = first + "wakes" + NEXT + client.engine.tokenizer.decode(LAST)
    await assert_owned(client, "a", text, words, LAST, never=sorted({*other} - {*words}))


async def test_a_batch_in_a_session_takes_no_answer_of_another(client: Client) -> None:
    words = in_pieces(client, "harbour")
    await ask(client, PROMPT, MINE, "a")
    await ask(client, PROMPT, words, "b")
    for number in range(16):
        await ask(client, f"call {number} {PROMPT}", MINE, "a")
    text = PROMPT + "harbour" + NEXT
    client.engine.script.append((200, b"[]"))
    body = {"text": [text, "elsewhere"]}
    await client.running.client.post("/generate", json=body, headers={"x-session-id": "a"})
    assert client.engine.asked[-1]["input_ids"][0] == client.engine.tokenizer.encode(text)


async def test_ids_that_end_inside_a_character_count_as_spoken(client: Client) -> None:
    """The text of the whole character does not begin with theirs."""
    first, *rest = client.engine.tokenizer.encode("☔")
    assert rest
    await ask(client, PROMPT, in_pieces(client, "☔ harbour"), "b")
    await ask(client, [*client.engine.tokenizer.encode(PROMPT), first], [*rest, *LAST], "a")
    text = PROMPT + "☔ harbour" + NEXT
    await ask(client, text, LAST, "a")
    answer = await client.retrieve(text + client.engine.tokenizer.decode(LAST), session_id="a")
    assert (answer["exact"], trained(answer)) == (True, LAST)
