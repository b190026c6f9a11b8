"""An engine with SGLang's HTTP protocol that samples what a test wants, and keeps a journal."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from typing import Any

import anyio
import orjson
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from router_core.types import Tokenizer

__all__ = ["FakeEngine"]

_JSON = "application/json"


class FakeEngine:
    """``app`` is to be served by :func:`slime_testing.serving`; a test may add routes to it, at the front.

    It answers each ``/generate`` with the next of ``script``. That is a list of token ids to sample, which need a
    ``tokenizer``; or an answer as a dict, the only event of a stream; or a status and a body. A sequence that ends
    with ``eos`` stops there, any other one ends by its length. All other paths are answered with ``{}``.

    ``asked`` are the bodies that it got at ``/generate`` and ``headers`` those of the same requests, ``calls`` the
    others as ``(path, body)``.
    ``consumed`` and ``sampled`` are the journal: the ids of each prompt, and those sampled for it with their logprobs.
    ``said`` are the outputs for each, of which an answer is the last.

    ``meta`` is put over every ``meta_info``, None values taking keys away; ``edit(output, is_last)`` may change each
    output, which has all of the sequence so far. With ``incremental`` the events of a stream
    are deltas. A stream is sent in ``pieces`` of that many bytes, and breaks off after ``events_sent`` events. Answers
    wait for ``delay``, and streams for ``hold`` after ``hold_after`` events.
    """

    def __init__(self, tokenizer: Tokenizer | None = None, *, eos: int | None = None) -> None:
        self.tokenizer = tokenizer
        self.eos = eos
        self.script: list[list[int] | dict[str, Any] | tuple[int, bytes]] = []
        self.asked: list[dict[str, Any]] = []
        self.headers: list[Mapping[str, str]] = []
        self.calls: list[tuple[str, bytes]] = []
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
        self.app = Starlette(routes=[generate, Route("/{path:path}", self._call, methods=["GET", "POST"])])

    async def _call(self, request: Request) -> Response:
        self.calls.append((request.url.path, await request.body()))
        return JSONResponse({})

    async def _generate(self, request: Request) -> Response:
        body = orjson.loads(await request.body())
        self.asked.append(body)
        self.headers.append(request.headers)
        if not self.script:
            return JSONResponse({"error": {"message": "the script of the fake engine is at its end"}}, 500)
        answer = self.script.pop(0)
        if self.delay is not None:
            await self.delay.wait()
        if isinstance(answer, tuple):
            status, content = answer
            return Response(content, status, media_type=self.media_type)
        outputs = [answer] if isinstance(answer, dict) else list(self._outputs(body, answer))
        self.said.append(outputs)
        if body.get("stream"):
            return StreamingResponse(self._stream(outputs), media_type="text/event-stream")
        return Response(orjson.dumps(outputs[-1]), media_type=_JSON)

    def _outputs(self, body: dict[str, Any], ids: list[int]) -> Iterator[dict[str, Any]]:
        """Yield what is told after each of ``ids`` for a stream; else only the last, the whole answer."""
        tokenizer = self.tokenizer
        if tokenizer is None:
            raise ValueError("wanted a tokenizer for a script of ids, got None")
        prompt = list(body.get("input_ids") or tokenizer.encode(body["text"]))
        # Divided by 7, no logprob is a float32; the sum makes each one different.
        logprobs = [-(place + token) / 7 for place, token in enumerate(ids)]
        self.consumed.append(prompt)
        self.sampled.append((ids, logprobs))
        streams = bool(body.get("stream"))
        told = ""
        for end in range(1 if streams else len(ids), len(ids) + 1):
            output = self._output(
                tokenizer, body, len(prompt), ids[:end], logprobs[:end], last=end == len(ids)
            )
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
        self,
        tokenizer: Tokenizer,
        body: dict[str, Any],
        prompt_tokens: int,
        ids: list[int],
        logprobs: list[float],
        *,
        last: bool,
    ) -> dict[str, Any]:
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
            meta["output_token_logprobs"] = [
                [value, token, None] for value, token in zip(logprobs, ids, strict=True)
            ]
        meta |= self.meta
        return {
            "text": tokenizer.decode(shown, skip_special_tokens=parameters.get("skip_special_tokens", True)),
            "output_ids": ids,
            "meta_info": {
                key: value for key, value in meta.items() if value is not None or key == "finish_reason"
            },
        }

    async def _stream(self, outputs: list[dict[str, Any]]) -> AsyncIterator[bytes]:
        events = [b"data: %s\n\n" % orjson.dumps(output) for output in outputs]
        events.append(b"data: [DONE]\n\n")
        if self.hold is not None:
            for event in events[: self.hold_after]:
                yield event
            await self.hold.wait()
            del events[: self.hold_after]
        data = b"".join(events[: self.events_sent])
        for start in range(0, len(data), self.pieces):
            yield data[start : start + self.pieces]


def _unchanged(_output: dict[str, Any], _is_last: bool) -> None:
    pass
