"""The plugin: what happens to a ``/generate`` on its way through the router."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
from starlette.routing import BaseRoute

from router_core import hookimpl
from router_core.errors import BadRequest, SettingsError
from router_core.exchange import Exchange
from router_core.router import Router
from router_core.types import Tokenizer
from router_core.weights import WeightUpdate
from slime_radix_cache.encoding import Encoder
from slime_radix_cache.open_streams import OpenStreams
from slime_radix_cache.recorder import StreamRecorder
from slime_radix_cache.replies import parsed
from slime_radix_cache.requests import Ask, read_ask, rewritten
from slime_radix_cache.retrieval import Retrieval
from slime_radix_cache.settings import Settings
from slime_radix_cache.spelling import Spelling
from slime_radix_cache.tally import Tally
from slime_radix_cache.templates import ChatTemplate
from slime_radix_cache.trajectories import Limits, Trajectories
from slime_radix_cache.turns import Turn, Turns

__all__ = ["RadixCache"]

_NAME = "radix_cache"
#: Both of which SGLang takes for ``/generate``.
_METHODS = ("POST", "PUT")


class RadixCache:
    """Sends known tokens instead of text, and keeps what the engines answer.

    No failure in here changes what the client gets: it is counted, logged once per kind, and shows in ``exact``.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._tally = Tally()

    @hookimpl
    def setup(self, router: Router) -> None:
        """Load the tokenizer, or take the one that another plugin offers; offer ``"trajectories"``."""
        settings = self._settings
        if settings.hf_checkpoint:
            router.components.register("tokenizer", _load(settings.hf_checkpoint))
        tokenizer: Tokenizer = router.components.get("tokenizer")
        spelling = Spelling(tokenizer)
        encoder = Encoder(tokenizer, add_special_tokens=settings.add_special_tokens)
        limits = Limits(settings.max_tokens, settings.max_bytes, settings.gc_threshold_k)
        self._trajectories = Trajectories(limits, spelling.cut)
        self._streams = OpenStreams()
        self._turns = Turns(
            self._trajectories, encoder, spelling, self._tally, self._streams, verbose=settings.verbose
        )
        template = ChatTemplate(tokenizer)
        self.retrieval = Retrieval(self._trajectories, encoder, template, self._tally, self._streams)
        router.components.register("trajectories", self.retrieval)

    @hookimpl
    def routes(self) -> Sequence[BaseRoute]:
        """What gives tokens back, and ``/cache_stats``."""
        return self.retrieval.routes(self.get_stats)

    def get_stats(self) -> dict[str, Any]:
        """What is kept, and what was done so far."""
        kept = self._trajectories
        return {
            "entries": kept.segments,
            "tokens": kept.tokens,
            "bytes": kept.size_bytes,
            "evictions": dict(kept.evicted),
            **self._tally.as_dict(),
        }

    @hookimpl
    async def pre_request(self, exchange: Exchange) -> None:
        """Send ``input_ids`` instead of ``text``."""
        request = exchange.request
        if request.method not in _METHODS or request.path != "/generate":
            return
        try:
            body = request.json()
        except BadRequest:
            self._tally.untouched("malformed")
            return
        ask = read_ask(body)
        if isinstance(ask, str):
            self._tally.untouched(ask)
            return
        try:
            turns = await self._begin(exchange, ask)
            document = rewritten(body, ask, [np.frombuffer(turn.ids, np.int32) for turn in turns])
        except Exception as error:
            self._tally.untouched("failed")
            self._tally.unrecorded("prompt_not_tokenised", error)
            return
        if document is not None:
            request.replace_json(document)
        exchange.notes[_NAME] = [turn for turn in turns for _ in range(ask.copies)]

    async def _begin(self, exchange: Exchange, ask: Ask) -> list[Turn]:
        turns = []
        for prompt in ask.prompts:
            turn = self._turns.begin(prompt, exchange.session)
            exchange.on_close(partial(self._turns.end, turn))
            turns.append(turn)
        for turn in turns:
            await self._turns.encode(turn)
        return turns

    @hookimpl
    async def post_response(self, exchange: Exchange) -> None:
        """Record the answer; a stream's when its last event passes."""
        turns: list[Turn] | None = exchange.notes.get(_NAME)
        reply = exchange.reply
        if turns is None or reply is None or reply.status != 200:
            return
        kind = (reply.header(b"content-type") or b"").partition(b";")[0].strip().lower()
        if kind == b"text/event-stream":
            reply.tap(StreamRecorder(turns, self._turns, self._tally, self._streams))
        elif kind == b"application/json":
            self._record_whole(turns, await reply.read())
        else:
            self._tally.unrecorded("answer_not_understood")

    def _record_whole(self, turns: list[Turn], body: bytes) -> None:
        try:
            answer = parsed(body)
            answers = answer if isinstance(answer, list) else [answer]
            for turn, each in list(zip(turns, answers, strict=True)):  # all are there before one is recorded
                self._turns.record(turn, each)
        except Exception as error:
            self._tally.unrecorded("answer_not_understood", error)

    @hookimpl
    async def on_weight_update(self, update: WeightUpdate) -> None:
        """Forget what was not used under the last few weights."""
        self._trajectories.see_version(update.version)


def _load(path: str) -> Tokenizer:
    from transformers import AutoTokenizer  # heavy, and only needed with --hf-checkpoint

    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(path)
    except Exception as error:
        first = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise SettingsError(f"--hf-checkpoint {path}: no tokenizer to be loaded: {first}") from error
    loaded: Tokenizer = tokenizer  # its annotations are wider than what it does
    return loaded
