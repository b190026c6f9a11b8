"""An engine that samples what nobody would tokenise, on purpose, and ends and aborts as SGLang does.

What it does it decides from ``sampling_params`` and its luck. ``attempts`` is its journal.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from random import Random
from typing import Any

import anyio
import orjson
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from radix_cache.reading import Detokenizer, finish_reason, stops_of

__all__ = ["Adversary", "Attempt"]

#: A turn is aborted at most so often.
_MOST_ATTEMPTS = 6
_WORDS = (
    "the harbour wakes",
    "Ω≈ç é",
    "日本語 😀",
    " ",
    "\n\n",
    "<think>",
    "</think>",
    "  x=1;",
    "ab",
    "E",
    "☔",
)
_ABORT = {"type": "abort", "message": "new weights"}


@dataclass
class Attempt:
    """One sequence of one request: what was consumed and sampled, with a logprob and a version for each token.

    ``turn`` and ``session`` are the client's names, in headers that the router passes on. ``logprobs`` are the
    engine's own; it ``told`` them or not.
    """

    number: int
    turn: str
    rid: str
    consumed: list[int]
    told: bool
    sampled: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[str | None] = field(default_factory=list)
    reason: dict[str, Any] = field(default_factory=dict)
    held: anyio.Event | None = None


class Adversary:
    """Serves ``/generate`` and ``/abort_request``. Attempts of the turns in ``holding`` wait to be
    aborted, and say so by the event."""

    def __init__(self, reader: Detokenizer, luck: Random, special: Sequence[str], *, aborts: bool) -> None:
        self.reader = reader
        self.luck = luck
        self.aborts = aborts
        self.attempts: list[Attempt] = []
        self.holding: dict[str, anyio.Event] = {}
        self.names: Callable[[int], str] = str
        self.version = 0
        self.incremental = False
        self._special = special
        self._numbers = count(1)
        routes = [
            Route("/generate", self.generate, methods=["POST"]),
            Route("/abort_request", self.abort, methods=["POST"]),
        ]
        self.app = Starlette(routes=routes)

    def of(self, turn: str) -> list[Attempt]:
        """The attempts that were made for a turn."""
        return [attempt for attempt in self.attempts if attempt.turn == turn]

    async def abort(self, request: Request) -> Response:
        prefix = orjson.loads(await request.body())["rid"]
        for attempt in self.attempts:
            if attempt.held is not None and attempt.rid.startswith(prefix):
                attempt.held.set()
        return _json({"success": True})

    async def generate(self, request: Request) -> Response:
        body = orjson.loads(await request.body())
        turn = request.headers["x-turn"]
        before = len(self.of(turn))
        if not before and turn not in self.holding and self.luck.random() < 0.03:
            return Response(b'{"error":{"message":"out of memory"}}', 500, media_type="application/json")
        given = body.get("input_ids")
        if given is None:  # as it is when the tokenizer is refused
            texts = body["text"] if isinstance(body["text"], list) else [body["text"]]
            given = [list(self.reader.tokenizer.encode(text)) for text in texts]
        batch = isinstance(given[0], list)
        prompts = given if batch else [given]
        many = isinstance(body.get("sampling_params"), list)
        parameters = body["sampling_params"] if many else [body.get("sampling_params") or {}] * len(prompts)
        copies = parameters[0].get("n") or 1
        attempts = []
        for place, prompt in enumerate(prompts):
            for _ in range(copies):
                rid = self._rid(body.get("rid"), place, batch, copies)
                attempt = Attempt(len(self.attempts), turn, rid, prompt, bool(body.get("return_logprob")))
                self._sample(attempt, parameters[place], before < _MOST_ATTEMPTS)
                self.attempts.append(attempt)
                attempts.append((attempt, parameters[place]))
        if body.get("stream"):
            events = self._stream(attempts, body)
            return StreamingResponse(events, media_type="text/event-stream")
        for attempt, _ in attempts:
            if attempt.held is not None:
                await attempt.held.wait()
        outputs = [self._output(one, params, len(one.sampled), body) for one, params in attempts]
        return _json(outputs if batch or copies > 1 else outputs[0])

    def _rid(self, rid: Any, place: int, batch: bool, copies: int) -> str:
        if rid is None or copies > 1:
            return f"e{next(self._numbers)}"
        return f"{rid}_{place}" if batch else str(rid)

    # Sampling.

    def _sample(self, attempt: Attempt, parameters: dict[str, Any], may_abort: bool) -> None:
        """Sample until it ends or is aborted; the token of an abort is not looked at."""
        luck = self.luck
        held = attempt.turn in self.holding
        may_abort = may_abort and self.aborts
        if may_abort and not held and luck.random() < 0.05:
            attempt.reason = dict(_ABORT)  # it was waiting
            return
        cut = luck.randint(1, 6) if held or (may_abort and luck.random() < 0.25) else None
        ids = attempt.sampled
        others = [one.sampled for one in self.of(attempt.turn)]
        while True:
            ids.clear()
            for token in self._tokens(parameters):
                ids.append(token)
                ended = finish_reason(self.reader, ids, parameters)
                if len(ids) == cut or (ended and (held or (may_abort and luck.random() < 0.2))):
                    ended = dict(_ABORT)
                if ended:
                    attempt.reason = ended
                    break
            if not others or ids not in others:
                break
        if held:
            attempt.held = anyio.Event()
            self.holding[attempt.turn].set()
        # Divided by 7, no logprob is a float32; no two tokens have the same one.
        attempt.logprobs = [-next(self._numbers) / 7 for _ in ids]
        self._sample_versions(attempt)

    def _sample_versions(self, attempt: Attempt) -> None:
        size = len(attempt.sampled)
        kind = self.luck.random()
        if kind < 0.1:
            attempt.versions = [None] * size
            return
        changed = self.luck.randint(1, size) if kind < 0.3 else size
        attempt.versions = [self.names(self.version)] * changed
        if changed < size or (attempt.reason["type"] == "abort" and self.luck.random() < 0.5):
            self.version += 1
        attempt.versions += [self.names(self.version)] * (size - changed)

    def _tokens(self, parameters: dict[str, Any]) -> Iterator[int]:
        """Words spelt in pieces, characters broken off, special tokens, and beginnings of what would stop it."""
        luck, encode = self.luck, self.reader.tokenizer.encode
        while True:
            kind, word = luck.random(), luck.choice(_WORDS)
            stops = stops_of(parameters)
            if stops and luck.random() < 0.3:
                word = luck.choice(stops)
                word, kind = word[: luck.randint(1, len(word))], 0.0
            if kind < 0.5:
                while word:  # in pieces, so that no merge crosses them
                    size = luck.randint(1, 3)
                    yield from encode(word[:size], add_special_tokens=False)
                    word = word[size:]
            elif kind < 0.65:
                yield from encode(word, add_special_tokens=False)
            elif kind < 0.75:
                whole = list(encode(luck.choice("😀語é"), add_special_tokens=False))
                yield from whole[: luck.randint(1, len(whole))]
            elif kind < 0.85 and self._special:
                yield from encode(luck.choice(self._special), add_special_tokens=False)
            elif kind < 0.88 and parameters.get("stop_token_ids"):
                yield luck.choice(parameters["stop_token_ids"])
            elif kind > 0.9:
                yield luck.choice(sorted(self.reader.eos_ids))

    # Answers.

    def _output(
        self, attempt: Attempt, parameters: dict[str, Any], size: int, body: dict[str, Any]
    ) -> dict[str, Any]:
        last = size == len(attempt.sampled)
        reason = attempt.reason if last else None
        meta: dict[str, Any] = {"id": attempt.rid, "finish_reason": reason, "completion_tokens": size}
        if not attempt.sampled:
            return {"text": "", "output_ids": [], "meta_info": meta}
        ids = attempt.sampled[:size]
        meta["prompt_tokens"] = len(attempt.consumed)
        versions = attempt.versions[:size]
        if versions[-1] is not None:
            meta["weight_version"] = versions[-1]
        if len(set(versions)) > 1:
            change = versions.index(versions[-1])
            meta["weight_versions"] = [
                {"version": versions[0], "start": 0, "end": change},
                {"version": versions[-1], "start": change, "end": size},
            ]
        if attempt.told:
            pairs = zip(attempt.logprobs[:size], ids, strict=True)
            meta["output_token_logprobs"] = [[logprob, token, None] for logprob, token in pairs]
            if (body.get("logprob_start_len") or -1) >= 0:
                start = body["logprob_start_len"]
                meta["input_token_logprobs"] = [[None, one, None] for one in attempt.consumed[start:]]
        text = self.reader.text(attempt.consumed, ids, parameters, reason)
        return {"text": text, "output_ids": ids, "meta_info": meta}

    async def _stream(
        self, attempts: Sequence[tuple[Attempt, dict[str, Any]]], body: dict[str, Any]
    ) -> AsyncIterator[bytes]:
        incremental = self.incremental
        for index, (attempt, parameters) in enumerate(attempts):
            told, before, size = "", 0, 0
            while True:
                size = min(size + self.luck.choice((1, 1, 2)), len(attempt.sampled))
                if size == len(attempt.sampled) and attempt.held is not None:
                    await attempt.held.wait()
                event = self._output(attempt, parameters, size, body)
                if incremental:
                    event["text"], told = event["text"][len(told) :], event["text"]
                    del event["output_ids"][:before]
                    if "output_token_logprobs" in event["meta_info"]:
                        del event["meta_info"]["output_token_logprobs"][:before]
                    before = size
                yield b"data: %s\n\n" % orjson.dumps(event | ({"index": index} if len(attempts) > 1 else {}))
                if size == len(attempt.sampled):
                    break
        yield b"data: [DONE]\n\n"


def _json(value: Any) -> Response:
    return Response(orjson.dumps(value), media_type="application/json")
