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
from starlette.responses import Response, StreamingResponse

from radix_cache.machine.experts import tell_experts
from radix_cache.machine.lies import can_be_told, tell
from radix_cache.machine.reading import Detokenizer, finish_reason, stops_of
from slime_testing import Call, FakeEngine

__all__ = ["Adversary", "Attempt", "Pause"]

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
#: Shapes of an abort: as any other end, or as SGLang does out of its queue, or with nothing but the reason.
_SHAPES = ("plain", "queue", "bare")


@dataclass
class Pause:
    """The answer of a turn stops after ``events`` events of a stream, or before it begins, until ``go``."""

    events: int
    reached: anyio.Event = field(default_factory=anyio.Event)
    go: anyio.Event = field(default_factory=anyio.Event)


@dataclass
class Attempt:
    """One sequence of one request: what was consumed and sampled, with a logprob and a version for each token.

    ``weights``: a number for those that sampled each token, with its ``adapter``, told or not. ``tells``: what it tells
    of its experts.
    ``turn`` is the client's name for it, in a header that the router passes on. ``logprobs`` are the engine's own;
    it ``told`` them or not. ``lie``: what it said that is not so. ``said``: the events of a stream, or the answer.
    """

    number: int
    turn: str
    rid: str
    consumed: list[int]
    told: bool
    stream: bool = False
    named: bool = False
    lie: str | None = None
    shape: str = "plain"
    said: list[dict[str, Any]] = field(default_factory=list)
    sampled: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[str | None] = field(default_factory=list)
    weights: list[int] = field(default_factory=list)
    tells: str | None = None
    adapter: str | None = None
    reason: dict[str, Any] = field(default_factory=dict)
    held: anyio.Event | None = None

    def text(self, reader: Detokenizer, parameters: dict[str, Any], size: int) -> str:
        """Return the text shown of the first ``size`` tokens: an abort out of the queue shows nothing more."""
        ended = size == len(self.sampled) and self.shape == "plain"
        return reader.text(self.consumed, self.sampled[:size], parameters, self.reason if ended else None)


