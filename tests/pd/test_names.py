"""Another attempt at an engine that has not done with the one before: the name of a request is given once."""

from __future__ import annotations

from typing import Any

import anyio
import pytest
from starlette.applications import Starlette
from starlette.responses import Response

from pd.checked import SAMPLING, check
from pd.halves import Pairs, disaggregated
from plugged import until
from router_core.types import ASGIApp, Message, Receive, Scope, Send
from routers import Start
from slime_engine.model import NgramModel

pytestmark = pytest.mark.anyio

HURRY = ("--retry-initial-backoff-ms", "1")


class SlowToHear:
    """Fronts of the engines of pairs, the first attempt at which fails while the decode engine holds it.

    The decode engine reads that attempt after its abort, which came by another connection, and sees only when another
    generation has ended that nobody waits for it. SGLang looks for clients that have gone every few seconds.
    """

    def __init__(self) -> None:
        self._arrived, self._aborted, self._over = anyio.Event(), anyio.Event(), anyio.Event()
        self._failed = False

    def prefill(self, app: Starlette) -> ASGIApp:
        async def front(scope: Scope, receive: Receive, send: Send) -> None:
            if scope.get("path") != "/generate" or self._failed:
                await app(scope, receive, send)
                return
            self._failed = True
            await self._arrived.wait()
            await Response(status_code=503)(scope, receive, send)

        return front

    def decode(self, app: Starlette) -> ASGIApp:
        async def front(scope: Scope, receive: Receive, send: Send) -> None:
            path = scope.get("path")
            if path == "/generate" and not self._arrived.is_set():
                await self._hold(app, scope, await receive(), send)
                return
            if path == "/generate":
                await until(lambda: len(app.state.host.engine.scheduler.waiting) > 0)
            await app(scope, receive, send)
            if path == "/abort_request":
                self._aborted.set()
            elif path == "/generate":
                self._over.set()

        return front

    async def _hold(self, app: Starlette, scope: Scope, body: Message, send: Send) -> None:
        self._arrived.set()
        await self._aborted.wait()
        messages = [body]

        async def receive() -> Message:
            if messages:
                return messages.pop()
            await self._over.wait()
            return {"type": "http.disconnect"}

        await app(scope, receive, send)


def slow_to_hear() -> dict[str, Any]:
    """Return fleet options that make both engines of a pair slow to hear."""
    fronts = SlowToHear()
    return {"prefills": 2, "prefill_front": fronts.prefill, "decode_front": fronts.decode}


async def told(pairs: Pairs, output: dict[str, Any]) -> None:
    """``output`` is what the second attempt at the decode engine has come to, under a name of its own."""
    first, second = pairs.decodes[0].journal()
    assert first["rid"] != second["rid"] == output["meta_info"]["id"]
    assert first["output_ids"] == []
    check(pairs, output)


@pytest.mark.parametrize("given", [{}, {"rid": None}])
async def test_a_name_that_the_router_made_is_made_anew(
    start: Start, model: NgramModel, given: dict[str, Any]
) -> None:
    async with disaggregated(start, model, *HURRY, **slow_to_hear()) as pairs:
        await told(pairs, await pairs.generate(sampling_params=SAMPLING, **given))


async def test_a_name_of_the_clients_stays(start: Start, model: NgramModel) -> None:
    async with disaggregated(start, model, *HURRY, **slow_to_hear()) as pairs:
        answer = await pairs.generate(400, sampling_params=SAMPLING, rid="mine")
        assert "Duplicate request ID" in answer["error"]["message"]


async def test_a_request_with_a_new_name_is_aborted_under_that(start: Start, model: NgramModel) -> None:
    async with disaggregated(
        start, model, *HURRY, decode={"tokens_per_second": 50}, **slow_to_hear()
    ) as pairs:
        answers: list[dict[str, Any]] = []

        async def ask() -> None:
            answers.append(await pairs.generate(sampling_params={"max_new_tokens": 400, "ignore_eos": True}))

        def second() -> dict[str, Any]:
            return pairs.decodes[0].journal()[-1]

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(ask)
            await until(lambda: len(pairs.decodes[0].journal()) == 2 and len(second()["output_ids"]) > 2)
            await pairs.running.client.post("/abort_request", json={"rid": second()["rid"]})
        assert answers[0]["meta_info"]["finish_reason"]["type"] == "abort"
        await told(pairs, answers[0])


@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_under_a_new_name_is_recorded(
    start: Start, model: NgramModel, checkpoint: str, stream: bool
) -> None:
    flags = ("--plugin", "radix_cache", "--hf-checkpoint", checkpoint)
    async with disaggregated(start, model, *HURRY, *flags, **slow_to_hear()) as pairs:
        body = {"text": "Once", "sampling_params": SAMPLING, "stream": stream}
        answer = await pairs.running.client.post("/generate", json=body)
        assert answer.status_code == 200, answer.text
        _, written = pairs.decodes[0].journal()
        told = await pairs.running.client.post("/retrieve_from_text", json={"text": "Once" + written["text"]})
        assert told.json()["exact"], told.json()["inexact_reason"]
        assert told.json()["tokens"] == written["input_ids"] + written["output_ids"]
