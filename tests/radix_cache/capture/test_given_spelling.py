"""Ids that one client gave are not sent for another client's text, and lead to no text that nobody sent."""

from __future__ import annotations

import unicodedata
from typing import TYPE_CHECKING

import pytest

from radix_cache.claims import NEXT, PROMPT, STREAMED, ask, trained
from radix_cache.scripted import Client, ScriptedEngine, routed
from radix_cache.tokens.vocabularies import VOCABULARIES
from slime_engine.tokenizer import EngineTokenizer

if TYPE_CHECKING:
    from pathlib import Path

    from routers import Start

pytestmark = pytest.mark.anyio

MINE, LAST = [5, 6], [7, 8]


def odd(tokenizer: EngineTokenizer, kind: str) -> list[int]:
    """Ids of a prompt that the tokenizer would spell in another way."""
    if kind == "special token in plain tokens":
        return [token for letter in PROMPT for token in tokenizer.encode(letter)]
    if kind == "words in letters":
        begin, end = PROMPT.split("hello")
        letters = [token for letter in "hello" for token in tokenizer.encode(letter)]
        return tokenizer.encode(begin) + letters + tokenizer.encode(end)
    half = tokenizer.token_bytes.index("☔".encode()[:1])
    return [*tokenizer.encode("the rain "), half]


KINDS = pytest.mark.parametrize(
    "kind", ["special token in plain tokens", "words in letters", "half a character"]
)
SESSIONS = pytest.mark.parametrize(
    ("giver", "asker"), [("a", "b"), ("a", ""), ("", "b"), ("", "")], ids=["ab", "a-", "-b", "--"]
)


@KINDS
@SESSIONS
@STREAMED
async def test_odd_ids_are_not_sent_for_anothers_text(
    client: Client, kind: str, giver: str, asker: str, streamed: bool
) -> None:
    tokenizer = client.engine.tokenizer
    given = odd(tokenizer, kind)
    text = tokenizer.decode(given)
    assert tokenizer.encode(text) != given
    await ask(client, given, MINE, giver)
    await ask(client, text, LAST, asker, streamed=streamed)
    assert client.engine.consumed[-1] == tokenizer.encode(text)
    answer = await client.retrieve(text + tokenizer.decode(LAST), **({"session_id": asker} if asker else {}))
    assert answer["exact"]
    assert answer["tokens"] == tokenizer.encode(text) + LAST


@KINDS
@SESSIONS
async def test_odd_ids_before_an_answer_are_not_sent_for_anothers_text(
    client: Client, kind: str, giver: str, asker: str
) -> None:
    tokenizer = client.engine.tokenizer
    given = odd(tokenizer, kind)
    await ask(client, given, MINE, giver)
    text = tokenizer.decode(given) + tokenizer.decode(MINE) + NEXT
    await ask(client, text, LAST, asker)
    assert client.engine.consumed[-1] == tokenizer.encode(text)


@KINDS
async def test_odd_ids_are_kept_for_the_text_of_their_own_session(client: Client, kind: str) -> None:
    tokenizer = client.engine.tokenizer
    given = odd(tokenizer, kind)
    await ask(client, given, MINE, "a")
    text = tokenizer.decode(given) + tokenizer.decode(MINE) + NEXT
    await ask(client, text, LAST, "a")
    assert client.engine.consumed[-1] == given + MINE + tokenizer.encode(NEXT)
    answer = await client.retrieve(text + tokenizer.decode(LAST), session_id="a")
    assert (answer["exact"], trained(answer)) == (True, MINE + LAST)


@KINDS
@pytest.mark.parametrize("rest", [[], [9, 10]], ids=["all of them", "their beginning"])
async def test_odd_ids_given_by_another_session_serve_the_text_of_both(
    client: Client, kind: str, rest: list[int]
) -> None:
    tokenizer = client.engine.tokenizer
    first = odd(tokenizer, kind)
    given = [*first, *rest]
    await ask(client, first, MINE, "a")
    await ask(client, given, MINE, "b")
    for session in "ab" if not rest else "b":
        await ask(client, tokenizer.decode(given), LAST, session)
        assert client.engine.consumed[-1] == given
    await ask(client, tokenizer.decode(given), LAST, "c")
    assert client.engine.consumed[-1] != given


@pytest.mark.parametrize("asker", ["b", ""], ids=["another", "nobody"])
async def test_ids_are_sent_for_a_text_that_the_tokenizer_spells_so(client: Client, asker: str) -> None:
    tokenizer = client.engine.tokenizer
    given = tokenizer.encode(PROMPT)
    await ask(client, given, MINE, "a")
    await ask(client, PROMPT + tokenizer.decode(MINE) + NEXT, LAST, asker)
    assert client.engine.consumed[-1] == given + MINE + tokenizer.encode(NEXT)