class Adversary:
    """Serves ``/generate`` and ``/abort_request``.

    Attempts of the turns in ``holding`` wait to be aborted, and say so by the event; those in ``pauses`` go on when
    they are told. ``shapes``: aborts have all of SGLang's shapes. ``twins``: what it samples often reads as what it
    has sampled from the same prompt. A request with the header ``x-lie`` is answered with that lie, in the attempt
    whose number is in there, too.
    """

    def __init__(self, reader: Detokenizer, luck: Random, special: Sequence[str], *, aborts: bool) -> None:
        self.reader = reader
        self.luck = luck
        self.aborts = aborts
        self.attempts: list[Attempt] = []
        self.holding: dict[str, anyio.Event] = {}
        self.pauses: dict[str, Pause] = {}
        self.shapes = False
        self.twins = 0.0
        self.names: Callable[[int], str] = str
        self.version = 0
        self.incremental = False
        self._special = special
        self._spoken: dict[str, list[str]] = {}
        self._numbers = count(1)
        self._expert_luck = Random(0)  # its own, so that the rest is played as without experts
        self._engine = FakeEngine()
        self._engine.rest = self._generate
        self._engine.other = self._abort
        self.app = self._engine.app

    def of(self, turn: str) -> list[Attempt]:
        """The attempts that were made for a turn."""
        return [attempt for attempt in self.attempts if attempt.turn == turn]

    def _abort(self, call: Call) -> Response:
        if call.path != "/abort_request":
            return Response(status_code=404)
        prefix = orjson.loads(call.body)["rid"]
        for attempt in self.attempts:
            if attempt.held is not None and attempt.rid.startswith(prefix):
                attempt.held.set()
        return _json({"success": True})

    async def _generate(self, body: dict[str, Any]) -> Response:
        headers = self._engine.headers[-1]
        turn = headers["x-turn"]
        before = len(self.of(turn))
        calm = turn in self.holding or turn in self.pauses
        if not before and not calm and self.luck.random() < 0.03:
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
        lie, _, told_by = headers.get("x-lie", "").partition("@")
        attempts: list[tuple[Attempt, dict[str, Any]]] = []
        for place, prompt in enumerate(prompts):
            for _ in range(copies):
                rid = self._rid(body.get("rid"), place, batch, copies)
                attempt = Attempt(len(self.attempts), turn, rid, prompt, bool(body.get("return_logprob")))
                attempt.stream = bool(body.get("stream"))
                adapters = body.get("lora_path")
                attempt.adapter = adapters[place] if isinstance(adapters, list) else adapters
                attempt.named = rid.startswith(str(body.get("rid") or "nobody"))
                self._sample(attempt, parameters[place], before < _MOST_ATTEMPTS)
                if lie and str(before + len(attempts)) == told_by:
                    whole = self._output(attempt, parameters[place], len(attempt.sampled), body)
                    if can_be_told(lie, whole, named=attempt.named):
                        attempt.lie, attempt.shape = lie, "plain"
                self.attempts.append(attempt)
                attempts.append((attempt, parameters[place]))
        if body.get("stream"):
            events = self._stream(attempts, body)
            return StreamingResponse(events, media_type="text/event-stream")
        for attempt, _ in attempts:
            if attempt.held is not None:
                await attempt.held.wait()
        await self._pause(turn)
        for one, params in attempts:
            one.said.append(self._output(one, params, len(one.sampled), body))
        outputs = [one.said[0] for one, _ in attempts]
        return _json(outputs if batch or copies > 1 else outputs[0])

    async def _pause(self, turn: str) -> None:
        pause = self.pauses.get(turn)
        if pause is not None:
            pause.reached.set()
            await pause.go.wait()

    def _rid(self, rid: Any, place: int, batch: bool, copies: int) -> str:
        if rid is None or copies > 1:
            return f"e{next(self._numbers)}"
        return f"{rid}_{place}" if batch else str(rid)

    # Sampling.

    def _sample(self, attempt: Attempt, parameters: dict[str, Any], may_abort: bool) -> None:
        """Sample until it ends or is aborted; the token of an abort is not looked at."""
        luck = self.luck
        held = attempt.turn in self.holding
        may_abort = may_abort and self.aborts and attempt.turn not in self.pauses
        if may_abort and not held and luck.random() < 0.05:
            attempt.reason = dict(_ABORT)  # it was waiting
            attempt.shape = luck.choice(_SHAPES) if self.shapes else "plain"
            return
        cut = luck.randint(1, 6) if held or (may_abort and luck.random() < 0.25) else None
        ids = attempt.sampled
        others = [one.sampled for one in self.of(attempt.turn)]
        spoken = self._spoken.setdefault(self.reader.decode(attempt.consumed), [])
        while True:
            ids.clear()
            for token in self._tokens(parameters, spoken):
                ids.append(token)
                ended = finish_reason(self.reader, ids, parameters)
                is_seen = not ended  # the last token of what ran is not looked at; what waits had been
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
        spoken.append(self.reader.decode(ids, True))
        # One event does not tell whether a stream is incremental, and such an abort does not either.
        is_told = not attempt.stream or len(ids) > 2
        if attempt.reason["type"] == "abort" and is_seen and is_told and self.shapes:
            attempt.shape = luck.choice(_SHAPES if attempt.stream else _SHAPES[:2])
        # Divided by 7, no logprob is a float32; no two tokens have the same one.
        attempt.logprobs = [-next(self._numbers) / 7 for _ in ids]
        self._sample_versions(attempt)

    def _sample_versions(self, attempt: Attempt) -> None:
        size = len(attempt.sampled)
        kind = self.luck.random()
        if kind < 0.1 or (attempt.shape == "queue" and not attempt.stream):
            attempt.versions = [None] * size
            attempt.weights = [self._weights(attempt)] * size
            return
        changed = self.luck.randint(1, size) if kind < 0.3 and attempt.shape == "plain" else size
        attempt.versions = [self.names(self.version)] * changed
        attempt.weights = [self._weights(attempt)] * changed
        if changed < size or (attempt.reason["type"] == "abort" and self.luck.random() < 0.5):
            self.version += 1
        attempt.versions += [self.names(self.version)] * (size - changed)
        attempt.weights += [self._weights(attempt)] * (size - changed)

    def _weights(self, attempt: Attempt) -> int:
        return self.version * 10 + (ord(attempt.adapter) % 10 if attempt.adapter is not None else 0)

    def _pieces(self, text: str) -> Iterator[int]:
        """``text`` so that no merge crosses its pieces."""
        while text:
            size = self.luck.randint(1, 3)
            yield from self.reader.tokenizer.encode(text[:size], add_special_tokens=False)
            text = text[size:]

    def _twin(self, spoken: Sequence[str]) -> Iterator[int]:
        """Yield other tokens for an answer sampled before from the same prompt, or for nearly that."""
        luck, text = self.luck, self.luck.choice(spoken)
        if luck.random() < 0.2:
            text = text[: luck.randint(0, len(text))]
        if luck.random() < 0.3:
            yield from self.reader.tokenizer.encode(text, add_special_tokens=False)
        else:
            yield from self._pieces(text)
        if luck.random() < 0.7:
            yield min(self.reader.eos_ids)

    def _tokens(self, parameters: dict[str, Any], spoken: Sequence[str]) -> Iterator[int]:
        """Words spelt in pieces, characters broken off, special tokens, and beginnings of what would stop it."""
        luck, encode = self.luck, self.reader.tokenizer.encode
        if spoken and luck.random() < self.twins:
            yield from self._twin(spoken)
        while True:
            kind, word = luck.random(), luck.choice(_WORDS)
            stops = stops_of(parameters)
            if stops and luck.random() < 0.3:
                word = luck.choice(stops)
                word, kind = word[: luck.randint(1, len(word))], 0.0
            if kind < 0.5:
                yield from self._pieces(word)
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
        reason = attempt.reason if last and (attempt.shape == "plain" or not attempt.stream) else None
        meta: dict[str, Any] = {"id": attempt.rid, "finish_reason": reason, "completion_tokens": size}
        if not attempt.sampled:
            meta["finish_reason"] = attempt.reason
            if attempt.shape == "bare":
                del meta["completion_tokens"]
                return {"text": "", "meta_info": meta}
            return {"text": "", "output_ids": [], "meta_info": meta}
        ids = attempt.sampled[:size]
        if attempt.stream or attempt.shape == "plain":
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
            meta["output_token_logprobs"] = _triples(attempt, size)
            if (body.get("logprob_start_len") or -1) >= 0:
                start = body["logprob_start_len"]
                meta["input_token_logprobs"] = [[None, one, None] for one in attempt.consumed[start:]]
        if last and attempt.shape == "plain":
            tell_experts(attempt, meta, body, self._expert_luck)
        output = {"text": attempt.text(self.reader, parameters, size), "output_ids": ids, "meta_info": meta}
        if attempt.lie is not None:
            tell(attempt.lie, output, self.luck, last=last)
        return output

    async def _stream(
        self, attempts: Sequence[tuple[Attempt, dict[str, Any]]], body: dict[str, Any]
    ) -> AsyncIterator[bytes]:
        for index, (attempt, parameters) in enumerate(attempts):
            async for event in self._events(attempt, parameters, body):
                attempt.said.append(event)
                yield b"data: %s\n\n" % orjson.dumps(event | ({"index": index} if len(attempts) > 1 else {}))
        yield b"data: [DONE]\n\n"

    async def _events(
        self, attempt: Attempt, parameters: dict[str, Any], body: dict[str, Any]
    ) -> AsyncIterator[dict[str, Any]]:
        told, before, size, number = "", 0, 0, 0
        pause = self.pauses.get(attempt.turn)
        while True:
            size = min(size + self.luck.choice((1, 1, 2)), len(attempt.sampled))
            last = size == len(attempt.sampled)
            if last and attempt.held is not None:
                await attempt.held.wait()
            if pause is not None and (last or number == pause.events):
                await self._pause(attempt.turn)
            event = self._output(attempt, parameters, size, body)
            if self.incremental:
                if last and attempt.lie == "cut_text" and attempt.text(self.reader, parameters, size) == told:
                    attempt.lie = None  # all of the text was told before
                event["text"], told = event["text"][len(told) :], event["text"]
                for column in (event.get("output_ids"), event["meta_info"].get("output_token_logprobs")):
                    del (column if column is not None else [])[:before]
                before = size
            yield event
            number += 1
            if last:
                break
        if attempt.shape != "plain" and attempt.sampled:
            yield self._late_abort(attempt, parameters)

    def _late_abort(self, attempt: Attempt, parameters: dict[str, Any]) -> dict[str, Any]:
        """The last event of a stream that is aborted in the queue (``_handle_abort_req``); all tokens were told."""
        meta: dict[str, Any] = {"id": attempt.rid, "finish_reason": attempt.reason}
        if attempt.shape == "bare":
            return {"meta_info": meta}
        size = len(attempt.sampled)
        if attempt.told:
            meta["output_token_logprobs"] = _triples(attempt, size)
        meta["completion_tokens"] = size
        text = attempt.text(self.reader, parameters, size)
        return {"text": text, "output_ids": attempt.sampled[-1:], "meta_info": meta}


def _triples(attempt: Attempt, size: int) -> list[list[Any]]:
    return [
        [logprob, token, None]
        for logprob, token in zip(attempt.logprobs[:size], attempt.sampled, strict=False)
    ]


def _json(value: Any) -> Response:
    return Response(orjson.dumps(value), media_type="application/json")
