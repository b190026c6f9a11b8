"""Answers of which nothing, or less than all, was recorded: they are never taken for what was."""

from __future__ import annotations

import shutil
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anyio
import orjson
import pytest

from plugged import until
from radix_cache.claims import NEXT, PROMPT, ask, in_pieces, session_of, trained
from radix_cache.outputs import events, output, stream
from radix_cache.scripted import Client, ScriptedEngine, routed

if TYPE_CHECKING:
    from routers import Start

pytestmark = pytest.mark.anyio

MINE, LAST = [5, 6], [7, 8]


async def test_a_streamed_answer_without_meta_info_is_a_loss(client: Client) -> None:
    await ask(client, PROMPT, MINE, "a")
    await stream(client, "a", events(output(client, LAST, meta_info=None)))
    assert not (await session_of(client, "a"))["complete"]


async def test_a_sequence_that_never_comes_is_a_loss(client: Client) -> None:
    told = events(output(client, MINE) | {"index": 0})
    await stream(client, "a", told, sampling_params={"n": 2})
    assert not (await session_of(client, "a"))["complete"]
    assert (await client.stats())["unrecorded"] == {"sequence_missing": 1}


async def test_a_stream_with_an_event_that_is_not_understood_is_not_exact(client: Client) -> None:
    """It may have told tokens: these would be missing in the middle."""
    first = output(client, MINE)
    first["meta_info"] |= {"finish_reason": None}
    last = output(client, LAST)
    for one in (first, last):
        del one["meta_info"]["completion_tokens"]
    await stream(client, "a", events(first, {"text": 5, "meta_info": {}}, last))
    document = await session_of(client, "a")
    assert not document["complete"]
    assert [record["exact"] for record in document["trajectories"]] == [False]


@pytest.mark.parametrize("more", ["tokens", "sequence", "nonsense"])
async def test_a_stream_that_goes_on_behind_the_end_of_its_answer_is_not_exact(
    client: Client, more: str
) -> None:
    """The client was told more than was recorded, or nobody knows what."""
    behind = {
        "tokens": output(client, [*MINE, *LAST]),
        "sequence": output(client, LAST) | {"index": 1},
        "nonsense": {"text": 5, "meta_info": {}},
    }
    await stream(client, "a", events(output(client, MINE), behind[more]))
    document = await session_of(client, "a")
    assert not document["complete"]
    (record,) = document["trajectories"]
    assert (record["exact"], record["inexact_reason"]) == (False, "engine_contradicts_itself")
    assert not any(record["loss_mask"])


@pytest.mark.parametrize("figure", ["id", "prompt_tokens", None])
async def test_a_delta_of_another_request_is_not_exact(client: Client, figure: str | None) -> None:
    """Two streams in step, of which an event each has gone astray: the counts are right."""
    told = [output(client, [token]) for token in (5, 6, 7)]
    for count, one in enumerate(told, 1):
        one["meta_info"] |= {"completion_tokens": count, "id": "mine", "prompt_tokens": 4}
        if count < len(told):
            one["meta_info"]["finish_reason"] = None
    if figure is not None:
        told[1]["meta_info"][figure] = {"id": "another", "prompt_tokens": 5}[figure]
    await stream(client, "a", events(*told), text="abcd")
    document = await session_of(client, "a")
    (record,) = document["trajectories"]
    reason = "engine_contradicts_itself" if figure is not None else None
    assert (document["complete"], record["inexact_reason"]) == (figure is None, reason)


async def test_an_end_that_is_told_twice_is_exact(client: Client) -> None:
    await stream(client, "a", events(output(client, MINE), output(client, MINE)))
    document = await session_of(client, "a")
    assert (document["complete"], [record["exact"] for record in document["trajectories"]]) == (True, [True])


