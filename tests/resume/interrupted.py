"""An engine that samples a tape and aborts where a test wants; it knows what it would have said undisturbed."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from typing import Any

import orjson
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from slime_engine.detokenizer import IncrementalText
from slime_engine.sampling import SamplingParams, parse_sampling_params
from slime_engine.tokenizer import EngineTokenizer

#: ``(new ids, new text, finish reason)``
Step = tuple[int, str, dict[str, Any] | None]


class InterruptedEngine:
    """Samples ``tape``, whatever it is asked, and goes on in it where the ids that it gets end.

    It aborts when so many tokens of the tape are sampled as the next of ``cuts`` says, without a look at the last of
    them, and knows of a stop string or a character only what it samples in one go: both as SGLang does. Each attempt
    has weights of its own.
    """

    def __init__(
        self, tokenizer: EngineTokenizer, tape: list[int], cuts: list[int], *, incremental: bool
    ) -> None:
        self.tokenizer = tokenizer
        self.tape = tape
        self.cuts = list(cuts)
        self.incremental = incremental
        self.prompt: list[int] | None = None
        self.asked: list[dict[str, Any]] = []
        self.app = Starlette(routes=[Route("/generate", self.generate, methods=["POST"])])

    def steps(self, begin: int, params: SamplingParams, cut: int | None) -> Iterator[Step]:
        """Token by token from place ``begin`` of the tape."""
        text, tail = IncrementalText(self.tokenizer, params), b""
        stops = self.tokenizer.eos_ids | params.stop_token_ids
        for place in range(begin, len(self.tape)):
            reason: dict[str, Any] | None = None
            token = self.tape[place]
            if cut is not None and cut <= place + 1:
                last = [token] if cut > place else []
                yield len(last), text.finish(last, {"type": "abort", "message": "Aborted"}), {"type": "abort"}
                return
            tail += self.tokenizer.token_bytes[token]
            if place + 1 - begin >= params.max_new_tokens:
                reason = {"type": "length", "length": params.max_new_tokens}
            elif token in stops and not params.ignore_eos:
                reason = {"type": "stop", "matched": token}
            else:
                matched = next((stop for stop in params.stop if stop.encode() in tail), None)
                reason = {"type": "stop", "matched": matched} if matched is not None else None
            yield 1, text.finish([token], reason) if reason else text.add([token]), reason
            if reason is not None:
                return

    async def generate(self, request: Request) -> Response:
        body = orjson.loads(await request.body())
        self.asked.append(body)
        if self.prompt is None:
            self.prompt = body["input_ids"]
        events = list(self.events(body))
        if not body.get("stream"):
            return Response(orjson.dumps(events[-1]), media_type="application/json")
        return StreamingResponse(self.stream(events), media_type="text/event-stream")

    async def stream(self, events: list[dict[str, Any]]) -> AsyncIterator[bytes]:
        data = b"".join(b"data: %s\n\n" % orjson.dumps(event) for event in events) + b"data: [DONE]\n\n"
        for start in range(0, len(data), 997):  # torn anywhere
            yield data[start : start + 997]

    def events(self, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        assert self.prompt is not None
        assert body["input_ids"][: len(self.prompt)] == self.prompt
        begin = len(body["input_ids"]) - len(self.prompt)
        assert body["input_ids"][len(self.prompt) :] == self.tape[:begin]
        params = parse_sampling_params(body.get("sampling_params") or {}, len(self.tokenizer.token_bytes))
        cut = self.cuts.pop(0) if self.cuts else None
        shown, count = "", 0
        deltas = self.incremental and body.get("stream")
        for new, piece, reason in self.steps(begin, params, cut):
            shown, count = shown + piece, count + new
            start = begin + count - new if deltas else begin
            ids = self.tape[start : begin + count]
            yield {
                "text": piece if deltas else shown,
                "output_ids": ids,
                "meta_info": {
                    "id": body.get("rid", "made"),
                    "finish_reason": reason,
                    "prompt_tokens": len(body["input_ids"]),
                    "completion_tokens": count,
                    "weight_version": str(len(self.asked)),
                    "output_token_logprobs": [
                        [logprob_of(begin_at), one, None] for begin_at, one in enumerate(ids, start)
                    ],
                },
            }

    def uninterrupted(self, **parameters: Any) -> tuple[list[int], str, dict[str, Any] | None]:
        """Ids, text and finish reason without any cut."""
        params = parse_sampling_params(parameters, len(self.tokenizer.token_bytes))
        steps = list(self.steps(0, params, None))
        return self.tape[: len(steps)], "".join(text for _, text, _ in steps), steps[-1][2]


def logprob_of(place: int) -> float:
    """No float32, and another one at each place."""
    return -(place + 1) / 7
