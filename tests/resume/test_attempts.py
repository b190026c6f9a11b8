"""Workers and clients that act in the middle of an aborted generation, or between two attempts at it."""

from __future__ import annotations

import logging
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import anyio
import httpx
import orjson
import pytest

from chaos.processes import Program
from core.servers import Scripted, Wire, answer, scripted
from deadlines import until
from ports import free_port

if TYPE_CHECKING:
    from pathlib import Path

    from routers import Start
    from slime_engine.tokenizer import EngineTokenizer
    from slime_testing import Running

pytestmark = pytest.mark.anyio

PROMPT = "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
DONE = b"data: [DONE]\n\n"
ABORT = {"type": "abort", "message": "new weights"}
LENGTH = {"type": "length", "length": 4}

#: A worker's script: it sends a piece, or waits for something or so many seconds.
Step = bytes | float | anyio.Event
#: Instead of a wait: it closes the connection.
BREAKS = -1.0


class Said:
    """Engines' outputs: so many tokens, ``went`` of which came before. ``weight`` makes their logprobs."""

    def __init__(self, tokenizer: EngineTokenizer) -> None:
        self.tokenizer = tokenizer
        self.prompt = tokenizer.encode(PROMPT)

    def output(
        self, ids: Sequence[int], reason: dict[str, Any] | None = None, went: int = 0, weight: int = 7
    ) -> dict[str, Any]:
        meta = {
            "finish_reason": reason,
            "prompt_tokens": len(self.prompt) + went,
            "completion_tokens": len(ids),
            "weight_version": "1",
            "output_token_logprobs": [[-(place + 1) / weight, one, None] for place, one in enumerate(ids)],
        }
        return {"text": self.tokenizer.decode(ids), "output_ids": list(ids), "meta_info": meta}

    def event(self, ids: Sequence[int], reason: dict[str, Any] | None = None, went: int = 0) -> bytes:
        return b"data: %s\n\n" % orjson.dumps(self.output(ids, reason, went))


def stream(*steps: Step, breaks: bool = False) -> list[Step]:
    """An attempt that is streamed, piece by piece, to its end or not."""
    head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
    chunks = [b"%x\r\n%s\r\n" % (len(one), one) if isinstance(one, bytes) else one for one in steps]
    return [head, *chunks, BREAKS if breaks else b"0\r\n\r\n"]


def json(value: Any) -> list[Step]:
    """An attempt that is answered at once."""
    return [answer(orjson.dumps(value), b"Content-Type: application/json")]


class Attempts:
    """A worker that does what is in ``script``, one attempt after the other; ``aborted`` are the names it was told."""

    def __init__(self) -> None:
        self.script: list[list[Step]] = []
        self.asked: list[dict[str, Any]] = []
        self.aborted: list[str] = []
        self.told = anyio.Event()

    async def serve(self, wire: Wire) -> None:
        while request := await wire.request():
            if b"/abort_request" in request.line:
                self.aborted.append(orjson.loads(request.body)["rid"])
                self.told.set()
                await wire.send(answer(b"{}"))
                continue
            self.asked.append(orjson.loads(request.body))
            for step in self.script.pop(0):
                if isinstance(step, bytes):
                    await wire.send(step)
                elif isinstance(step, anyio.Event):
                    await step.wait()
                elif step == BREAKS:
                    return
                else:
                    await anyio.sleep(step)


@pytest.fixture
def said(tokenizer: EngineTokenizer) -> Said:
    return Said(tokenizer)


@asynccontextmanager
async def rolling(
    start: Start, checkpoint: str, *flags: str, wait_s: float = 0.0
) -> AsyncIterator[tuple[Running, Attempts, Scripted]]:
    attempts = Attempts()
    async with scripted(attempts.serve) as worker:
        cache = ("--plugin", "radix_cache", "--hf-checkpoint", checkpoint, "--worker-urls", worker.url)
        waits = ("--abort-retry-wait-s", str(wait_s), "--retry-initial-backoff-ms", "10")
        async with start(*cache, *waits, "--disable-health-check", *flags) as running:
            yield running, attempts, worker


async def streamed(running: Running, **body: Any) -> str:
    asked = {"text": PROMPT, "stream": True, "session_id": "s", **body}
    reply = await running.client.post("/generate", json=asked)
    assert reply.status_code == 200, reply.text
    return reply.text


