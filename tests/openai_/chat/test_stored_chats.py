"""Chats go on from the very tokens that an earlier router, or another one, had for them in a store."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Iterator
from contextlib import AbstractAsyncContextManager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import anyio
import httpx
import pytest

from chaos.processes import Program
from deadlines import HANG_S, until
from openai_.chat.chatting import Chat, chatting
from openai_.chat.remembered import ASK, WORDS, asked, demote_all, is_continued, said, user
from openai_.chat_models.families import QWEN2_5, QWEN3
from openai_.chat_models.steered import by_text, speaking
from openai_.drift.rollouts import TOOLS
from ports import free_port
from store_flags import tier_flags

if TYPE_CHECKING:
    from routers import Start

pytestmark = pytest.mark.anyio

CALL = '<tool_call>\n{"name": "time", "arguments": {"place": "東京"}}\n</tool_call>'


def flags_of(tier: str, path: Path) -> tuple[str, ...]:
    """The flags of a store in ``path``."""
    return ("--plugin", "tiered_store", "--store-memory-bytes", "40960", *tier_flags(tier, path))


class StoredLives:
    """A router with a store, and the one after it. Their engines say what a test wants, in tokens of their own."""

    def __init__(self, start: Start, tier: str, path: Path, *flags: str) -> None:
        self.path = path
        self._start = start
        self._tier = tier
        self._flags = flags

    def life(self, *script: str | tuple[str, ...], **settings: Any) -> AbstractAsyncContextManager[Chat]:
        flags = (*self._flags, *flags_of(self._tier, self.path))
        return chatting(self._start, *script, flags=flags, **settings)

    def kill(self) -> None:
        """The next router finds what there is now, as after a SIGKILL; what this one does from now on is nobody's."""
        after = self.path.with_name(f"{self.path.name}-")
        shutil.copytree(self.path, after)
        self.path = after


class KnownPrompt(NamedTuple):
    """A request, and the tokens that its prompt must begin with: those that an engine consumed and sampled before."""

    request: dict[str, Any]
    known: list[int]


async def first_turns(chat: Chat) -> list[KnownPrompt]:
    """Requests that go on from turns of all kinds."""

    def known() -> list[int]:
        return [*chat.entries[-1].input_ids, *chat.entries[-1].output_ids]

    async def turn(*messages: Any, **more: Any) -> tuple[Any, list[int]]:
        return await chat.post(messages=messages, **{**ASK, **more}), known()

    tools: dict[str, Any] = {"tools": TOOLS, "session_id": "tools"}
    called, call_ids = await turn(user("tools?"), **tools)
    call = called["choices"][0]["message"]
    result = {"role": "tool", "content": "1", "tool_call_id": call["tool_calls"][0]["id"]}
    begun = [user("tools?"), {**call, "refusal": None}]
    second, second_ids = await turn(*begun, result, **tools)
    chunks = await chat.streamed(messages=[user("streamed?")], session_id="streamed", **ASK)
    streamed = "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks)
    streamed_ids = known()
    several, _ = await turn(user("several?"), n=3, session_id="several")
    several_ids = several["prompt_token_ids"] + several["choices"][-1]["token_ids"]
    alike = {name: await turn(user("?"), session_id=name) for name in ("x", "y")}
    assert alike["x"][0]["choices"][0]["message"] == alike["y"][0]["choices"][0]["message"]
    assert alike["x"][1] != alike["y"][1]
    nobodys, nobodys_ids = await turn(user("nobody?"))
    cut, cut_ids = await turn(user("cut?"), session_id="cut", max_tokens=4)
    within = {"messages": [user("cut?"), said(cut)], "continue_final_message": True, "session_id": "cut"}

    def on(question: str, answer: Any, known: list[int], session: str | None = None) -> KnownPrompt:
        more = {} if session is None else {"session_id": session}
        return KnownPrompt({"messages": [user(question), answer, user("And?")], **more}, known)

    return [
        KnownPrompt({"messages": [*begun, result, said(second), user("b")], **tools}, second_ids),
        KnownPrompt({"messages": [*begun, {**result, "content": "2"}], **tools}, call_ids),  # a fork
        on("streamed?", {"role": "assistant", "content": streamed}, streamed_ids, "streamed"),
        on("several?", said(several), several_ids, "several"),  # of three equal ones the newest
        *(on("?", said(answer), ids, name) for name, (answer, ids) in alike.items()),
        on("nobody?", said(nobodys), nobodys_ids),
        on("cut?", said(cut), cut_ids, "cut"),
        KnownPrompt(within, cut_ids),
        on("?", said(alike["x"][0]), alike["y"][1], "another"),  # the newest
    ]


