"""Conversations go on from the very tokens that a router which was killed had for them."""

from __future__ import annotations

import os
import random
import re
import shutil
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anyio
import orjson
import pytest

from deadlines import HANG_S
from openai_.chat.chatting import Chat, chatting
from openai_.chat.remembered import ASK, said, user
from openai_.chat_models.families import LLAMA, QWEN2_5, QWEN3, Family
from openai_.drift.rollouts import TOOLS
from router_core.cli import build
from router_core.errors import StartupError
from slime_journal.record_files import Header, LogDirectory
from slime_journal.record_frames import Frames
from slime_journal.record_log import RecordLog
from slime_openai.prompts import identity
from slime_openai.prompts.chat_turn import Turn
from slime_openai.prompts.history import History
from slime_openai.prompts.log_records import CHATS, Gone, Said, reader
from slime_openai.prompts.logged_history import LoggedHistory
from slime_openai.prompts.template_traits import STRICT, TemplateTraits, Trim
from slime_openai.requests.messages import Message, ToolCall

if TYPE_CHECKING:
    from routers import Start

FRAMES = Frames([Header, Said, Gone])
CALL = '<tool_call>\n{"name": "time", "arguments": {"place": "東京"}}\n</tool_call>'


def opened(
    directory: Path, max_bytes: int = 0, *, file_bytes: int = 1 << 20, who: str = "toy"
) -> LoggedHistory:
    log = RecordLog(LogDirectory(directory, "--trajectory-log"), CHATS, who, file_bytes)
    return LoggedHistory(max_bytes, set(), log)


def after_a_kill(directory: Path, max_bytes: int = 0) -> LoggedHistory:
    """Return the history that another process would find now."""
    copy = directory.with_name("copy")
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(directory, copy)
    again = opened(copy, max_bytes)
    again.close()
    return again


def files(directory: Path) -> list[Path]:
    return sorted(directory.glob("*.chats"))


class Talks:
    """Sessions that talk, fork, say what others said, and go on from what has made room meanwhile."""

    def __init__(self, history: History, seed: int) -> None:
        self.history = history
        self._random = random.Random(seed)
        self._turns: list[Turn] = []

    def turn(self) -> Turn:
        some = self._random
        parent = some.choice([None, *self._turns[-12:]])
        words = some.choice(["Ja.", "日本語 😀", "", "\ud7ff\x00", "long " * some.randint(1, 60)])
        calls = [ToolCall("f", words, some.choice([None, "c1"])) for _ in range(some.randint(0, 2))]
        reply = Message(
            "assistant", some.choice([None, words]), tuple(calls), reasoning=some.choice([None, "", words])
        )
        number = parent.count + 2 if parent is not None else 1
        place = parent.key if parent is not None else b"?"
        key = identity.next_key(place, reply, STRICT)
        session = some.choice(["one", "two", f"s{len(self._turns) // 8}", None])
        asked, sampled = some.randbytes(4 * some.randint(0, 9)), some.randbytes(4 * some.randint(1, 9))
        turn = Turn(
            parent, key, number, session, asked, sampled, reply, f"?{words}", words[-1:], 1, some.random() < 0.5,
            place, some.choice([b"", some.randbytes(16)]),
        )  # fmt: skip
        self.history.add(turn)
        self._turns.append(turn)
        return turn


def told(turn: Turn) -> Any:
    return [
        (
            each.key, each.count, each.session, each.asked, each.sampled, each.reply,
            each.text, each.ending, each.hidden, each.closed, each.size_bytes, each.place, each.answers,
        )
        for each in turn.chain()
    ]  # fmt: skip


def picture(history: History) -> dict[str, Any]:
    """Everything that an answer may depend on."""
    return {
        "turns": {key: [told(turn) for turn in alike] for key, alike in history._turns.items()},
        "ages": [told(turn) for turn in history._used],
        "spoken": {
            at: sorted(repr(told(context)) if context is not None else "" for context in contexts)
            for at, contexts in history._speakers._asked.items()
        },
        "bytes": history.size_bytes,
    }


@pytest.mark.parametrize("max_bytes", [0, 40_000, 6_000])
@pytest.mark.parametrize("seed", range(3))
def test_after_a_kill_the_conversations_are_what_they_were(max_bytes: int, seed: int, tmp_path: Path) -> None:
    history = opened(tmp_path / "log", max_bytes, file_bytes=3000)
    talks = Talks(history, seed)
    for number in range(120):
        talks.turn()
        if number % 7 == 0:
            assert picture(after_a_kill(tmp_path / "log", max_bytes)) == picture(history)
    assert bool(history._lost) == bool(max_bytes)
    assert len(files(tmp_path / "log")) > 5
    history.close()


