"""An engine that writes its aborts as SGLang's ``TokenizerManager`` does, in each of their shapes."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any, Literal, Protocol

import orjson
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

__all__ = ["SHAPES", "AbortingEngine", "Shape"]

#: ``running``: an ordinary event with another reason. ``waiting``: out of the waiting queue, to which running sequences
#: may have to return. ``unread``: the same, in one event with the deltas before it. ``bare``: older versions.
Shape = Literal["running", "waiting", "unread", "bare"]
SHAPES: tuple[Shape, ...] = ("running", "waiting", "unread", "bare")


class Decoder(Protocol):
    """The tokenizer, as far as it is needed."""

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str: ...


class AbortingEngine:
    """Samples ``tape`` for every prompt, and goes on in it behind ids that end with its beginning.

    Each request takes the next of ``cuts``: after so many tokens of the tape its sequences are aborted; None: not at
    all. ``asked`` are the bodies that it got. By the number of a request, from 1: ``lies`` are put over the
    ``meta_info`` of its events; those in ``misspelt`` have another text. Streamed sequences are numbered from
    ``first_index``.
    """

    def __init__(
        self, tokenizer: Decoder, tape: list[int], shape: Shape, *, incremental: bool = False
    ) -> None:
        self.tokenizer = tokenizer
        self.tape = tape
        self.shape = shape
        self.incremental = incremental
        self.cuts: list[int | None] = []
        self.asked: list[dict[str, Any]] = []
        self.lies: dict[int, dict[str, Any]] = {}
        self.misspelt: set[int] = set()
        self.first_index = 0
        self.app = Starlette(
            routes=[
                Route("/generate", self.generate, methods=["POST"]),
                Route("/abort_request", lambda _: Response(b"{}"), methods=["POST"]),
                Route("/health", lambda _: Response(b"")),
            ]
        )

    async def generate(self, request: Request) -> Response:
        body = orjson.loads(await request.body())
        self.asked.append(body)
        cut = self.cuts.pop(0) if self.cuts else None
        given = body["input_ids"]
        parameters = body.get("sampling_params") or {}
        many = isinstance(given[0], list) or (parameters.get("n") or 1) > 1
        prompts = [
            one
            for one in (given if isinstance(given[0], list) else [given])
            for _ in range(parameters.get("n") or 1)
        ]
        if body.get("stream"):
            return StreamingResponse(self.stream(body, prompts, cut, many), media_type="text/event-stream")
        answers = [list(self.events(body, one, cut, place, many))[-1] for place, one in enumerate(prompts)]
        return Response(orjson.dumps(answers if many else answers[0]), media_type="application/json")

    async def stream(
        self, body: dict[str, Any], prompts: list[list[int]], cut: int | None, many: bool
    ) -> AsyncIterator[bytes]:
        for place, prompt in enumerate(prompts):
            for event in self.events(body, prompt, cut, place, many):
                told = {**event, "index": self.first_index + place} if many else event
                yield b"data: %s\n\n" % orjson.dumps(told)
        yield b"data: [DONE]\n\n"

    def events(
        self, body: dict[str, Any], prompt: list[int], cut: int | None, place: int, many: bool
    ) -> Iterator[dict[str, Any]]:
        """Those of one sequence; an unstreamed request gets the last one."""
        number = len(self.asked)
        begin = next(
            size for size in range(len(self.tape), -1, -1) if prompt[len(prompt) - size :] == self.tape[:size]
        )
        end = len(self.tape) if cut is None else cut
        deltas = bool(self.incremental and body.get("stream"))
        rid = f"{body.get('rid', 'made')}_{place}" if many else body.get("rid", "made")

        def event(start: int, stop: int, reason: dict[str, Any] | None) -> dict[str, Any]:
            ids = self.tape[start if deltas else begin : stop]
            meta: dict[str, Any] = {
                "id": rid,
                "finish_reason": reason,
                "prompt_tokens": len(prompt),
                "weight_version": "1",
                "completion_tokens": stop - begin,
            }
            if body.get("return_logprob"):
                meta["output_token_logprobs"] = self.logprobs(start if deltas else begin, stop)
                meta["output_token_logprobs_length"] = stop - begin
            meta |= self.lies.get(number, {})
            text = self.tokenizer.decode(ids)
            return {
                "text": text.upper() if number in self.misspelt else text,
                "output_ids": ids,
                "meta_info": meta,
            }

        aborted = {"type": "abort", "message": "Abort in waiting queue"}
        last = max(begin, end - 1) if self.shape in ("running", "unread") or cut is None else end
        for stop in range(begin + 1, last + 1):
            yield event(stop - 1, stop, None)
        if cut is None:
            yield event(last, end, {"type": "length", "length": end - begin})
        elif self.shape == "running" or begin == end:
            yield event(last, end, aborted)
        elif self.shape == "bare":
            yield {"meta_info": {"id": rid, "finish_reason": aborted}}
        else:
            deltas, streams = False, bool(body.get("stream"))
            abort = event(begin, end, aborted)
            del abort["meta_info"]["prompt_tokens"]
            abort["output_ids"] = abort["output_ids"][-1:] if streams else abort["output_ids"]
            if self.incremental and streams and self.shape == "unread":
                deltas = True
                unread = event(last, end, None)
                abort["text"] = unread["text"] + abort["text"]
                abort["output_ids"] = unread["output_ids"] + abort["output_ids"]
                if body.get("return_logprob"):
                    told = (
                        unread["meta_info"]["output_token_logprobs"]
                        + abort["meta_info"]["output_token_logprobs"]
                    )
                    abort["meta_info"]["output_token_logprobs"] = told
            yield abort

    def logprobs(self, start: int, stop: int) -> list[Any]:
        return [[-(place + 1) / 7, self.tape[place], None] for place in range(start, stop)]
