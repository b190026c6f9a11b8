"""``/v1/chat/completions``: messages are sent to ``/generate`` as exact tokens, and the answer becomes a message."""

from __future__ import annotations

from array import array
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
from slime_openai.parsing.formats import Formats
from slime_openai.prompts.conversation import Conversation
from slime_openai.prompts.known_messages import KnownMessages, read_question
from slime_openai.prompts.question import Question
from slime_openai.prompts.turn_tokens import Prompt, Prompts
from slime_openai.prompts.turns import Turns
from slime_openai.requests.chat_request import ChatRequest
from slime_openai.requests.messages import Message, has_media
from slime_openai.requests.unknown_parameters import UnknownParameters
from slime_openai.responses.answer_stream import AnswerStream
from slime_openai.responses.choices import Choice
from slime_openai.responses.evidence import JudgedAnswers, Verdicts
from slime_openai.responses.logprobs import Logprobs
from slime_openai.responses.openai_schema import Frame, usage
from slime_openai.responses.outputs import Output, answers_of, understood
from slime_openai.responses.thoughts import reasoning_tokens

__all__ = ["Chat"]


class Chat:
    """Answers chat requests."""

    def __init__(
        self,
        router: Router,
        tokenizer: Tokenizer,
        prompts: Prompts,
        turns: Turns,
        formats: Formats,
        models: Models,
        verdicts: Verdicts,
        unknown: UnknownParameters,
        known: KnownMessages,
    ) -> None:
        self._router = router
        self._known = known
        self._verdicts = verdicts
        self._unknown = unknown
        self._tokenizer = tokenizer
        self._prompts = prompts
        self._turns = turns
        self._formats = formats
        self._models = models
        self._logprobs = Logprobs(tokenizer)

    async def answer(self, exchange: Exchange) -> Reply | None:
        """Return the reply. Return None when messages have media, which only a worker can render. Raises HTTPError."""
        body = await self._router.read_json(exchange)
        read = await self._read(exchange, body)
        if read is None:
            return None
        request, question = read
        unknown = self._unknown.treat(request.unknown)
        prompt = await self._prompt(exchange, request, question)
        ids = np.frombuffer(prompt.ids(), np.int32)
        judged = JudgedAnswers(self._verdicts)
        choices = [self._choice(index, request, question, prompt, judged) for index in range(request.n)]
        payload = {**unknown.passed, **self._payload(request, ids)}
        is_tokenised = request.input_ids is None
        inner, reply = await generate(
            self._router, exchange, payload, question.session, is_tokenised=is_tokenised
        )
        judged.begin(inner)
        used = partial(self._usage, request, len(ids), choices)
        kind = "chat.completion.chunk" if request.stream else "chat.completion"
        frame = Frame("chatcmpl", kind, request.model or self._models.default())
        prompt_members = {"prompt_token_ids": ids} if request.wants_prompt_ids else {}
        if request.stream:
            usage_chunk = used if request.include_usage else None
            stream = AnswerStream(inner, reply, choices, frame, usage_chunk, prompt_members)
            return Reply(200, [EVENT_STREAM, *unknown.headers], stream)
        with inner:
            body = await reply.read()
            with understood():
                for choice, sequence in zip(choices, answers_of(inner, body, len(choices)), strict=True):
                    choice.take(sequence)
                    choice.end()
                whole = [choice.whole() for choice in choices]
                answer = frame.put(whole, usage=used(), **prompt_members, **choices[0].about())
        return Reply(200, [JSON, *unknown.headers], orjson.dumps(answer, option=orjson.OPT_SERIALIZE_NUMPY))

    async def _read(self, exchange: Exchange, body: Any) -> tuple[ChatRequest, Question] | None:
        """Return the request in ``body``, and its Question; None when the messages have media. Raises InvalidRequest.

        A large body is read in a thread.
        """
        raw = exchange.request.body
        is_large = len(raw) > LARGE_BYTES
        known = self._known.beginning(body, exchange.session)
        if has_media(known.others):
            return None

        def read() -> tuple[ChatRequest, Question, bool]:
            request, question, may_be_kept = read_question(
                body, raw, known, exchange.session, self._prompts.traits
            )
            if is_large and request.input_ids is None:
                self._prompts.check_contents(request.messages)
            return request, question, may_be_kept

        request, question, may_be_kept = (
            await self._router.threads.run(read, exchange.client) if is_large else read()
        )
        if may_be_kept:
            self._known.keep(known, question)
        return request, question

    async def _prompt(self, exchange: Exchange, request: ChatRequest, question: Question) -> Prompt:
        asking = self._turns.asking(question)
        exchange.on_close(asking.end)
        if request.input_ids is not None:
            return self._prompts.given(request.input_ids, asking, continues=request.continue_final_message)
        conversation = Conversation(
            request.messages,
            request.tools.shown or None,
            request.template_kwargs,
            request.add_generation_prompt,
            request.continue_final_message,
            len(exchange.request.body),
            exchange.client,
        )
        return await self._prompts.of(question, conversation, asking)

    def _payload(self, request: ChatRequest, ids: Any) -> dict[str, Any]:
        sampling = dict(request.sampling)
        if self._formats.needs_special_tokens(request):
            sampling["skip_special_tokens"] = False
        payload = {
            "input_ids": array("i", ids.tobytes()),
            "sampling_params": sampling,
            "stream": request.stream,
            "return_logprob": True,
            **self._models.engine_fields(request),
        }
        if self._formats.thinks_before_grammar(request):
            payload["require_reasoning"] = True
        if request.top_logprobs:
            payload["top_logprobs_num"] = request.top_logprobs
        if request.rid is not None:
            payload["rid"] = request.rid
        if request.return_routed_experts:
            payload["return_routed_experts"] = True
        return payload

    def _choice(
        self,
        index: int,
        request: ChatRequest,
        question: Question,
        prompt: Prompt,
        judged: JudgedAnswers,
    ) -> Choice:
        def record(output: Output, reply: Message) -> None:
            self._turns.record(question, prompt, output, reply, is_usable=judged.is_usable(index))

        parser = self._formats.parser(request, prompt.text)
        reason = partial(judged.inexact_reason, index)
        history = {"history": prompt.origin} if request.return_token_ids else {}
        return Choice(index, request, parser, self._logprobs, record, reason, history)

    def _usage(self, request: ChatRequest, prompt_tokens: int, choices: list[Choice]) -> dict[str, Any]:
        skip = not self._formats.needs_special_tokens(request) and request.sampling.get(
            "skip_special_tokens", True
        )
        thoughts = sum(
            reasoning_tokens(self._tokenizer, choice.output, choice.message(), skip_special=skip)
            for choice in choices
        )
        return usage(prompt_tokens, [choice.output for choice in choices], request.n, thoughts)
