"""A fake engine with SGLang's HTTP protocol: a test decides what it samples, and reads its journal."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any, NamedTuple

import anyio
import orjson
from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from router_core.types import Tokenizer

__all__ = ["Call", "FakeEngine"]

_JSON = "application/json"
#: A status and a body; or a response, which may have its own headers and stream.
Reply = tuple[int, bytes] | Response
#: Ids to sample; one output; the outputs of a stream; a stream for each sequence; or a reply.
Answer = list[int] | dict[str, Any] | list[dict[str, Any]] | list[list[dict[str, Any]]] | Reply


class Call(NamedTuple):
    """A request to another path than ``/generate``."""

    method: str
    path: str
    body: bytes
    headers: Headers


class FakeEngine:
    """A worker with SGLang's protocol; a test serves ``app``, and may add routes to it at the front.

    Each ``/generate`` gets the next answer of ``script``, and after the end of the script ``rest(body)``. An answer is

    - a list of token ids to sample, which needs a ``tokenizer``. A sequence whose last id is ``eos`` stops there;
    - an output, or a list of a stream's outputs, whose last one is the whole answer;
    - a list of lists of outputs, one list for each sequence of a batch; or
    - a status and a body, or a response, which may have its own headers and stream.

    Other paths get their reply in ``answers``, or else ``other(call)``, which returns ``{}`` unless a test replaces it.
    ``rest`` and ``other`` may be asynchronous.

    ``asked`` has the bodies of ``/generate`` and ``headers`` their headers; ``calls`` has the other requests.
    ``consumed`` and ``sampled`` are the journal: the ids of each prompt, and the ids sampled for it with their
    logprobs. ``said`` has the outputs of each sequence.

    In the outputs of sampled ids, ``meta`` overrides keys of ``meta_info``. The value None removes any key but
    ``finish_reason``. Then ``edit(output, is_last)`` may change each of these outputs. With ``incremental``, the
    outputs of a stream become deltas after that.

    A stream is sent in pieces of ``pieces`` bytes, and ends after ``events_sent`` events at the latest. If ``hold`` is
    an ``anyio.Event``, the stream first sends ``hold_after`` events, waits until ``hold`` is set, and counts
    ``events_sent`` from there. If ``delay`` is an ``anyio.Event``, answers to ``/generate`` wait until ``delay`` is
    set; a request to ``/abort_request`` sets it.
    """

    def __init__(self, tokenizer: Tokenizer | None = None, *, eos: int | None = None) -> None:
        self.tokenizer = tokenizer
        self.eos = eos
        self.script: list[Answer] = []
        self.rest: Callable[[dict[str, Any]], Answer | Awaitable[Answer]] = _script_ended
        self.answers: dict[str, Reply] = {}
        self.other: Callable[[Call], Reply | Awaitable[Reply]] = _empty_object
        self.asked: list[dict[str, Any]] = []
        self.headers: list[Headers] = []
        self.calls: list[Call] = []
        self.consumed: list[list[int]] = []
        self.sampled: list[tuple[list[int], list[float]]] = []
        self.said: list[list[dict[str, Any]]] = []
        self.meta: dict[str, Any] = {}
        self.edit: Callable[[dict[str, Any], bool], object] = _unchanged
        self.media_type = _JSON
        self.incremental = False
        self.pieces = 1 << 20
        self.events_sent = 1 << 20
        self.delay: anyio.Event | None = None
        self.hold: anyio.Event | None = None
        self.hold_after = 0
        generate = Route("/generate", self._generate, methods=["POST"])
        other = Route("/{path:path}", self._call, methods=["GET", "POST", "PUT", "PATCH", "DELETE"])
        self.app = Starlette(routes=[generate, other])

    async def _call(self, request: Request) -> Response:
        call = Call(request.method, request.url.path, await request.body(), request.headers)
        self.calls.append(call)
        if call.path == "/abort_request" and self.delay is not None:
            self.delay.set()
        reply = self.answers[call.path] if call.path in self.answers else self.other(call)
        return _response(await reply if isinstance(reply, Awaitable) else reply, _JSON)

    async def _generate(self, request: Request) -> Response:
        body = orjson.loads(await request.body())
        self.asked.append(body)
        self.headers.append(request.headers)
        answer = self.script.pop(0) if self.script else self.rest(body)
        if isinstance(answer, Awaitable):
            answer = await answer
        if self.delay is not None:
            await self.delay.wait()
        if isinstance(answer, tuple | Response):
            return _response(answer, self.media_type)
        sequences = self._sequences(body, answer)
        self.said += sequences
        several = isinstance(answer, list) and isinstance(answer[0], list)
        if body.get("stream"):
            events = [(place, event) for place, outputs in enumerate(sequences) for event in outputs]
            numbered = [{"index": place, **event} if several else event for place, event in events]
            return StreamingResponse(self._stream(numbered, self.hold), media_type="text/event-stream")
        whole = [outputs[-1] for outputs in sequences]
        return Response(orjson.dumps(whole if several else whole[0]), media_type=_JSON)

    def _sequences(self, body: dict[str, Any], answer: Any) -> list[list[dict[str, Any]]]:
        if isinstance(answer, dict):
            return [[answer]]
        if isinstance(answer[0], int):
            return [list(self._outputs(body, answer))]
        return [*answer] if isinstance(answer[0], list) else [answer]

    def _outputs(self, body: dict[str, Any], ids: list[int]) -> Iterator[dict[str, Any]]:
        """Yield the output after each of ``ids`` for a stream, else only the whole answer."""
        tokenizer = self.tokenizer
        if tokenizer is None:
            raise ValueError("wanted a tokenizer for a script of ids, got None")
        prompt = list(body.get("input_ids") or tokenizer.encode(body["text"]))
        # Most sevenths are not exact in float32, so rounding shows; the place makes logprobs of equal tokens differ.
        logprobs = [-(place + token) / 7 for place, token in enumerate(ids)]
        self.consumed.append(prompt)
        self.sampled.append((ids, logprobs))
        sampled = list(zip(logprobs, ids, strict=True))
        streams = bool(body.get("stream"))
        told = ""
        for end in range(1 if streams else len(ids), len(ids) + 1):
            output = self._output(tokenizer, body, len(prompt), sampled[:end], end == len(ids))
            self.edit(output, end == len(ids))
            if end < len(ids):
                output["text"] = output["text"].rstrip("\ufffd")
            if self.incremental and streams:
                output["text"], told = output["text"][len(told) :], output["text"]
                output["output_ids"] = ids[end - 1 : end]
                if "output_token_logprobs" in output["meta_info"]:
                    del output["meta_info"]["output_token_logprobs"][:-1]
            yield output

    def _output(
        self, tokenizer: Tokenizer, body: dict[str, Any], prompt_tokens: int, sampled: list[Any], last: bool
    ) -> dict[str, Any]:
        ids = [token for _, token in sampled]
        parameters = body.get("sampling_params") or {}
        stopped = ids[-1] == self.eos
        shown = ids[:-1] if stopped and not parameters.get("no_stop_trim") else ids
        reason = {"type": "stop", "matched": self.eos} if stopped else {"type": "length", "length": len(ids)}
        meta: dict[str, Any] = {
            "id": body["rid"] if isinstance(body.get("rid"), str) else "r",
            "finish_reason": reason if last else None,
            "prompt_tokens": prompt_tokens,
            "weight_version": "1",
            "completion_tokens": len(ids),
        }
        if body.get("return_logprob"):
            meta["output_token_logprobs"] = [[value, token, None] for value, token in sampled]
        meta |= self.meta
        return {
            "text": tokenizer.decode(shown, skip_special_tokens=parameters.get("skip_special_tokens", True)),
            "output_ids": ids,
            "meta_info": {
                key: value for key, value in meta.items() if value is not None or key == "finish_reason"
            },
        }

    async def _stream(self, outputs: list[dict[str, Any]], hold: anyio.Event | None) -> AsyncIterator[bytes]:
        events = [b"data: %s\n\n" % orjson.dumps(output) for output in outputs]
        events.append(b"data: [DONE]\n\n")
        if hold is not None:
            for event in events[: self.hold_after]:
                yield event
            await hold.wait()
            del events[: self.hold_after]
        data = b"".join(events[: self.events_sent])
        for start in range(0, len(data), self.pieces):
            yield data[start : start + self.pieces]


def _script_ended(_body: dict[str, Any]) -> Answer:
    return 500, b'{"error":{"message":"the script of the fake engine is at its end"}}'


def _empty_object(_call: Call) -> Reply:
    return 200, b"{}"


def _response(reply: Reply, media_type: str) -> Response:
    if isinstance(reply, Response):
        return reply
    status, content = reply
    return Response(content, status, media_type=media_type)


def _unchanged(_output: dict[str, Any], _is_last: bool) -> None:
    pass