@pytest.mark.parametrize(
    ("tier", "flags"), [("ssd", ()), ("file", ("--history-max-bytes", "1"))], ids=["ssd", "file"]
)
async def test_chats_of_all_kinds_go_on_after_a_stop(
    start: Start, tmp_path: Path, tier: str, flags: tuple[str, ...]
) -> None:
    """Tools, thoughts, streams, several answers, forks, cut answers, with and without a session."""
    lives = StoredLives(start, tier, tmp_path / "store", *flags)
    thoughts = "<think>\nhm\n</think>\n\nTwo words, café 日本語."
    async with lives.life(CALL, *[thoughts] * 7, "No words, but thoughts.", family=QWEN3) as chat:
        requests = await first_turns(chat)
    async with lives.life("Other words.", family=QWEN3) as chat:
        for request, known in requests:
            answer = await chat.post(**request, **ASK)
            assert answer["history"] == "exact"
            assert answer["prompt_token_ids"][: len(known)] == known, request
            assert chat.consumed[-1] == answer["prompt_token_ids"]


async def test_demoted_chats_go_on_after_a_kill(start: Start, tmp_path: Path) -> None:
    lives = StoredLives(start, "ssd", tmp_path / "store")
    async with lives.life(WORDS, family=QWEN2_5) as chat:
        first = await asked(chat, user("a"))
        nobodys = await asked(chat, user("nobody?"), session=None)
        for session in ("again", None):
            await asked(chat, user("twice?"), session=session)
        await demote_all(chat)
        second = await asked(chat, user("a"), said(first), user("b"))
        again = [await asked(chat, user("twice?"), session=session) for session in ("again", None)]
        late = await asked(chat, user("late?"), session="late")
        lives.kill()
    async with lives.life("More.", family=QWEN2_5) as chat:
        third = await asked(chat, user("a"), said(first), user("c"))
        assert (third["history"], is_continued(third, first)) == ("exact", True)
        behind = await asked(chat, user("a"), said(first), user("b"), said(second), user("c"))
        assert behind["history"] == "template"
        assert not is_continued(behind, second)
        for session, twice in zip(
            ("again", None), again, strict=True
        ):  # an equal answer is kept, this one is lost
            other = await asked(chat, user("twice?"), said(twice), user("c"), session=session)
            assert other["history"] == "fresh"
        known = await asked(chat, user("nobody?"), said(nobodys), user("c"), session=None)
        assert (known["history"], is_continued(known, nobodys)) == ("exact", True)
        unknown = await asked(chat, user("late?"), said(late), user("c"), session="late")
        assert unknown["history"] == "fresh"
        masks = [sum(leaf["loss_mask"]) for leaf in await chat.trajectories("s")]
        sampled = len(first["choices"][0]["token_ids"])
        assert masks[0] == sampled + len(third["choices"][0]["token_ids"])


async def test_chats_go_on_at_another_router_with_the_same_remote_store(start: Start, tmp_path: Path) -> None:
    lives = StoredLives(start, "file", tmp_path / "store")
    async with lives.life(WORDS, family=QWEN2_5) as one, lives.life(WORDS, family=QWEN2_5) as two:
        first = await asked(one, user("a"))
        nobodys = await asked(one, user("a"), session=None)
        await asked(one, user("twice?"), session="again")
        await demote_all(one)
        twice = await asked(one, user("twice?"), session="again")
        second = await asked(two, user("a"), said(first), user("b"))
        assert (second["history"], is_continued(second, first)) == ("exact", True)
        other = await asked(two, user("a"), said(nobodys), user("b"), session=None)
        assert other["history"] == "fresh", "a third router may have sampled the same words"
        other = await asked(two, user("twice?"), said(twice), user("b"), session="again")
        assert other["history"] == "fresh", "its tokens are in memory of the first router"
        await demote_all(two)
        third = await asked(one, user("a"), said(first), user("b"), said(second), user("c"))
        assert (third["history"], is_continued(third, second)) == ("exact", True)
        other = await asked(one, user("a"), said(nobodys), user("b"), session=None)
        assert (other["history"], is_continued(other, nobodys)) == ("exact", True)  # its own memory


async def test_turn_in_memory_is_not_continued_if_another_router_asked_again(
    start: Start, tmp_path: Path
) -> None:
    lives = StoredLives(start, "file", tmp_path / "store")
    async with lives.life(WORDS, family=QWEN2_5) as one, lives.life(WORDS, family=QWEN2_5) as two:
        first = await asked(one, user("a"))
        await demote_all(one)
        second = await asked(two, user("a"), said(first), user("b"))
        again = await asked(one, user("a"))
        await two.trajectories("s")  # reads the notes; otherwise this is done every second
        for session in ("s", "another"):
            third = await asked(two, user("a"), said(again), user("c"), session=session)
            assert third["history"] == "fresh", "its tokens are in memory of the first router"
        longer = await asked(two, user("a"), said(again), user("b"), said(second), user("c"))
        assert (longer["history"], is_continued(longer, second)) == ("exact", True)
        await demote_all(one)
        await two.trajectories("s")
        third = await asked(two, user("a"), said(again), user("d"))
        assert (third["history"], is_continued(third, again)) == ("exact", True)


