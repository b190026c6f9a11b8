"""``/v1/completions``: continues texts or token ids."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import orjson

from router_core.exchange import Exchange
from router_core.reply import Reply
from router_core.request import LARGE_BYTES
from router_core.router import Router
from router_core.types import Tokenizer
from slime_openai.generating import EVENT_STREAM, JSON, generate
from slime_openai.models import Models
from slime_openai.parsing.stops import StopStrings
from slime_openai.requests.completion_request import CompletionRequest, Prompt, read_completion
from slime_openai.requests.unknown_parameters import UnknownParameters
from slime_openai.responses.answer_stream import AnswerStream
from slime_openai.responses.evidence import JudgedAnswers, Verdicts
from slime_openai.responses.logprobs import Logprobs
from slime_openai.responses.openai_schema import Frame, about_output, reason_of, root_version, usage
from slime_openai.responses.outputs import Output, answers_of, understood
from slime_openai.responses.text_offsets import TextOffsets

__all__ = ["Completions"]


class Completions:
    """Answers completion requests. Text prompts are sent as text, which ``radix_cache`` can replace by tokens."""

    def __init__(
        self,
        router: Router,
        tokenizer: Tokenizer,
        models: Models,
        verdicts: Verdicts,
        unknown: UnknownParameters,
    ) -> None:
        self._router = router
        self._verdicts = verdicts
        self._unknown = unknown
        self._tokenizer = tokenizer
        self._models = models
        self._logprobs = Logprobs(tokenizer)

    async def answer(self, exchange: Exchange) -> Reply:
        """Return the reply. Raises HTTPError."""
        body = await self._router.read_json(exchange)
        if len(exchange.request.body) < LARGE_BYTES:
            request, shown = self._read(body)
        else:
            request, shown = await self._router.threads.run(lambda: self._read(body), exchange.client)
        unknown = self._unknown.treat(request.unknown)
        session = exchange.session or request.session
        payload = {**unknown.passed, **_payload(request), **self._models.engine_fields(request)}
        inner, reply = await generate(self._router, exchange, payload, session)
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
            return Reply(200, [EVENT_STREAM, *unknown.headers], stream)
        with inner:
            body = await reply.read()
            with understood():
                for choice, sequence in zip(choices, answers_of(inner, body, len(choices)), strict=True):
                    choice.output.take(sequence)
                whole = [choice.whole() for choice in choices]
                answer = frame.put(whole, usage=used(), **choices[0].about())
        return Reply(200, [JSON, *unknown.headers], orjson.dumps(answer))

    def _read(self, body: Any) -> tuple[CompletionRequest, list[str]]:
        """Return the request in ``body``, and for each prompt the text to echo, or "". Raises InvalidRequest."""
        request = read_completion(body)
        if not request.echo:
            return request, [""] * len(request.prompts)
        return request, [self._shown(prompt) for prompt in request.prompts]

    def _shown(self, prompt: Prompt) -> str:
        if isinstance(prompt, str):
            return prompt
        return self._tokenizer.decode(list(prompt), skip_special_tokens=False)


class _Choice:
    """One choice of the answer. ``prompt``: the text that ``echo`` puts before the sampled text.

    ``sent``: the prompt's token ids as the engine got them; None if the engine got text. A client that wants sampled
    ids gets them as soon as the engine sends them, perhaps before their text, as in a chat.
    """

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
        self._offsets = TextOffsets(logprobs)
        self._ids_given = self._logprobs_given = 0

    def end(self) -> None:
        """See StreamedChoice."""
        self.ended = True

    def about(self) -> dict[str, Any]:
        """See StreamedChoice."""
        return root_version(self.output, self._request)

    def whole(self) -> dict[str, Any]:
        """Return the choice of an answer that is not streamed."""
        self.end()
        text = (self._prompt if self._request.echo else "") + self.output.text
        return self._chunk(text) | self._ids() | self._ending()

    @property
    def wants_text_only(self) -> bool:
        """See StreamedChoice."""
        request = self._request
        return self.output.cumulative and request.logprobs is None and not request.return_token_ids

    def more(self, text: str, event: bytes | memoryview) -> list[dict[str, Any]]:
        """See StreamedChoice."""
        self.output.take_text(text, event)
        text = self._stops.feed(text)
        return [self._chunk(text) | {"finish_reason": None}] if text else []

    def chunks(self, answer: dict[str, Any]) -> list[dict[str, Any]]:
        """See StreamedChoice."""
        text = self._stops.feed(self.output.take(answer))
        reason = self.output.reason
        if reason is not None:
            self.end()
            matched = reason.get("matched")
            text += self._stops.finish(matched if isinstance(matched, str) else None)
        if not self._begun and self._request.echo:
            text = self._prompt + text
        chunk, ids = self._chunk(text), self._ids()
        if reason is not None:
            return [chunk | ids | self._ending()]
        if not text and not ids and chunk["logprobs"] is None:
            return []
        return [chunk | ids | {"finish_reason": None}]

    def _chunk(self, text: str) -> dict[str, Any]:
        return {"index": self._index, "text": text, "logprobs": self._new_logprobs()}

    def _ids(self) -> dict[str, Any]:
        """Return the ids that the client wants: new sampled ids, and in the first call the prompt's ids."""
        found: dict[str, Any] = {}
        if self._request.wants_prompt_ids and not self._begun:
            found["prompt_token_ids"] = self.sent
        self._begun = True
        if self._request.return_token_ids:
            start, self._ids_given = self._ids_given, len(self.output.ids)
            if start < self._ids_given or self.ended:
                found["token_ids"] = self.output.ids[start:]
        return found

    def _new_logprobs(self) -> dict[str, Any] | None:
        """Return the logprobs of the tokens that came since the last call.

        Return None if the client wants neither logprobs nor token ids. A stream may send logprobs before the text of
        their tokens. With ``echo``, the first call also returns the logprobs of the prompt, if the engine sent any.
        """
        output, count = self.output, self._request.logprobs
        if count is None and not self._request.return_token_ids:
            return None
        start, self._logprobs_given = self._logprobs_given, len(output.logprobs)
        chosen, top = output.logprobs[start:], output.top_logprobs[start:]
        if self._request.echo and not self._begun:
            of_prompt = output.meta.get("input_token_logprobs") or []
            if not of_prompt:
                self._offsets.place = len(self._prompt)
            chosen = [*of_prompt, *chosen]
            top = [*(output.meta.get("input_top_logprobs") or [None] * (len(chosen) - len(top))), *top]
        offsets, as_ids = self._offsets.of(chosen), self._request.tokens_as_ids
        return self._logprobs.legacy(chosen, top, count or 0, offsets, as_ids=as_ids)

    def _ending(self) -> dict[str, Any]:
        verdict = partial(self._judged.inexact_reason, self._index)
        return reason_of(self.output, self._request) | about_output(self.output, self._request, verdict)


def _payload(request: CompletionRequest) -> dict[str, Any]:
    prompts = request.prompts
    payload: dict[str, Any] = {
        "text" if isinstance(prompts[0], str) else "input_ids": prompts[0]
        if len(prompts) == 1
        else list(prompts),
        "sampling_params": request.sampling,
        "stream": request.stream,
        "return_logprob": True,
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
    """Return the ids of each prompt, as the engine got them after all changes by plugins.

    If the engine got texts, return None for each prompt.
    """
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
    return usage(prompt, [choice.output for choice in choices], request.n, 0)