async def test_odd_ids_behind_an_answer_are_not_sent_for_anothers_text(client: Client) -> None:
    tokenizer = client.engine.tokenizer
    begin = tokenizer.encode(PROMPT) + MINE
    middle = [token for letter in NEXT for token in tokenizer.encode(letter)]
    await ask(client, PROMPT, MINE, "a")
    await ask(client, begin + middle, LAST, "a")
    text = tokenizer.decode(begin + middle + LAST) + "more"
    await ask(client, text, MINE, "b")
    assert client.engine.consumed[-1] == begin + tokenizer.encode(text[len(tokenizer.decode(begin)) :])


@SESSIONS
async def test_ids_given_in_two_steps_are_not_sent_for_anothers_text(
    client: Client, giver: str, asker: str
) -> None:
    """The tokenizer spells each step so, and what they say together in another way."""
    encode = client.engine.tokenizer.encode
    first, second = encode("ha"), encode("rbour")
    assert first + second != encode("harbour")
    await ask(client, first, MINE, giver)
    await ask(client, first + second, MINE, giver)
    await ask(client, "harbour", LAST, asker)
    assert client.engine.consumed[-1] == encode("harbour")


async def test_a_prompt_of_equal_length_is_not_taken_for_another(client: Client) -> None:
    """Both read twelve characters behind the prompt: the answer without the special token, and that token itself."""
    tokenizer = client.engine.tokenizer
    (special,) = tokenizer.encode("<|im_start|>")
    await ask(client, PROMPT, [special, *tokenizer.encode("hello world!")], "s")
    await ask(client, [*tokenizer.encode(PROMPT), special], MINE, "s")
    said = tokenizer.decode(MINE)
    never = await client.retrieve(f"{PROMPT}hello world!{said}", session_id="s")
    assert (never["exact"], never["inexact_reason"]) == (False, "uncovered_text")
    answer = await client.retrieve(f"{PROMPT}<|im_start|>{said}", session_id="s")
    assert (answer["exact"], answer["tokens"]) == (True, [*tokenizer.encode(PROMPT), special, *MINE])
    (record,) = (await client.running.client.get("/trajectories/s")).json()["trajectories"]
    assert record["text"] == f"{PROMPT}<|im_start|>{said}"
    text = f"{PROMPT}hello world!{said}{NEXT}"
    await ask(client, text, LAST, "t")
    assert client.engine.consumed[-1][-len(tokenizer.encode(said + NEXT)) :] == tokenizer.encode(said + NEXT)


async def test_a_normalised_prompt_of_equal_length_is_not_taken_for_another(
    start: Start, tmp_path: Path
) -> None:
    """NFC takes one character of this prompt apart and puts three together: as many bytes, another text."""
    (vocabulary,) = (one for one in VOCABULARIES if one.name == "qwen")
    tokenizer, checkpoint = vocabulary.make(tmp_path)
    engine = ScriptedEngine(EngineTokenizer(tokenizer.backend_tokenizer))
    written = "\u0958 e\u0301e\u0301e\u0301 "
    read = unicodedata.normalize("NFC", written)
    assert read != written
    assert len(read.encode()) == len(written.encode())
    async with routed(start, engine, checkpoint) as client:
        await ask(client, written, [300], "s")
        given = engine.consumed[-1]
        assert engine.tokenizer.decode(given) == read
        await ask(client, given, [301, 302], "s")
        said = engine.tokenizer.decode([301, 302])
        answer = await client.retrieve(read + said, session_id="s")
        assert (answer["exact"], trained(answer)) == (True, [301, 302])
        never = await client.retrieve(written + said, session_id="s")
        assert (never["exact"], never["inexact_reason"]) == (False, "uncovered_text")


async def test_a_given_prompt_that_the_tokenizer_spells_so_is_read_by_all(client: Client) -> None:
    await ask(client, client.engine.tokenizer.encode(PROMPT), MINE, "b")
    answer = await client.retrieve(PROMPT, session_id="s")
    assert (answer["exact"], answer["tokens"]) == (True, client.engine.tokenizer.encode(PROMPT))
    answer = await client.retrieve(PROMPT + client.engine.tokenizer.decode(MINE), session_id="s")
    assert (answer["inexact_reason"], sum(answer["loss_mask"])) == ("other_session", 0)