async def test_an_answer_with_another_status_is_a_loss(client: Client) -> None:
    await ask(client, PROMPT, MINE, "a")
    client.engine.script.append((201, orjson.dumps(output(client, LAST))))
    headers = {"x-session-id": "a"}
    answer = await client.running.client.post("/generate", json={"text": PROMPT}, headers=headers)
    assert (answer.status_code, answer.headers["x-slime-exact"]) == (201, "false")
    assert not (await session_of(client, "a"))["complete"]


async def test_an_engine_that_fails_in_a_stream_is_no_loss(client: Client) -> None:
    await ask(client, PROMPT, MINE, "a")
    await stream(client, "a", events({"error": {"message": "out of memory"}}))
    assert (await session_of(client, "a"))["complete"]


@pytest.mark.parametrize("streamed", [False, True])
async def test_an_anonymous_answer_that_is_not_understood_is_counted(client: Client, streamed: bool) -> None:
    await ask(client, PROMPT, in_pieces(client, "harbour"))
    odd = output(client, LAST, text="harbour", output_ids="xx")
    if streamed:
        await stream(client, "", events(odd))
    else:
        await ask(client, PROMPT, (200, orjson.dumps([odd, odd])))  # one was asked for
    answer = await client.retrieve(PROMPT + "harbour")
    assert (answer["candidates"], answer["candidates_relation"]) != (1, "eq")


@pytest.mark.parametrize("how", ["no JSON", "too many", "no answer", "stream"])
async def test_each_lost_answer_counts_once(client: Client, how: str) -> None:
    prompts = [PROMPT, PROMPT + "more"]
    odd = output(client, LAST, text="harbour", output_ids="xx")
    before = [(await client.retrieve(prompt))["candidates"] for prompt in prompts]
    if how == "stream":
        nonsense = {"text": 5, "meta_info": {}}
        await stream(client, "", events(nonsense, nonsense), text=prompts)
    elif how == "no answer":
        client.engine.media_type = "text/plain"
        await ask(client, prompts, (200, b"harbour"))
    else:
        body = b"{" if how == "no JSON" else orjson.dumps([odd] * 3)
        await ask(client, prompts, (200, body))
    after = [(await client.retrieve(prompt))["candidates"] for prompt in prompts]
    texts = [(await client.retrieve(prompt + "harbour"))["candidates"] for prompt in prompts]
    if how == "too many":
        assert (after, texts) == (before, [1, 2])  # the surplus belongs to the last prompt
    else:
        assert after == [number + 1 for number in before]


async def test_questions_during_a_stream_without_ids_add_no_losses(client: Client) -> None:
    told = output(client, MINE, output_ids=None, meta_info={"finish_reason": None, "completion_tokens": 2})
    client.engine.hold, client.engine.hold_after = anyio.Event(), 1
    client.engine.script.append([told, told])
    body = {"text": PROMPT, "stream": True}
    async with client.running.client.stream("POST", "/generate", json=body) as answer:
        pieces = answer.aiter_bytes()
        await anext(pieces)
        for _ in range(2):
            assert (await client.retrieve(PROMPT + told["text"]))["candidates"] == 1
        client.engine.hold.set()
        assert [piece async for piece in pieces]
    assert (await client.retrieve(PROMPT + told["text"]))["candidates"] == 1


async def test_lost_sequence_of_a_stream_that_then_fails_counts_once(client: Client) -> None:
    lost = output(
        client, LAST, text="harbour", output_ids=None, meta_info={"finish_reason": {"type": "stop"}}
    )
    nonsense = {"text": 5, "meta_info": {}}
    await stream(client, "", events(lost | {"index": 0}, nonsense), sampling_params={"n": 2})
    counts = [(await client.retrieve(PROMPT + more))["candidates"] for more in ("harbour", "")]
    assert counts == [1, 1]  # nobody knows the text of the other sequence


