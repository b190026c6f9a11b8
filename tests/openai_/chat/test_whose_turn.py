"""A session goes on from its own turns, or from where another one was before it spoke there itself."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import anyio
import pytest

from openai_.chat.chatting import Chat, chatting
from openai_.chat.remembered import ASK, is_continued, said, user
from openai_.chat_models.families import QWEN2_5
from slime_openai.prompts.speakers import Speakers

if TYPE_CHECKING:
    from routers import Start

pytestmark = pytest.mark.anyio


async def prompted(chat: Chat, *messages: Any, session: str | None, **more: Any) -> Any:
    headers = {} if session is None else {"X-Session-Id": session}
    answer = await chat.running.client.post(
        "/v1/chat/completions", json={"messages": list(messages), **ASK, **more}, headers=headers
    )
    assert answer.status_code == 200, answer.text
    return answer.json()


async def drawn(chat: Chat, wanted: str, *messages: Any, session: str) -> tuple[str, Any]:
    """The answer ``wanted``, and the session that drew it: the first of many whose names begin with ``session``."""
    for number in range(100):
        name = f"{session}{number}"
        document = await prompted(chat, *messages, session=name)
        if document["choices"][0]["message"]["content"] == wanted:
            return name, document
    raise AssertionError(f"nobody drew {wanted}")


async def is_unknown(chat: Chat, session: str) -> bool:
    return (await chat.running.client.get(f"/trajectories/{session}")).status_code == 404


async def test_words_of_a_client_are_not_another_sessions_answer(start: Start) -> None:
    """However many other calls the session has made meanwhile."""
    async with chatting(start, ("Yes.", "No."), "More.", family=QWEN2_5) as chat:
        mine, _ = await drawn(chat, "Yes.", user("a"), session="A")
        _, other = await drawn(chat, "No.", user("a"), session="B")
        for number in range(40):
            await prompted(chat, user(f"else {number}"), session=mine)
        third = await prompted(chat, user("a"), said(other), user("b"), session=mine)
        assert third["history"] == "fresh"


async def test_a_request_in_flight_has_spoken(start: Start) -> None:
    async with chatting(start, "w " * 40, "More.", family=QWEN2_5, tokens_per_second=60) as chat:
        other = await prompted(chat, user("a"), session="B")
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(lambda: prompted(chat, user("a"), session="A"))
            while len(chat.entries) < 2:  # noqa: ASYNC110  # the engine's own journal
                await anyio.sleep(0.01)
            third = await prompted(chat, user("a"), said(other), user("b"), session="A")
            assert third["history"] == "fresh"
            assert chat.entries[1].finish_reason is None, "it was still in flight"


async def test_a_request_that_no_engine_answered_has_spoken(start: Start) -> None:
    """Its session asked there first: what comes behind is its client's text, whoever said the like."""
    async with chatting(start, "No.", "More.", family=QWEN2_5) as chat:
        other = await prompted(chat, user("a"), session="B")
        refused = await chat.running.client.post(
            "/v1/chat/completions",
            json={"messages": [user("a")], "max_tokens": 10**8, "session_id": "A"},
        )
        assert refused.status_code == 400
        third = await prompted(chat, user("a"), said(other), user("b"), session="A")
        assert third["history"] == "fresh"


async def test_a_session_goes_on_in_the_context_that_it_forked(start: Start) -> None:
    """The turns of another one that its own went on from are its context, also where it edits its own answer."""
    async with chatting(start, "Root.", "Mine.", "More.", family=QWEN2_5) as chat:
        root = await prompted(chat, user("a"), session="main")
        mine = await prompted(chat, user("a"), said(root), user("b"), session="sub")
        assert is_continued(mine, root)
        edited = {"role": "assistant", "content": "Edited."}
        third = await prompted(chat, user("a"), said(root), user("b"), edited, user("c"), session="sub")
        assert third["history"] == "template"
        known = root["prompt_token_ids"] + root["choices"][0]["token_ids"]
        assert third["prompt_token_ids"][: len(known)] == known


async def test_a_session_that_spoke_after_a_fork_takes_only_that_context(start: Start) -> None:
    """Another session's answer to the session's own question is not its own, though it forked before that."""
    async with chatting(start, "Root.", ("Mine.", "Theirs."), "More.", family=QWEN2_5) as chat:
        root = await prompted(chat, user("a"), session="main")
        forked = [user("a"), said(root), user("b")]
        mine, _ = await drawn(chat, "Mine.", *forked, session="sub")
        _, theirs = await drawn(chat, "Theirs.", *forked, session="other")
        third = await prompted(chat, *forked, said(theirs), user("c"), session=mine)
        assert third["history"] == "template"
        known = root["prompt_token_ids"] + root["choices"][0]["token_ids"]
        assert third["prompt_token_ids"][: len(known)] == known


async def test_several_forks_at_once_have_the_same_context(start: Start) -> None:
    async with chatting(start, "Root.", "More.", family=QWEN2_5) as chat:
        root = await prompted(chat, user("a"), session="main")
        answers: list[Any] = []

        async def fork() -> None:
            answers.append(await prompted(chat, user("a"), said(root), user("b"), session="sub"))

        async with anyio.create_task_group() as tasks:
            for _ in range(6):
                tasks.start_soon(fork)
        assert all(is_continued(answer, root) for answer in answers)


def test_a_request_counts_before_it_is_known_what_it_goes_on_from() -> None:
    speakers: Speakers[str] = Speakers()
    decided = speakers.deciding("s", b"a")
    assert speakers.contexts("s", [b"a", b"ab", b"abc"], b"abc") == []
    assert speakers.contexts("s", [b"a"], b"a") is None, "the like of it is decided as it will be"
    assert speakers.contexts("other", [b"a", b"ab", b"abc"], b"abc") is None
    decided()
    assert speakers.contexts("s", [b"a", b"ab", b"abc"], b"abc") is None
    speakers.add("s", b"a", "context")
    speakers.add("s", b"a", "context")
    speakers.remove("s", b"a", "context")
    assert speakers.contexts("s", [b"a", b"ab", b"abc"], b"abc") == ["context"]
    speakers.remove("s", b"a", "context")
    assert speakers.contexts("s", [b"a"], b"a") is None


async def test_the_sessions_header_wins_over_the_body(start: Start) -> None:
    async with chatting(start, "Same.", "More.", family=QWEN2_5) as chat:
        first = await prompted(chat, user("a"), session="header", session_id="body")
        assert await is_unknown(chat, "body")
        (leaf,) = await chat.trajectories("header")
        assert leaf["tokens"] == first["prompt_token_ids"] + first["choices"][0]["token_ids"]
        answer = await chat.running.client.post(
            "/v1/completions",
            json={"prompt": "x", "session_id": "body"},
            headers={"X-SMG-Routing-Key": "header"},
        )
        assert answer.status_code == 200
        assert await is_unknown(chat, "body")
        assert len(await chat.trajectories("header")) == 2
