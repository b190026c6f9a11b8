"""An engine that samples what nobody would tokenise, on purpose; and the truth about what it did.

It is told by plans, one for each request id, so that many requests may be under way at once.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

import orjson
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from router_core.types import Tokenizer

#: As many of the prompt's last tokens as SGLang decodes with the first sampled ones.
_READ_BACK = 5
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


@dataclass
class Plan:
    """One answer: ``ids`` to sample, of which the last ``hidden`` are not shown, nor the last ``trimmed`` characters.

    ``ending``: the type of the finish reason; "waiting" for a request that is aborted before it begins, "error"
    for an engine's 500. ``told``: whether the answer has logprobs.
    """

    ids: list[int]
    ending: str = "length"
    hidden: int = 0
    trimmed: int = 0
    told: bool = True
    incremental: bool = False
    skip_special: bool = True


@dataclass
class Entry:
    """What the engine did for one request: the journal's line, and the text that it sent."""

    consumed: list[int]
    sampled: list[int] = field(default_factory=list)
    logprobs: list[float] | None = None
    version: str = ""
    text: str = ""

    @property
    def tokens(self) -> list[int]:
        return self.consumed + self.sampled


class Adversary:
    """Serves ``/generate``; ``journal`` is by request id. ``version`` is that of its weights."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.plans: dict[str, Plan] = {}
        self.journal: dict[str, Entry] = {}
        self.version = "0"
        self.app = Starlette(routes=[Route("/generate", self.generate, methods=["POST"])])

    def read(self, before: Sequence[int], ids: Sequence[int], skip_special: bool) -> str:
        """The text of ``ids`` behind ``before``, as SGLang's detokenizer makes it: decoded with the tokens before."""

        def decoded(tokens: Sequence[int]) -> str:
            return self.tokenizer.decode(list(tokens), skip_special_tokens=skip_special) if tokens else ""

        back = list(before[-_READ_BACK:])
        shown = decoded(back)
        whole = decoded([*back, *ids])
        return whole[len(shown) :] if whole.startswith(shown) else decoded(ids)

    async def generate(self, request: Request) -> Response:
        body = orjson.loads(await request.body())
        plan = self.plans.pop(body["rid"])
        if plan.ending == "error":
            return Response(b'{"error":{"message":"out of memory"}}', 500, media_type="application/json")
        if plan.ending == "waiting":
            meta = {
                "id": body["rid"],
                "finish_reason": {"type": "abort", "message": "b"},
                "completion_tokens": 0,
            }
            return _json({"text": "", "output_ids": [], "meta_info": meta})
        entry = Entry(
            body.get("input_ids") or list(self.tokenizer.encode(body["text"])), version=self.version
        )
        entry.sampled = plan.ids
        # Divided by 7, no logprob is a float32; the place in the journal makes each answer's own.
        told = [-(place + token + len(self.journal)) / 7 for place, token in enumerate(plan.ids)]
        entry.logprobs = told if plan.told and body.get("return_logprob") else None
        self.journal[body["rid"]] = entry
        entry.text = self._shown(entry, plan, len(plan.ids))
        if body.get("stream"):
            return StreamingResponse(self._stream(body, entry, plan), media_type="text/event-stream")
        return _json(self._output(body, entry, plan, len(plan.ids)))

    def _shown(self, entry: Entry, plan: Plan, count: int) -> str:
        last = count == len(plan.ids)
        ids = plan.ids[: min(count, len(plan.ids) - plan.hidden)]
        text = self.read(entry.consumed, ids, plan.skip_special)
        if last:
            return text[: len(text) - plan.trimmed]
        whole = self.read(entry.consumed, plan.ids[: len(plan.ids) - plan.hidden], plan.skip_special)
        safe = text.rstrip("\ufffd")[: len(whole) - plan.trimmed]
        return safe if whole.startswith(safe) else ""

    def _output(self, body: dict[str, Any], entry: Entry, plan: Plan, count: int) -> dict[str, Any]:
        meta: dict[str, Any] = {
            "id": body["rid"],
            "finish_reason": {"type": plan.ending} if count == len(plan.ids) else None,
            "prompt_tokens": len(entry.consumed),
            "completion_tokens": count,
            "weight_version": entry.version,
        }
        if entry.logprobs is not None:
            pairs = zip(entry.logprobs[:count], plan.ids, strict=False)
            meta["output_token_logprobs"] = [[logprob, token, None] for logprob, token in pairs]
        return {"text": self._shown(entry, plan, count), "output_ids": plan.ids[:count], "meta_info": meta}

    async def _stream(self, body: dict[str, Any], entry: Entry, plan: Plan) -> AsyncIterator[bytes]:
        told = ""
        for count in range(1, len(plan.ids) + 1):
            event = self._output(body, entry, plan, count)
            if plan.incremental:
                shown = event["text"] if event["text"].startswith(told) else told
                event["text"], told = shown[len(told) :], shown
                event["output_ids"] = plan.ids[count - 1 : count]
                if entry.logprobs is not None:
                    del event["meta_info"]["output_token_logprobs"][:-1]
            yield b"data: %s\n\n" % orjson.dumps(event)
        yield b"data: [DONE]\n\n"


def _json(value: Any) -> Response:
    return Response(orjson.dumps(value), media_type="application/json")


def odd_tokens(random: Random, tokenizer: Tokenizer, special: Sequence[str]) -> list[int]:
    """One to a dozen tokens: words spelt in pieces, characters broken off, special tokens in the middle."""
    ids: list[int] = []
    for _ in range(random.randint(1, 4)):
        word = random.choice(_WORDS)
        kind = random.random()
        if kind < 0.6:  # in pieces, so that no merge crosses them
            while word:
                size = random.randint(1, 3)
                ids += tokenizer.encode(word[:size], add_special_tokens=False)
                word = word[size:]
        elif kind < 0.8:
            ids += tokenizer.encode(word, add_special_tokens=False)
        elif kind < 0.9:
            whole = list(tokenizer.encode(random.choice("😀語é"), add_special_tokens=False))
            ids += whole[: random.randint(1, len(whole))]
        elif special:
            ids += tokenizer.encode(random.choice(special), add_special_tokens=False)
    return ids or list(tokenizer.encode("x", add_special_tokens=False))


def odd_plan(random: Random, tokenizer: Tokenizer, special: Sequence[str], eos: str) -> Plan:
    """An answer of one of the kinds that engines give."""
    plan = Plan(
        odd_tokens(random, tokenizer, special),
        incremental=random.random() < 0.5,
        skip_special=random.random() < 0.7,
    )
    kind = random.random()
    if kind < 0.45:
        plan.ids += tokenizer.encode(eos, add_special_tokens=False)
        plan.ending, plan.hidden = "stop", 1
    elif kind < 0.6:  # a stop string, which may begin inside a token
        plan.ending, plan.trimmed = "stop", random.randint(1, 3)
    elif kind < 0.7:
        plan.ending = "abort"
    elif kind < 0.73:
        plan.ending = "waiting"
    elif kind < 0.76:
        plan.ending = "error"
    elif kind < 0.78:
        plan.told = False
    return plan