@pytest.mark.parametrize("streamed", [False, True])
async def test_each_attempt_that_samples_anew_is_lost_alone(
    start: Start, engine: ScriptedEngine, checkpoint: str, streamed: bool
) -> None:
    async with routed(start, engine, checkpoint, "--abort-retry-wait-s", "0") as client:
        lost = output(client, MINE, text=None, meta_info={"finish_reason": {"type": "abort"}})
        attempts = [lost, lost, output(client, LAST)]
        if streamed:
            engine.media_type = "text/event-stream"
        *first, last = (events(one) if streamed else (200, orjson.dumps(one)) for one in attempts)
        engine.script += first
        await ask(client, PROMPT, last, streamed=streamed)
        assert len(engine.asked) == len(attempts)
        assert (await client.retrieve(PROMPT))["candidates"] == 3  # the kept prompt, and two lost answers
        assert (await client.stats())["unrecorded"] == {"answer_without_text": 2}


@pytest.mark.parametrize("how", ["cancelled", "refused", "empty"])
async def test_a_request_without_a_record_has_spoken(client: Client, how: str) -> None:
    """Its client's words behind that prompt are prompt, though another session sampled the like."""
    await ask(client, PROMPT, in_pieces(client, "harbour"), "b")
    if how == "cancelled":
        client.engine.delay = anyio.Event()
        with anyio.move_on_after(0.3):
            await ask(client, PROMPT, MINE, "a")
        client.engine.delay.set()
        client.engine.delay = None
    elif how == "refused":
        client.engine.script.append((400, b'{"error": {"message": "too long"}}'))
        headers = {"x-session-id": "a"}
        await client.running.client.post("/generate", json={"text": PROMPT}, headers=headers)
    else:
        await ask(client, PROMPT, (200, orjson.dumps(output(client, []))), "a")
    await ask(client, PROMPT + "harbour" + NEXT, LAST, "a")
    text = PROMPT + "harbour" + NEXT + client.engine.tokenizer.decode(LAST)
    answer = await client.retrieve(text, session_id="a")
    assert (answer["exact"], trained(answer)) == (True, LAST)


@pytest.mark.parametrize("is_killed", [False, True])
async def test_a_request_without_a_record_has_spoken_before_a_restart(
    start: Start, engine: ScriptedEngine, checkpoint: str, tmp_path: Path, is_killed: bool
) -> None:
    log, copy = tmp_path / "log", tmp_path / "copy"
    async with routed(start, engine, checkpoint, "--trajectory-log", str(log)) as client:
        await ask(client, PROMPT, in_pieces(client, "harbour"), "b")
        headers = {"x-session-id": "a"}
        if is_killed:  # while it waits
            engine.delay = anyio.Event()
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(partial(ask, client, PROMPT, MINE, "a"))
                await until(lambda: len(engine.asked) == 2)
                shutil.copytree(log, copy)
                engine.delay.set()
            engine.delay = None
        else:
            engine.script.append((500, b"{}"))
            await client.running.client.post("/generate", json={"text": PROMPT}, headers=headers)
            shutil.copytree(log, copy)
    async with routed(start, engine, checkpoint, "--trajectory-log", str(copy)) as client:
        assert (await session_of(client, "b"))["complete"]
        await ask(client, PROMPT + "harbour" + NEXT, LAST, "a")
        text = PROMPT + "harbour" + NEXT + engine.tokenizer.decode(LAST)
        answer = await client.retrieve(text, session_id="a")
        document = await session_of(client, "a")
    assert (answer["exact"], trained(answer)) == (True, LAST)
    assert document["complete"]


async def test_a_fork_that_is_tried_again_goes_on_where_it_forked(client: Client) -> None:
    words = in_pieces(client, "harbour")
    await ask(client, PROMPT, words, "b")
    fork = PROMPT + "harbour" + NEXT
    client.engine.script.append((500, b"{}"))
    headers = {"x-session-id": "a"}
    await client.running.client.post("/generate", json={"text": fork}, headers=headers)
    await ask(client, fork, LAST, "a")
    answer = await client.retrieve(fork + client.engine.tokenizer.decode(LAST), session_id="a")
    assert (answer["exact"], trained(answer)) == (True, [*words, *LAST])


