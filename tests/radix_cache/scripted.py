"""An engine that samples what a test wants, and keeps a journal; and rollout code that talks to it."""

from __future__ import annotations

from array import array
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import anyio
import orjson
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from router_core.serving import serving
from routers import BARE
from slime_engine.tokenizer import EngineTokenizer

if TYPE_CHECKING:
    from routers import Running, Start


def bits(values: list[float]) -> bytes:
    """So that equality means bit for bit."""
    return array("d", values).tobytes()


class ScriptedEngine:
    """Answers ``/generate`` with the next of ``script``: token ids to sample, or a whole answer (status, body).

    ``asked`` are the bodies it got, ``consumed`` and ``sampled`` the journal. ``meta`` is put over every
    ``meta_info``, None values taking keys away. A stream is sent in ``pieces`` of that many bytes, and breaks off
    after ``events_sent`` events. Answers wait for ``delay``,
    and streams for ``hold`` after ``hold_after`` events.
    """

    def __init__(self, tokenizer: EngineTokenizer) -> None:
        self.tokenizer = tokenizer
        self.script: list[list[int] | tuple[int, bytes]] = []
        self.asked: list[dict[str, Any]] = []
        self.consumed: list[list[int]] = []
        self.sampled: list[tuple[list[int], list[float]]] = []
        self.meta: dict[str, Any] = {}
        self.media_type = "application/json"
        self.incremental = False
        self.pieces = 1 << 20
        self.events_sent = 1 << 20
        self.delay: anyio.Event | None = None
        self.hold: anyio.Event | None = None
        self.hold_after = 0
        self.app = Starlette(routes=[Route("/generate", self.generate, methods=["POST"])])

    async def generate(self, request: Request) -> Response:
        body = orjson.loads(await request.body())
        self.asked.append(body)
        answer = self.script.pop(0)
        if self.delay is not None:
            await self.delay.wait()
        if isinstance(answer, tuple):
            status, content = answer
            return Response(content, status, media_type=self.media_type)
        self.consumed.append(body.get("input_ids") or self.tokenizer.encode(body["text"]))
        # Divided by 7, no logprob is a float32; the sum makes each one different.
        logprobs = [-(place + token) / 7 for place, token in enumerate(answer)]
        self.sampled.append((answer, logprobs))
        if body.get("stream"):
            return StreamingResponse(self.stream(body, answer, logprobs), media_type="text/event-stream")
        return Response(orjson.dumps(self.output(body, answer, logprobs)), media_type="application/json")

    def output(
        self, body: dict[str, Any], ids: list[int], logprobs: list[float], last: bool = True
    ) -> dict[str, Any]:
        parameters = body.get("sampling_params") or {}
        stopped = ids[-1:] == [self.eos]
        shown = ids[:-1] if stopped and not parameters.get("no_stop_trim") else ids
        text = self.tokenizer.decode(shown, skip_special_tokens=parameters.get("skip_special_tokens", True))
        reason = {"type": "stop", "matched": self.eos} if stopped else {"type": "length", "length": len(ids)}
        meta: dict[str, Any] = {
            "id": body["rid"] if isinstance(body.get("rid"), str) else "r",
            "finish_reason": reason if last else None,
            "prompt_tokens": len(self.consumed[-1]),
            "weight_version": "1",
            "completion_tokens": len(ids),
        }
        if body.get("return_logprob"):
            meta["output_token_logprobs"] = [
                [value, token, None] for value, token in zip(logprobs, ids, strict=True)
            ]
        told = {
            key: value
            for key, value in (meta | self.meta).items()
            if value is not None or key == "finish_reason"
        }
        return {"text": text, "output_ids": ids, "meta_info": told}

    async def stream(
        self, body: dict[str, Any], ids: list[int], logprobs: list[float]
    ) -> AsyncIterator[bytes]:
        events = [b"data: %s\n\n" % event for event in self.events(body, ids, logprobs)]
        events.append(b"data: [DONE]\n\n")
        if self.hold is not None:
            for event in events[: self.hold_after]:
                yield event
            await self.hold.wait()
            del events[: self.hold_after]
        data = b"".join(events[: self.events_sent])
        for start in range(0, len(data), self.pieces):
            yield data[start : start + self.pieces]

    def events(self, body: dict[str, Any], ids: list[int], logprobs: list[float]) -> Iterator[bytes]:
        told = ""
        for end in range(1, len(ids) + 1):
            output = self.output(body, ids[:end], logprobs[:end], last=end == len(ids))
            if end < len(ids):
                output["text"] = output["text"].rstrip("\ufffd")
            if self.incremental:
                output["text"], told = output["text"][len(told) :], output["text"]
                output["output_ids"] = ids[end - 1 : end]
                if "output_token_logprobs" in output["meta_info"]:
                    output["meta_info"]["output_token_logprobs"] = output["meta_info"][
                        "output_token_logprobs"
                    ][-1:]
            yield orjson.dumps(output)

    @property
    def eos(self) -> int:
        return self.tokenizer.encode("<|im_end|>")[0]