async def tidied(history: LoggedHistory, until: Callable[[], bool]) -> None:
    """Let files be written again in the background ``until``."""
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(history.tidy)
        with anyio.fail_after(HANG_S):
            while not until():  # noqa: ASYNC110  # what is waited for is on the disk
                await anyio.sleep(0.001)
        tasks.cancel_scope.cancel()


@pytest.mark.anyio
async def test_the_log_is_not_much_longer_than_what_is_kept(tmp_path: Path) -> None:
    history = opened(tmp_path / "log", 20_000, file_bytes=4000)
    talks = Talks(history, 1)
    sizes = []
    for _ in range(12):
        for _ in range(100):
            talks.turn()
        await tidied(history, lambda: not history._log._due())
        sizes.append(sum(path.stat().st_size for path in files(tmp_path / "log")))
        again, now = picture(after_a_kill(tmp_path / "log", 20_000)), picture(history)
        # The order of age may be that of the last words said, not of the last use by what has gone.
        assert sorted(map(repr, again.pop("ages"))) == sorted(map(repr, now.pop("ages")))
        assert again == now
    assert max(sizes) < 50_000
    history.close()


@pytest.mark.anyio
async def test_turns_that_are_added_during_the_writing_again_are_not_lost(tmp_path: Path) -> None:
    history = opened(tmp_path / "log", 20_000, file_bytes=2000)
    talks = Talks(history, 2)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(history.tidy)
        for _ in range(300):
            talks.turn()
            await anyio.sleep(0.0005)
        with anyio.fail_after(HANG_S):
            while history._log._due():  # noqa: ASYNC110  # as above
                await anyio.sleep(0.001)
        tasks.cancel_scope.cancel()
    assert len(files(tmp_path / "log")) < 40
    assert picture(after_a_kill(tmp_path / "log"))["turns"] == picture(history)["turns"]
    history.close()