async def test_equal_samples_of_one_request_are_leaves_each(client: Client) -> None:
    one = output(client, MINE)
    await ask(client, PROMPT, (200, orjson.dumps([one, one, one])), "a", sampling_params={"n": 3})
    assert len((await session_of(client, "a"))["trajectories"]) == 3


async def test_a_log_that_is_given_up_remembers_what_it_lacks(
    start: Start, engine: ScriptedEngine, checkpoint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(fd: int, pieces: Any) -> int:
        raise OSError(28, "No space left on device")

    flags = ("--trajectory-log", str(tmp_path / "log"))
    async with routed(start, engine, checkpoint, *flags) as client:
        await ask(client, "first " + PROMPT, MINE, "a")
        with monkeypatch.context() as patched:
            patched.setattr("os.writev", full)
            await ask(client, PROMPT, LAST, "a")
    async with routed(start, engine, checkpoint, *flags) as client:
        document = await session_of(client, "a")
    assert (document["complete"], len(document["trajectories"])) == (False, 1)


@pytest.mark.parametrize("session", ["a", ""], ids=["a", "nobody"])
async def test_a_stream_that_a_kill_cuts_off_is_a_loss(
    start: Start, engine: ScriptedEngine, checkpoint: str, tmp_path: Path, session: str
) -> None:
    log, copy = tmp_path / "log", tmp_path / "copy"
    async with routed(start, engine, checkpoint, "--trajectory-log", str(log)) as client:
        await ask(client, "first " + PROMPT, MINE, "a")
        await ask(client, PROMPT, LAST, "b")  # reads as the first tokens of the stream do
        engine.hold, engine.hold_after = anyio.Event(), 1
        engine.script.append([*LAST, 9])
        body = {"text": PROMPT, "stream": True}
        headers = {"x-session-id": session} if session else {}
        async with client.running.client.stream("POST", "/generate", json=body, headers=headers) as reply:
            async for line in reply.aiter_lines():
                if line.startswith("data: {"):
                    break
            shutil.copytree(log, copy)  # what another process would find after SIGKILL
        engine.hold.set()
    engine.hold = None
    async with routed(start, engine, checkpoint, "--trajectory-log", str(copy)) as client:
        document = await session_of(client, "a")
        answer = await client.retrieve(PROMPT + engine.tokenizer.decode(LAST))
    assert (document["complete"], len(document["trajectories"])) == (not session, 1)
    assert (answer["candidates"], answer["candidates_relation"]) == (1, "gte")


@pytest.mark.parametrize("incremental", [False, True])
async def test_new_weights_in_mid_stream_leave_no_token_another_version(
    client: Client, incremental: bool
) -> None:
    """Engines without ``weight_versions`` do not say which tokens are whose."""
    first, last = output(client, MINE), output(client, LAST if incremental else [*MINE, *LAST])
    first["meta_info"] |= {"weight_version": "1", "finish_reason": None}
    last["meta_info"] |= {"weight_version": "2", "completion_tokens": 4}
    await stream(client, "a", events(first, last))
    (record,) = (await session_of(client, "a"))["trajectories"]
    assert (trained(record), record["exact"]) == ([*MINE, *LAST], True)
    assert record["generation_versions"][-4:] == [None] * 4


@pytest.mark.parametrize("flags", [(), ("--resume-aborted",)])
async def test_attempts_that_are_not_understood_are_losses(
    start: Start, engine: ScriptedEngine, checkpoint: str, flags: tuple[str, ...]
) -> None:
    async with routed(start, engine, checkpoint, "--abort-retry-wait-s", "0", *flags) as client:
        aborted = output(client, MINE, meta_info={"finish_reason": {"type": "abort"}, "completion_tokens": 2})
        engine.script += [(200, orjson.dumps(aborted)), (200, b"{"), (200, b"[]")]
        await ask(client, PROMPT, LAST, "a")
        assert not (await session_of(client, "a"))["complete"]
        assert (await client.stats())["unrecorded"] == {"answer_not_understood": 2}
        assert (await client.retrieve(PROMPT))["candidates"] == 3  # the kept prompt, and two lost answers