@dataclass
class Client:
    """A client that does what rollout code does."""

    running: Running
    engine: ScriptedEngine

    async def generate(self, text: str, ids: list[int], session: str = "", **body: Any) -> dict[str, Any]:
        """One turn in which the engine samples ``ids``."""
        self.engine.script.append(ids)
        headers = {"x-session-id": session} if session else {}
        answer = await self.running.client.post("/generate", json={"text": text, **body}, headers=headers)
        assert answer.status_code == 200, answer.text
        document: dict[str, Any] = answer.json()
        return document

    async def give(self, given: list[int], ids: list[int], session: str = "") -> dict[str, Any]:
        """One turn of which the prompt is given as ids."""
        self.engine.script.append(ids)
        body = {"input_ids": given, "session_id": session}
        answer = await self.running.client.post("/generate", json=body)
        assert answer.status_code == 200, answer.text
        document: dict[str, Any] = answer.json()
        return document

    async def records(self, session: str) -> list[dict[str, Any]]:
        """The leaves of a session."""
        answer = await self.running.client.get(f"/trajectories/{session}")
        assert answer.status_code == 200, answer.text
        leaves: list[dict[str, Any]] = answer.json()["trajectories"]
        return leaves

    async def retrieve(self, text: str, **body: Any) -> dict[str, Any]:
        answer = await self.running.client.post("/retrieve_from_text", json={"text": text, **body})
        assert answer.status_code == 200, answer.text
        document: dict[str, Any] = orjson.loads(answer.content)
        return document

    async def stats(self) -> dict[str, Any]:
        document: dict[str, Any] = (await self.running.client.get("/cache_stats")).json()
        return document

    def last(self) -> tuple[list[int], list[int], bytes]:
        """Tokens, mask and logprobs of the journal's last entry."""
        consumed, (ids, logprobs) = self.engine.consumed[-1], self.engine.sampled[-1]
        return consumed + ids, [0] * len(consumed) + [1] * len(ids), bits([0.0] * len(consumed) + logprobs)


@asynccontextmanager
async def routed(start: Start, engine: ScriptedEngine, checkpoint: str, *flags: str) -> AsyncIterator[Client]:
    async with (
        serving(engine.app) as url,
        start(
            *(*BARE, "--plugin", "radix_cache", "--hf-checkpoint", checkpoint),
            *("--worker-urls", url, *flags),
        ) as running,
    ):
        yield Client(running, engine)


def lifespan_free(app: Any) -> Any:
    """``app`` for HTTP only; the server's own start and end are answered here."""

    async def wrapped(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "lifespan":
            await app(scope, receive, send)
            return
        for kind in ("startup", "shutdown"):
            assert (await receive())["type"] == f"lifespan.{kind}"
            await send({"type": f"lifespan.{kind}.complete"})

    return wrapped