def test_a_turn_without_its_end_is_dropped_and_the_others_stay(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    history = opened(tmp_path / "log")
    talks = Talks(history, 3)
    pictures = []
    for _ in range(10):
        talks.turn()
        pictures.append(picture(history))
    history.close()
    [path] = files(tmp_path / "log")
    whole = path.read_bytes()
    *_, (start, end, _) = FRAMES.read(memoryview(whole))
    for length in range(start, end):
        caplog.clear()
        path.write_bytes(whole[:length])
        again = opened(tmp_path / "log")
        assert picture(again) == pictures[-2]
        assert bool(caplog.records) == (length > start)
        again.close()
        assert path.read_bytes() == whole[:start], "what comes next is behind whole records"


def test_damaged_log_ends_the_start_and_says_what_to_do(tmp_path: Path) -> None:
    history = opened(tmp_path / "log")
    talks = Talks(history, 4)
    for _ in range(4):
        talks.turn()
    history.close()
    [path] = files(tmp_path / "log")
    whole = path.read_bytes()
    for start, end, _ in FRAMES.read(memoryview(whole)):
        for place in range(start, end):
            damaged = bytearray(whole)
            damaged[place] ^= 1 << place % 8
            path.write_bytes(damaged)
            with pytest.raises(
                StartupError, match=rf"{path} is damaged at byte {start}; move .*/\*\.chats away"
            ):
                opened(tmp_path / "log")


def test_conversations_are_read_by_nobody_who_would_go_on_in_another_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine = reader(QWEN3.tokenizer, QWEN3.template, STRICT)
    opened(tmp_path / "log", who=mine).close()
    opened(tmp_path / "log", who=reader(QWEN3.tokenizer, QWEN3.template, STRICT)).close()
    others = [
        reader(QWEN3.tokenizer, QWEN3.template + " ", STRICT),
        reader(LLAMA.tokenizer, QWEN3.template, STRICT),
        reader(QWEN3.tokenizer, QWEN3.template, TemplateTraits({"user": Trim(None, None)})),
    ]
    with monkeypatch.context() as patched:
        patched.setattr(identity, "_THOUGHTS", re.compile("never"))  # other keys for the same messages
        others.append(reader(QWEN3.tokenizer, QWEN3.template, STRICT))
    for other in others:
        with pytest.raises(StartupError, match="conversations of another tokenizer or chat template"):
            opened(tmp_path / "log", who=other)


def test_a_disk_that_is_full_costs_the_log_and_not_an_answer(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    history = opened(tmp_path / "log")
    talks = Talks(history, 5)
    for _ in range(5):
        talks.turn()
    before = picture(history)
    monkeypatch.setattr("os.writev", lambda fd, pieces: os.write(fd, pieces[0]))  # as a full disk does
    talks.turn()
    monkeypatch.undo()
    talks.turn()
    assert len(history) == 7
    assert [record.levelname for record in caplog.records] == ["ERROR"]
    assert "nothing more is written to the logs" in caplog.text
    assert picture(after_a_kill(tmp_path / "log")) == before
    history.close()


# Whole routers.


class LoggedLives:
    """A router with a log, and the one after it. Their engines say what a test wants, in tokens of their own."""

    def __init__(self, start: Start, log: Path, *flags: str) -> None:
        self.log = log
        self._start = start
        self._flags = flags

    def life(self, *script: str | tuple[str, ...], **settings: Any) -> AbstractAsyncContextManager[Chat]:
        flags = ("--trajectory-log", str(self.log), *self._flags)
        return chatting(self._start, *script, flags=flags, **settings)

    def kill(self) -> None:
        """The next router finds what there is now; what this one does from now on is nobody's."""
        after = self.log.with_name(f"{self.log.name}-")
        shutil.copytree(self.log, after)
        self.log = after


async def first_turns(chat: Chat) -> list[dict[str, Any]]:
    """Turns of all kinds, and the requests that go on from them."""
    called = await chat.post(messages=[user("tools?")], tools=TOOLS, session_id="tools", **ASK)
    call = called["choices"][0]["message"]
    result = {"role": "tool", "content": "1", "tool_call_id": call["tool_calls"][0]["id"]}
    tools = [user("tools?"), {**call, "refusal": None}, result]
    second = await chat.post(messages=tools, tools=TOOLS, session_id="tools", **ASK)
    chunks = await chat.streamed(messages=[user("streamed?")], **ASK)
    streamed = "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks)
    several = await chat.post(messages=[user("several?")], n=3, session_id="several", **ASK)
    alike = {name: await chat.post(messages=[user("?")], session_id=name, **ASK) for name in ("x", "y")}
    cut = await chat.post(messages=[user("cut?")], **{**ASK, "max_tokens": 4})
    stopped = await chat.post(messages=[user("stopped?")], stop=[" words"], **ASK)

    def on(question: str, answer: Any, **more: Any) -> dict[str, Any]:
        return {"messages": [user(question), answer, user("And?")], **more}

    in_tools: dict[str, Any] = {"tools": TOOLS, "session_id": "tools"}
    return [
        {"messages": [*tools, said(second), user("b")], **in_tools},
        {"messages": [*tools, said(second), user("c")], **in_tools},  # a fork
        {"messages": [*tools[:2], {**result, "content": "2"}], **in_tools},  # and another one
        on("streamed?", {"role": "assistant", "content": streamed}),
        *(on("several?", said(several, index), session_id="several") for index in range(3)),
        *(on("?", said(answer), session_id=name) for name, answer in alike.items()),
        on("cut?", said(cut)),
        *(
            {"messages": [user(question), said(answer)], "continue_final_message": True}
            for question, answer in (("cut?", cut), ("stopped?", stopped))
        ),
        on("?", said(alike["x"]), session_id="another"),
    ]


@pytest.mark.anyio
@pytest.mark.parametrize("mode", ["exact", "template"])
@pytest.mark.parametrize("family", [QWEN2_5, QWEN3], ids=lambda family: family.name)
async def test_after_a_kill_each_prompt_is_the_one_that_it_would_have_been(
    start: Start, tmp_path: Path, mode: str, family: Family
) -> None:
    """Tools, thoughts, streams, several answers, forks, cut answers, by session and by content alone."""
    lives = LoggedLives(start, tmp_path / "log", "--history", mode)
    prompts, origins = [], []
    thoughts = "<think>\nhm\n</think>\n\nTwo words, café 日本語."
    async with lives.life(CALL, *[thoughts] * 4, "No words, but thoughts.", family=family) as chat:
        requests = await first_turns(chat)
        lives.kill()
        for request in requests:
            answer = await chat.post(**request, **ASK)
            prompts.append(answer["prompt_token_ids"])
            origins.append(answer["history"])
    assert mode == "template" or set(origins) == {"exact"}
    async with lives.life("Other words.", family=family) as chat:
        for request, prompt, origin in zip(requests, prompts, origins, strict=True):
            answer = await chat.post(**request, **ASK)
            assert (answer["history"], answer["prompt_token_ids"]) == (origin, prompt)
        if mode == "exact":  # the trainer gets what was sampled before and after as one
            masks = [sum(leaf["loss_mask"]) for leaf in await chat.trajectories("tools")]
            journal = {tuple(entry.input_ids): len(entry.output_ids) for entry in chat.entries}
            assert len(masks) == 3
            assert min(masks) > max(journal[tuple(prompt)] for prompt in prompts[:3])


@pytest.mark.anyio
async def test_part_of_a_stream_that_a_client_read_survives_a_kill(start: Start, tmp_path: Path) -> None:
    lives = LoggedLives(start, tmp_path / "log")
    async with lives.life("One two three four five six.", tokens_per_second=40, family=QWEN2_5) as chat:
        body = {"messages": [user("a")], "stream": True, "session_id": "s", "max_tokens": 60}
        text = ""
        async with chat.running.client.stream("POST", "/v1/chat/completions", json=body) as answer:
            async for line in answer.aiter_lines():
                if line.startswith("data: {"):
                    text += orjson.loads(line[6:])["choices"][0]["delta"].get("content", "")
                    if len(text) > 9:
                        break
        messages = [user("a"), {"role": "assistant", "content": text}, user("b")]
        first = await chat.post(messages=messages, session_id="s", **ASK)  # so it was recorded by now
        lives.kill()
    async with lives.life("Two.", family=QWEN2_5) as chat:
        second = await chat.post(messages=messages, session_id="s", **ASK)
        assert second["history"] == "exact"
        assert second["prompt_token_ids"] == first["prompt_token_ids"]


@pytest.mark.anyio
async def test_a_session_that_lost_turns_takes_nobody_elses_after_a_kill(
    start: Start, tmp_path: Path
) -> None:
    lives = LoggedLives(start, tmp_path / "log", "--history-max-bytes", "4000")
    async with lives.life("The same words.") as chat:
        first = await chat.post(messages=[user("a")], session_id="one", **ASK)
        for name in ("two", "three", "four"):
            await chat.post(messages=[user("a")], session_id=name, **ASK)
        lives.kill()
    async with lives.life("Other words.") as chat:
        more = [user("a"), said(first), user("b")]
        assert (await chat.post(messages=more, session_id="one", **ASK))["history"] == "fresh"
        assert (await chat.post(messages=more, session_id="four", **ASK))["history"] == "exact"


@pytest.mark.anyio
async def test_a_request_that_no_engine_answered_has_spoken_before_a_kill(
    start: Start, tmp_path: Path
) -> None:
    lives = LoggedLives(start, tmp_path / "log")
    async with lives.life("No.") as chat:
        other = await chat.post(messages=[user("a")], session_id="other", **ASK)
        refused = {"messages": [user("a")], "max_tokens": 10**8, "session_id": "refused"}
        answer = await chat.running.client.post("/v1/chat/completions", json=refused)
        assert answer.status_code == 400
        lives.kill()
    async with lives.life("Other words.") as chat:
        more = [user("a"), said(other), user("b")]
        assert (await chat.post(messages=more, session_id="refused", **ASK))["history"] == "fresh"
        assert (await chat.post(messages=more, session_id="new", **ASK))["history"] == "exact"


@pytest.mark.anyio
async def test_router_reports_log_sizes_and_refuses_logs_of_another_template(
    start: Start, tmp_path: Path
) -> None:
    lives = LoggedLives(start, tmp_path / "log")
    template = tmp_path / "template"
    template.write_text(QWEN3.template.replace("assistant", "model"))
    async with lives.life("One.") as chat:
        await chat.post(messages=[user("a")], **ASK)
        log = (await chat.running.client.get("/cache_stats")).json()["log"]
        there = [path for path in lives.log.iterdir() if path.suffix not in (".lock", ".marks")]
        assert {path.suffix for path in there} == {".trajectories", ".chats"}
        assert log == {"files": 2, "bytes": sum(path.stat().st_size for path in there), "failed": None}
        lives.kill()
        checkpoint = ["--plugin", "radix_cache", "--hf-checkpoint", chat.engine.checkpoint]
        flags = [*checkpoint, "--trajectory-log", str(lives.log), "--plugin", "openai"]
        with pytest.raises(StartupError, match=r"another tokenizer or chat template.*/\*\.chats away"):
            build([*flags, "--chat-template", str(template)])
