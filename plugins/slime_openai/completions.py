"""``/v1/completions``: texts or ids, continued."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import orjson

from router_core.exchange import Exchange
from router_core.reply import Reply
from router_core.router import Router
from router_core.types import Tokenizer
from slime_openai.answer_stream import AnswerStream
from slime_openai.completion_request import CompletionRequest, Prompt, read_completion
from slime_openai.evidence import JudgedAnswers, Verdicts
from slime_openai.generating import EVENT_STREAM, JSON, generate
from slime_openai.logprobs import Logprobs
from slime_openai.models import Models
from slime_openai.outputs import Output, answers_of, understood
from slime_openai.stops import StopStrings
from slime_openai.words import Frame, about_output, reason_of, usage

__all__ = ["Completions"]


class Completions:
    """Answers completion requests. A text stays one until ``radix_cache`` finds its tokens."""

    def __init__(self, router: Router, tokenizer: Tokenizer, models: Models, verdicts: Verdicts) -> None:
        self._router = router
        self._verdicts = verdicts
        self._tokenizer = tokenizer
        self._models = models
        self._logprobs = Logprobs(tokenizer)

    async def answer(self, exchange: Exchange) -> Reply:
        """The reply. Raises HTTPError."""
        request = read_completion(exchange.request.json())
        session = exchange.session or request.session
        shown = [self._shown(prompt) for prompt in request.prompts]
        inner, reply = await generate(self._router, exchange, _payload(request), session)
        judged = JudgedAnswers(self._verdicts)
        judged.begin(inner)
        sent = _sent_ids(inner.request.json(), len(request.prompts))
        choices = [
            _Choice(place * request.n + copy, request, prompt, sent[place], self._logprobs, judged)
            for place, prompt in enumerate(shown)
            for copy in range(request.n)
        ]
        used = partial(_usage, request, choices)
        frame = Frame("cmpl", "text_completion", request.model or self._models.default())
        if request.stream:
            stream = AnswerStream(inner, reply, choices, frame, used if request.include_usage else None)
            return Reply(200, [EVENT_STREAM], stream)
        with inner:
            body = await reply.read()
            with understood():
                for choice, answer in zip(choices, answers_of(body, len(choices)), strict=True):
                    choice.output.take(answer)
                told = frame.put([choice.whole() for choice in choices], usage=used())
        return Reply(200, [JSON], orjson.dumps(told))

    def _shown(self, prompt: Prompt) -> str:
        if isinstance(prompt, str):
            return prompt
        return self._tokenizer.decode(prompt, skip_special_tokens=False)


class _Choice:
    """One sequence; ``prompt`` is shown before it with ``echo``, ``sent`` are the ids that the engine got for it."""

    def __init__(
        self,
        index: int,
        request: CompletionRequest,
        prompt: str,
        sent: list[int] | None,
        logprobs: Logprobs,
        judged: JudgedAnswers,
    ) -> None:
        self.output = Output()
        self.ended = False
        self.sent = sent
        self._index = index
        self._request = request
        self._prompt = prompt
        self._logprobs = logprobs
        self._judged = judged
        self._stops = StopStrings(() if request.sampling.get("no_stop_trim") else request.stop)
        self._begun = False
        self._length = 0
        self._logprobs_told = 0

    def end(self) -> None:
        """See StreamedChoice."""
        self.ended = True

    def about(self) -> dict[str, Any]:
        """See StreamedChoice."""
        return {}

    def whole(self) -> dict[str, Any]:
        """The choice of an answer that is not streamed."""
        self.end()
        return self._told((self._prompt if self._request.echo else "") + self.output.text) | self._ending()

    @property
    def wants_text_only(self) -> bool:
        """See StreamedChoice."""
        return self.output.cumulative and self._request.logprobs is None

    def more(self, text: str, event: bytes) -> list[dict[str, Any]]:
        """See StreamedChoice."""
        self.output.take_text(text, event)
        text = self._stops.feed(text)
        return [self._told(text) | {"finish_reason": None}] if text else []

    def chunks(self, answer: dict[str, Any]) -> list[dict[str, Any]]:
        """See StreamedChoice."""
        text = self._stops.feed(self.output.take(answer))
        reason = self.output.reason
        if reason is not None:
            self.end()
            matched = reason.get("matched")
            text += self._stops.finish(matched if isinstance(matched, str) else None)
        if not self._begun:
            self._begun = True
            text = (self._prompt if self._request.echo else "") + text
        told = self._told(text)
        if reason is not None:
            return [told | self._ending()]
        return [told | {"finish_reason": None}] if text or told["logprobs"] is not None else []

    def _told(self, text: str) -> dict[str, Any]:
        return {"index": self._index, "text": text, "logprobs": self._new_logprobs(text)}

    def _new_logprobs(self, text: str) -> dict[str, Any] | None:
        output, count = self.output, self._request.logprobs
        wanted = count is not None or (self._request.return_token_ids and self.ended)
        start, offset = self._logprobs_told, self._length
        self._length += len(text)
        if not wanted:
            return None
        self._logprobs_told = len(output.logprobs)
        chosen, top = output.logprobs[start:], output.top_logprobs[start:]
        if self._request.echo and not start:
            chosen = [*(output.meta.get("input_token_logprobs") or ()), *chosen]
            top = [*(output.meta.get("input_top_logprobs") or [None] * (len(chosen) - len(top))), *top]
        return self._logprobs.legacy(chosen, top, count or 0, offset)

    def _ending(self) -> dict[str, Any]:
        request, told = self._request, reason_of(self.output)
        if request.return_token_ids:
            told |= about_output(self.output, self._judged.inexact_reason(self._index))
            told["prompt_token_ids"] = self.sent
        if request.return_routed_experts:
            told["routed_experts"] = self.output.meta.get("routed_experts")
        return told


def _payload(request: CompletionRequest) -> dict[str, Any]:
    prompts = request.prompts
    payload: dict[str, Any] = {
        "text" if isinstance(prompts[0], str) else "input_ids": prompts[0]
        if len(prompts) == 1
        else list(prompts),
        "sampling_params": request.sampling,
        "stream": request.stream,
        "return_logprob": True,
        **request.engine,
    }
    if request.logprobs:
        payload["top_logprobs_num"] = request.logprobs
    if request.logprobs is not None and request.echo:
        payload["logprob_start_len"] = 0
    if request.rid is not None:
        payload["rid"] = request.rid
    if request.return_routed_experts:
        payload["return_routed_experts"] = True
    return payload


def _sent_ids(body: dict[str, Any], count: int) -> list[list[int] | None]:
    """What the engine was sent for each prompt, once every plugin has seen the request; None where it was text."""
    ids = body.get("input_ids")
    if ids is None:
        return [None] * count
    prompts = [ids] if count == 1 and np.ndim(ids[0]) == 0 else ids
    return [np.asarray(each).tolist() for each in prompts]


def _usage(request: CompletionRequest, choices: list[_Choice]) -> dict[str, Any]:
    first = choices[:: request.n]
    prompt = sum(
        len(choice.sent) if choice.sent is not None else choice.output.meta.get("prompt_tokens", 0)
        for choice in first
    )
    return usage(prompt, [choice.output for choice in choices], 0)