async def left(running: Running, attempts: Attempts, **body: Any) -> None:
    """Ask, and hang up when the worker has done all that it will do, and is to be asked again."""
    asked = {"text": PROMPT, "session_id": "s", **body}
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(lambda: running.client.post("/generate", json=asked))
        await until(lambda: not attempts.script)
        await anyio.sleep(0.1)
        tasks.cancel_scope.cancel()
    await idle(running)


async def leaves(running: Running, session: str = "s") -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = (await running.client.get(f"/trajectories/{session}")).json()[
        "trajectories"
    ]
    return found


async def idle(running: Running) -> None:
    """Return when no worker is leased and no connection to one is busy."""
    router = running.router
    await until(lambda: not router.proxy.busy_connections and not any(one.in_flight for one in router.pool))


def tokens_of(leaf: dict[str, Any]) -> list[int]:
    """Return the sampled tokens."""
    return [one for one, mask in zip(leaf["tokens"], leaf["loss_mask"], strict=True) if mask]


class TestTheEndOfAStream:
    """``[DONE]`` comes as a piece of its own, now and then."""

    async def test_it_is_passed_on_with_an_abort(self, start: Start, checkpoint: str, said: Said) -> None:
        async with rolling(start, checkpoint) as (running, attempts, _):
            aborted = said.event([5, 6], ABORT)
            attempts.script.append(stream(said.event([5]), aborted, 0.1, DONE))
            assert await streamed(running) == (said.event([5]) + aborted + DONE).decode()
            [leaf] = await leaves(running)
        assert tokens_of(leaf) == [5, 6]

    async def test_it_is_written_where_the_worker_breaks_off_behind_an_abort(
        self, start: Start, checkpoint: str, said: Said
    ) -> None:
        async with rolling(start, checkpoint) as (running, attempts, _):
            aborted = said.event([5, 6], ABORT)
            attempts.script.append(stream(said.event([5]), aborted + b"data: [DO", breaks=True))
            assert await streamed(running) == (said.event([5]) + aborted + DONE).decode()

    async def test_the_next_attempt_is_not_aborted_in_the_name_of_the_last_one(
        self, start: Start, checkpoint: str, said: Said
    ) -> None:
        """It has the same rid, and a stream that is given up is aborted at the engine."""
        async with rolling(start, checkpoint, "--resume-aborted") as (running, attempts, worker):
            attempts.script += [
                stream(said.event([5]), said.event([5, 6], ABORT), 0.1, DONE),
                stream(said.event([7], went=2), said.event([7, 8], ABORT, 2), 0.1, DONE),
                stream(said.event([9], LENGTH, 4), DONE),
            ]
            await streamed(running, rid="a")
            assert [body["input_ids"][len(said.prompt) :] for body in attempts.asked] == [
                [],
                [5, 6],
                [5, 6, 7, 8],
            ]
            await anyio.sleep(0.05)
            assert (attempts.aborted, worker.accepted) == ([], 1)
            [leaf] = await leaves(running)
        assert tokens_of(leaf) == [5, 6, 7, 8, 9]