@contextmanager
def without_the_log(path: Path) -> Iterator[None]:
    """Let no note be written to the store in ``path``: a file is in the place of the log."""
    log, away = path / "notes", path / "away"
    log.rename(away)
    log.touch()
    yield
    log.unlink()
    away.rename(log)


@pytest.mark.parametrize(("session", "times"), [("s", 1), ("s", 2), (None, 1)])
async def test_repeated_question_is_not_answered_before_it_is_noted(
    start: Start, tmp_path: Path, session: str | None, times: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a kill would leave the first of two answers with the same words, and the client may mean the other."""
    monkeypatch.setattr("slime_radix_cache.demotion.note_writer._WAIT_S", 0.05)
    lives, body = (
        StoredLives(start, "ssd", tmp_path / "store"),
        {} if session is None else {"session_id": session},
    )
    async with lives.life(WORDS, family=QWEN2_5) as chat:
        for _ in range(times):
            await asked(chat, user("a"), session=session)
        await demote_all(chat)
        with without_the_log(lives.path):
            for _ in range(2):
                request = {"messages": [user("a")], **body}
                reply = await chat.running.client.post("/v1/chat/completions", json=request)
                assert (reply.status_code, reply.headers["retry-after"]) == (503, "1")
                assert reply.json()["error"]["code"] == "STORE_FAILED"
            await asked(chat, user("a"), session="new")
            assert len(chat.sampled) == times + 1, "no engine has answered the repeated question"
        await demote_all(chat)  # waits until the log is written again
        again = await asked(chat, user("a"), session=session)
        lives.kill()
    async with lives.life("More.", family=QWEN2_5) as chat:
        after = await asked(chat, user("a"), said(again), user("b"), session=session)
        assert after["history"] == "fresh"


async def test_chats_begin_anew_with_another_chat_template(start: Start, tmp_path: Path) -> None:
    """Also while the store cannot be read."""
    template = tmp_path / "template"
    template.write_text(QWEN2_5.template.replace("assistant", "model"))
    lives = StoredLives(start, "ssd", tmp_path / "store")
    async with lives.life(WORDS, family=QWEN2_5) as chat:
        first = await asked(chat, user("a"))
    other = StoredLives(start, "ssd", lives.path, "--chat-template", str(template))
    async with other.life("Yes.", family=QWEN2_5) as chat:
        assert (await asked(chat, user("a"), said(first), user("b")))["history"] == "fresh"
    async with lives.life(WORDS, family=QWEN2_5) as chat:
        records = chat.running.router.components.get("cold_store")
        store, records.store = records.store, None
        assert (await asked(chat, user("a"), said(first), user("c")))["history"] == "fresh"
        records.store = store
        known = await asked(chat, user("a"), said(first), user("b"))
        assert (known["history"], is_continued(known, first)) == ("exact", True)


@pytest.mark.skipif(
    "SLIME_ROUTER_KILL_TEST" not in os.environ, reason="it starts processes: set SLIME_ROUTER_KILL_TEST"
)
@pytest.mark.parametrize("tier", ["ssd", "file"])
async def test_chats_go_on_in_processes_that_are_killed_and_stopped(tmp_path: Path, tier: str) -> None:
    family, port = QWEN2_5, free_port()
    async with (
        speaking(family, by_text(family.tokenizer, lambda text: [WORDS])) as engine,
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=HANG_S) as http,
    ):
        plugins = ("--plugin", "radix_cache", "--hf-checkpoint", engine.checkpoint, "--plugin", "openai")
        flags = [
            *plugins,
            "--port",
            str(port),
            "--worker-urls",
            engine.url,
            *flags_of(tier, tmp_path / "store"),
        ]
        program = Program([*flags, "--radix-tree-max-size", "1"], tmp_path / "router.log")
        messages, known = [user("a")], list[int]()
        try:
            for end in (signal.SIGKILL, signal.SIGTERM, signal.SIGKILL, signal.SIGTERM):
                await program.serve(http)
                body = {"messages": messages, "session_id": "s", **ASK}
                answer = (await http.post("/v1/chat/completions", json=body)).json()
                assert answer["history"] == ("exact" if known else "fresh")
                assert answer["prompt_token_ids"][: len(known)] == known
                known = answer["prompt_token_ids"] + answer["choices"][0]["token_ids"]
                messages += [said(answer), user("And?")]
                with anyio.fail_after(HANG_S):
                    while (await http.get("/cache_stats")).json()["entries"]:  # noqa: ASYNC110  # over HTTP
                        await anyio.sleep(0.01)
                program.send(end)
                await until(lambda: program.ended)
        finally:
            program.kill()