class TestAnAttemptThatIsNone:
    """A bad reply in place of a stream, or of an answer, does not end the client's wait."""

    @pytest.mark.parametrize("resume", [False, True])
    @pytest.mark.parametrize("other", ["json", "nothing", "nonsense", "ids", "broken", "503"])
    async def test_of_a_stream(
        self, start: Start, checkpoint: str, said: Said, resume: bool, other: str
    ) -> None:
        answers: dict[str, list[Step]] = {
            "json": json({"text": "Once upon"}),
            "nothing": stream(),
            "nonsense": stream(b"data: {\n\n") if resume else stream(breaks=True),
            "ids": stream(b"data: %s\n\n" % orjson.dumps({**said.output([], ABORT), "output_ids": 5})),
            "broken": stream(b'data: {"text', breaks=True),
            "503": [answer(b"{}", status=b"503 Busy")],
        }
        flags = ("--resume-aborted", "--disable-retries") if resume else ("--disable-retries",)
        first = [5] if resume else []
        async with rolling(start, checkpoint, *flags) as (running, attempts, _):
            attempts.script += [
                stream(said.event(first, ABORT), DONE),
                answers[other],
                stream(said.event([6, 7], LENGTH, len(first)), DONE),
            ]
            text = await streamed(running)
            events = [orjson.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
            assert text.endswith(DONE.decode())
            assert events[-1]["output_ids"] == [*first, 6, 7]
            [leaf] = await leaves(running)
            await idle(running)
        assert tokens_of(leaf) == [*first, 6, 7]

    @pytest.mark.parametrize("resume", [False, True])
    @pytest.mark.parametrize("other", ["stream", "nonsense", "ids", "text", "503"])
    async def test_of_an_answer(
        self,
        start: Start,
        checkpoint: str,
        said: Said,
        caplog: pytest.LogCaptureFixture,
        resume: bool,
        other: str,
    ) -> None:
        answers: dict[str, list[Step]] = {
            "stream": stream(DONE),
            "nonsense": json({"text": "Once upon"}),
            "ids": json({**said.output([], ABORT), "output_ids": 5}),
            "text": [answer(b"Once upon", b"Content-Type: application/json")],
            "503": [answer(b"{}", status=b"503 Busy")],
        }
        flags = ("--resume-aborted", "--disable-retries") if resume else ("--disable-retries",)
        async with rolling(start, checkpoint, *flags) as (running, attempts, _):
            attempts.script += [json(said.output([5], ABORT)), answers[other]]
            attempts.script += [json(said.output([6, 7], LENGTH, int(resume)))]
            asked = {"text": PROMPT, "session_id": "s"}
            whole = (await running.client.post("/generate", json=asked)).json()
            assert whole["output_ids"] == ([5, 6, 7] if resume else [6, 7])
            found = [tokens_of(leaf) for leaf in await leaves(running)]
            await idle(running)
        assert found == ([[5, 6, 7]] if resume else [[5], [6, 7]])
        assert not any(record.exc_info for record in caplog.records)

    async def test_an_answer_without_tokens_or_end_is_no_progress(
        self, start: Start, checkpoint: str, said: Said
    ) -> None:
        nothing = {"text": "", "output_ids": [], "meta_info": {}}
        flags = ("--resume-aborted", "--abort-retries", "2")
        async with rolling(start, checkpoint, *flags) as (running, attempts, _):
            attempts.script += [json(said.output([5], ABORT)), json(nothing), json(nothing)]
            whole = (await running.client.post("/generate", json={"text": PROMPT, "session_id": "s"})).json()
            [leaf] = await leaves(running)
        assert (whole["output_ids"], whole["meta_info"]["finish_reason"]) == ([5], ABORT)
        assert (len(attempts.asked), tokens_of(leaf)) == (3, [5])

    async def test_attempt_that_counts_a_token_but_sends_none_is_inexact(
        self, start: Start, checkpoint: str, said: Said
    ) -> None:
        silent = said.output([], ABORT, went=1)
        del silent["output_ids"], silent["meta_info"]["output_token_logprobs"]
        silent["meta_info"]["completion_tokens"] = 1
        async with rolling(start, checkpoint, "--resume-aborted") as (running, attempts, _):
            attempts.script += [
                json(said.output([5], ABORT)), json(silent), json(said.output([6, 7], LENGTH, went=1))
            ]  # fmt: skip
            whole = (await running.client.post("/generate", json={"text": PROMPT, "session_id": "s"})).json()
            [leaf] = await leaves(running)
        assert whole["output_ids"] == [5, 6, 7]
        assert (leaf["exact"], leaf["inexact_reason"]) == (False, "engine_contradicts_itself")

    @pytest.mark.parametrize("streams", [False, True])
    async def test_a_text_without_tokens_behind_an_empty_abort_is_passed_on_and_lost(
        self, start: Start, checkpoint: str, said: Said, streams: bool
    ) -> None:
        """An abort out of the waiting queue has no tokens, so that what comes next is no continuation."""
        silent = said.output([6, 7], LENGTH)
        del silent["output_ids"], silent["meta_info"]["output_token_logprobs"]
        asked = {"text": PROMPT, "session_id": "s"}
        async with rolling(start, checkpoint, "--resume-aborted") as (running, attempts, _):
            attempts.script += [json(said.output([5], LENGTH))]
            await running.client.post("/generate", json=asked)
            if streams:
                event = b"data: %s\n\n" % orjson.dumps(silent)
                attempts.script += [stream(said.event([], ABORT), DONE), stream(event, DONE)]
                told = await streamed(running)
                assert told.encode() == event + DONE
            else:
                attempts.script += [json(said.output([], ABORT)), json(silent)]
                assert (await running.client.post("/generate", json=asked)).json() == silent
            session = (await running.client.get("/trajectories/s")).json()
        assert [tokens_of(leaf) for leaf in session["trajectories"]] == [[5]]
        assert not session["complete"]

    @pytest.mark.parametrize("streams", [False, True])
    async def test_a_fault_that_is_found_with_the_request_ends_it(
        self, start: Start, checkpoint: str, said: Said, streams: bool
    ) -> None:
        fault = {"type": "abort", "message": "too long", "status_code": 400}
        async with rolling(start, checkpoint, "--resume-aborted") as (running, attempts, _):
            if streams:
                attempts.script += [
                    stream(said.event([5]), said.event([5], ABORT), DONE),
                    stream(said.event([], fault, went=1), DONE),
                ]
                events = (await streamed(running)).split("\n\n")
                last = orjson.loads(events[-3].removeprefix("data: "))
                assert events[-2:] == ["data: [DONE]", ""]
            else:
                attempts.script += [json(said.output([5], ABORT)), json(said.output([], fault, went=1))]
                last = (await running.client.post("/generate", json={"text": PROMPT})).json()
        assert (last["output_ids"], last["meta_info"]["finish_reason"]) == ([5], fault)
        assert len(attempts.asked) == 2

    async def test_a_resumed_stream_that_breaks_off_has_what_was_told(
        self, start: Start, checkpoint: str, said: Said
    ) -> None:
        async with rolling(start, checkpoint, "--resume-aborted") as (running, attempts, _):
            attempts.script += [
                stream(said.event([5], ABORT), DONE),
                stream(said.event([6], went=1), 0.05, breaks=True),
            ]
            with pytest.raises(httpx.RemoteProtocolError, match="peer closed"):
                await streamed(running)
            await idle(running)
            [leaf] = await leaves(running)
        assert (tokens_of(leaf), leaf["finish_reason"]) == ([5, 6], None)
        assert attempts.script == []


class TestAClientThatLeaves:
    @pytest.mark.parametrize("again", [0, 1])
    async def test_between_two_attempts_at_a_stream_leaves_all_that_was_sampled(
        self, start: Start, checkpoint: str, said: Said, again: int
    ) -> None:
        """The last tokens came with the abort, and the client was not told of them."""
        flags = ("--resume-aborted", "--disable-retries")
        async with rolling(start, checkpoint, *flags, wait_s=20.0) as (running, attempts, _):
            attempts.script.append(stream(said.event([5]), said.event([5, 6], ABORT), DONE))
            if again:
                attempts.script.append(stream(said.event([7], None, 2) + said.event([7, 8], ABORT, 2), DONE))
            attempts.script.append([answer(b"{}", status=b"503 Busy")])
            await left(running, attempts, stream=True)
            [leaf] = await leaves(running)
        assert tokens_of(leaf) == [5, 6, 7, 8][: 2 + 2 * again]

    async def test_while_one_of_a_batch_is_resumed_leaves_the_others(
        self, start: Start, checkpoint: str, said: Said
    ) -> None:
        async with rolling(start, checkpoint, wait_s=20.0) as (running, attempts, _):
            whole, half = said.output([6, 7], LENGTH), said.output([5], ABORT)
            attempts.script.append(json([half, whole]))
            await left(running, attempts, sampling_params={"n": 2})
            found = sorted(tokens_of(leaf) for leaf in await leaves(running))
        assert found == [[5], [6, 7]]

    async def test_while_one_of_a_batch_is_sampled_again_ends_it_there(
        self, start: Start, checkpoint: str, said: Said
    ) -> None:
        """The engine is told, and says what it has: an abort as any other, but nobody waits for better."""
        async with rolling(start, checkpoint) as (running, attempts, _):
            attempts.script.append(json([said.output([5], ABORT), said.output([6, 7], LENGTH, went=1)]))
            attempts.script.append([attempts.told, *json(said.output([8, 9], ABORT))])
            await left(running, attempts, text=[PROMPT, PROMPT + "a"], rid="b")
            await until(lambda: attempts.aborted != [])
            await idle(running)
            found = sorted(tokens_of(leaf) for leaf in await leaves(running))
        assert (len(attempts.asked), attempts.aborted) == (2, ["b_0"])
        assert found == [[5], [6, 7], [8, 9]]


class TestNothingIsRecordedTwice:
    async def test_of_samples_that_read_alike(self, start: Start, checkpoint: str, said: Said) -> None:
        """Two attempts at once, at two samples with the same text, whose logprobs are different."""
        async with rolling(start, checkpoint) as (running, attempts, _):
            attempts.script += [
                json([said.output([], ABORT), said.output([], ABORT), said.output([6, 7], LENGTH, weight=3)]),
                json(said.output([6, 7], LENGTH)),
                json(said.output([6, 7], LENGTH, weight=9)),
            ]
            asked = {"text": PROMPT, "session_id": "s", "sampling_params": {"n": 3}}
            assert (await running.client.post("/generate", json=asked)).status_code == 200
            found = [leaf["rollout_logp"][-1] for leaf in await leaves(running)]
        assert sorted(found) == sorted([-2 / 3, -2 / 7, -2 / 9])

    @pytest.mark.parametrize("streams", [False, True])
    async def test_of_aborts_that_are_passed_on_in_the_end(
        self, start: Start, checkpoint: str, said: Said, streams: bool
    ) -> None:
        """Meanwhile another sample came that reads like it."""

        def attempt(weight: int) -> list[Step]:
            output = said.output([5], ABORT, weight=weight)
            return stream(b"data: %s\n\n" % orjson.dumps(output), DONE) if streams else json(output)

        async with rolling(start, checkpoint, "--abort-retries", "1", wait_s=0.5) as (running, attempts, _):
            asked = {"text": PROMPT, "session_id": "s", "stream": streams}
            refused: list[Step] = [answer(b"{}", status=b"400 No")]
            attempts.script += [attempt(7), attempt(3), refused, refused]
            async with anyio.create_task_group() as tasks:
                for _ in range(2):
                    tasks.start_soon(lambda: running.client.post("/generate", json=asked))
                    await anyio.sleep(0.1)
            found = [leaf["rollout_logp"][-1] for leaf in await leaves(running)]
        assert sorted(found) == [-1 / 3, -1 / 7]


@pytest.mark.parametrize("streams", [False, True])
async def test_an_aborted_sample_is_no_beginning_of_the_one_that_was_made_anew(
    start: Start, checkpoint: str, said: Said, streams: bool
) -> None:
    """Though that begins with the same tokens."""
    async with rolling(start, checkpoint) as (running, attempts, _):
        attempts.script += [
            stream(b"data: %s\n\n" % orjson.dumps(one), DONE) if streams else json(one)
            for one in (said.output([5], ABORT), said.output([5, 6], LENGTH))
        ]
        asked = {"text": PROMPT, "session_id": "s", "stream": streams}
        assert (await running.client.post("/generate", json=asked)).status_code == 200
        assert sorted(tokens_of(leaf) for leaf in await leaves(running)) == [[5], [5, 6]]


@pytest.mark.parametrize("lies", [False, True])
async def test_a_text_behind_half_a_character_lacks_none_of_its_own(
    start: Start, checkpoint: str, said: Said, lies: bool
) -> None:
    """The rest of a character may not be shown; letters that begin behind it are."""
    first, *rest = said.tokenizer.encode("☔")
    assert rest
    letters = said.tokenizer.encode("E") * 2
    ids = letters if lies else [*rest, *letters]
    async with rolling(start, checkpoint, "--resume-aborted") as (running, attempts, _):
        attempts.script += [
            json(said.output([first], ABORT)),
            json({**said.output(ids, LENGTH, went=1), "text": "E" if lies else "EE"}),
        ]
        asked = {"text": PROMPT, "session_id": "s"}
        assert (await running.client.post("/generate", json=asked)).status_code == 200
        [leaf] = await leaves(running)
    assert leaf["inexact_reason"] == ("engine_contradicts_itself" if lies else None)


@pytest.mark.parametrize("streams", [False, True])
async def test_an_attempt_that_ends_without_a_token_is_doubted(
    start: Start, checkpoint: str, said: Said, streams: bool
) -> None:
    """Only an abort comes before a token: an end without one has lost it."""
    whole = said.output([1275], {"type": "stop", "matched": 1275}, went=1)
    meta = {name: value for name, value in whole["meta_info"].items() if name != "output_token_logprobs"}
    first, last = said.output([5], ABORT), {"text": "", "meta_info": meta}
    async with rolling(start, checkpoint, "--resume-aborted") as (running, attempts, _):
        attempts.script += [
            stream(b"data: %s\n\n" % orjson.dumps(one), DONE) if streams else json(one)
            for one in (first, last)
        ]
        asked = {"text": PROMPT, "session_id": "s", "stream": streams}
        assert (await running.client.post("/generate", json=asked)).status_code == 200
        [leaf] = await leaves(running)
    assert leaf["inexact_reason"] == "engine_contradicts_itself"


async def test_a_worker_that_answers_nonsense_is_named_without_a_trace(
    start: Start, checkpoint: str, said: Said, caplog: pytest.LogCaptureFixture
) -> None:
    async with rolling(start, checkpoint) as (running, attempts, worker):
        attempts.script += [
            [answer(b'{"text":', b"Content-Type: application/json")],
            stream(b"data: {\n\n", DONE),
            [answer(b"<html>", b"Content-Type: text/html")],
        ]
        with caplog.at_level(logging.WARNING, logger="slime_radix_cache"):
            for streams in (False, True, False):
                asked = {"text": PROMPT, "stream": streams}
                assert (await running.client.post("/generate", json=asked)).status_code == 200
        stats = (await running.client.get("/cache_stats")).json()
    told = [record for record in caplog.records if record.name == "slime_radix_cache.tally"]
    assert len(told) == 2
    assert all(worker.url in record.getMessage() and not record.exc_info for record in told)
    assert stats["unrecorded"] == {"answer_not_understood": 2, "stream_not_understood": 1}


@pytest.mark.skipif(sys.platform != "linux", reason="its engine is to die with it")
async def test_a_stream_whose_worker_is_killed_leaves_what_came_of_it(
    start: Start, checkpoint: str, tokenizer: EngineTokenizer, tmp_path: Path
) -> None:
    port = free_port()
    engine = Program(["engine", "--port", str(port), "--tokens-per-second", "100"], tmp_path / "engine.log")
    engine.start()
    try:
        cache = ("--plugin", "radix_cache", "--hf-checkpoint", checkpoint, "--disable-health-check")
        async with start(*cache, "--worker-urls", f"http://127.0.0.1:{port}") as running:
            await until(lambda: all(worker.state == "ready" for worker in running.router.pool))
            asked = {"text": PROMPT, "session_id": "s", "stream": True}
            asked["sampling_params"] = {"max_new_tokens": 500, "ignore_eos": True}
            told: dict[str, Any] = {}

            async def read() -> None:
                nonlocal told
                async with running.client.stream("POST", "/generate", json=asked) as reply:
                    async for line in reply.aiter_lines():
                        if line:
                            told = orjson.loads(line[6:])
                        if len(told["output_ids"]) >= 10:
                            engine.kill()

            with pytest.raises(httpx.RemoteProtocolError, match="peer closed"):
                await read()
            await idle(running)
            [leaf] = await leaves(running)
            text = PROMPT + told["text"]
            known = (await running.client.post("/retrieve_from_text", json={"text": text})).json()
    finally:
        engine.kill()
    assert (tokens_of(leaf), leaf["finish_reason"], leaf["exact"]) == (told["output_ids"], None, True)
    logprobs = [logprob for logprob, _, _ in told["meta_info"]["output_token_logprobs"]]
    assert leaf["rollout_logp"][-len(logprobs) :] == logprobs
    assert (known["exact"], known["finish_reason"]) == (True, None)
    size = len(known["tokens"])  # the last ones may show nothing, and the text stands for those that do
    assert known["tokens"] == leaf["tokens"][:size]
    assert not tokenizer.decode(leaf["tokens"][size:], skip_special_tokens=True).strip("\ufffd")
