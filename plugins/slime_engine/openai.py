"""The engine's own OpenAI routes. Tool calls and reasoning stay in the text, as in SGLang without its parsers."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Mapping
from typing import Any

from jinja2 import TemplateError
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from slime_engine.engine import Engine, EngineHost
from slime_engine.errors import BadRequest, NotServed
from slime_engine.fields import JSONObject, boolean, string
from slime_engine.forced_form import forced_form
from slime_engine.http import EventStream, JSONBytes, json_body, unless_gone
from slime_engine.requests import GenerateBody, parse_generate

__all__ = ["openai_routes"]

#: By OpenAI's name of a sampling parameter: SGLang's name, where the two differ.
_RENAMED = {
    "max_tokens": "max_new_tokens",
    "max_completion_tokens": "max_new_tokens",
    "seed": "sampling_seed",
}
#: Sampling parameters with the same name in requests of OpenAI's form and in ``/generate``.
_SAME = (
    *("temperature", "top_p", "top_k", "min_p", "n", "stop", "stop_token_ids", "min_new_tokens"),
    *("ignore_eos", "skip_special_tokens", "no_stop_trim", "logit_bias"),
    *("frequency_penalty", "presence_penalty", "repetition_penalty"),
    *("regex", "ebnf", "json_schema"),
)


#: SGLang's own fields, passed on unchanged. ``parse_generate`` ignores or refuses the fields that have no effect here.
_ENGINE = (
    *("rid", "lora_path", "session_params", "custom_logit_processor"),
    *("return_hidden_states", "return_indexer_topk", "return_routed_experts", "routed_experts_start_len"),
    *("bootstrap_host", "bootstrap_port", "bootstrap_room"),
    *("routed_dp_rank", "data_parallel_rank", "disagg_prefill_dp_rank"),
)


def openai_routes(host: EngineHost) -> list[Route]:
    """Return the routes of models, chat completions and completions; ``/v1/responses`` is refused."""

    async def models(request: Request) -> Response:
        host.engine  # noqa: B018  # raises unless the engine is up
        name, length = host.settings.model_name, host.settings.context_length
        model = {"id": name, "object": "model", "created": 0, "owned_by": "slime", "root": name}
        return JSONBytes({"object": "list", "data": [{**model, "max_model_len": length}]})

    async def chat(request: Request) -> Response:
        return await answer(request, _Chat)

    async def completions(request: Request) -> Response:
        return await answer(request, _Completion)

    async def responses(request: Request) -> Response:
        raise NotServed("The embedded engine does not serve /v1/responses. Use /v1/chat/completions.")

    async def answer(request: Request, kind: type[_Form]) -> Response:
        body = await json_body(request)
        form = kind(body, host.engine)
        manager = host.engine.manager
        if form.generate.stream:
            return EventStream(form.chunks(manager.generate(form.generate)))
        outputs = await unless_gone(request.receive, lambda: manager.collect(form.generate))
        return JSONBytes(form.whole(outputs if isinstance(outputs, list) else [outputs]))

    return [
        Route("/v1/models", models, methods=["GET"]),
        Route("/v1/chat/completions", chat, methods=["POST"]),
        Route("/v1/completions", completions, methods=["POST"]),
        Route("/v1/responses", responses, methods=["POST"]),
    ]


class _Form(ABC):
    """One OpenAI request.

    It turns the request's body into the engine's request, and the engine's outputs into OpenAI's answer.
    """

    object_name = ""
    chunk_name = ""

    def __init__(self, body: JSONObject, engine: Engine) -> None:
        self._model = string(body, "model") or engine.settings.model_name
        self._incremental = engine.settings.incremental_streaming_output
        options = body.get("stream_options")
        self._include_usage = isinstance(options, dict) and bool(options.get("include_usage"))
        self._return_meta_info = boolean(body, "return_meta_info")
        if self._return_meta_info and boolean(body, "stream"):
            raise BadRequest("return_meta_info is not supported with streaming. Please set stream=false.")
        params = {name: body[name] for name in _SAME if body.get(name) is not None}
        params |= {new: body[old] for old, new in _RENAMED.items() if body.get(old) is not None}
        params |= forced_form(body)
        request = {
            **self.prompt(body, engine),
            "sampling_params": params,
            "stream": boolean(body, "stream"),
            "return_logprob": bool(body.get("logprobs")),
            "return_text_in_logprobs": True,
            **{name: body[name] for name in _ENGINE if body.get(name) is not None},
        }
        backend = engine.backend
        self.generate: GenerateBody = parse_generate(request, backend.vocab_size, backend.obeys)
        self._id = self.generate.requests[0].rid
        self._created = int(time.time())

    @abstractmethod
    def prompt(self, body: JSONObject, engine: Engine) -> dict[str, Any]:
        """Return the field ``text`` or ``input_ids`` for ``/generate``. Raises BadRequest."""

    @abstractmethod
    def choice(self, text: str, *, first: bool, whole: bool) -> dict[str, Any]:
        """Return the fields of a choice with ``text``.

        ``whole``: ``text`` is a whole message. Otherwise ``text`` is a delta, the first one if ``first``.
        """

    def _meta_info(self, output: dict[str, Any]) -> dict[str, Any]:
        return {"meta_info": output["meta_info"]} if self._return_meta_info else {}

    def _frame(self, name: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self._id,
            "object": name,
            "created": self._created,
            "model": self._model,
            "choices": choices,
        }

    def whole(self, outputs: list[dict[str, Any]]) -> dict[str, Any]:
        choices = [
            {
                "index": index,
                **self.choice(output["text"], first=True, whole=True),
                **_ending(output),
                **self._meta_info(output),
            }
            for index, output in enumerate(outputs)
        ]
        metas = [output["meta_info"] for output in outputs]
        return {**self._frame(self.object_name, choices), "usage": self._usage(dict(enumerate(metas)))}

    async def chunks(self, outputs: AsyncIterator[dict[str, Any]]) -> AsyncIterator[Mapping[str, Any]]:
        """Yield deltas, whether the engine streams cumulatively or incrementally."""
        told: dict[int, int] = {}
        metas: dict[int, dict[str, Any]] = {}
        async for output in outputs:
            index = output.get("index", 0)
            text = output["text"] if self._incremental else output["text"][told.get(index, 0) :]
            choice = self.choice(text, first=index not in told, whole=False)
            told[index] = told.get(index, 0) + len(text)
            scored = 0 if self._incremental else len(metas.get(index, {}).get("output_token_logprobs", ()))
            metas[index] = output["meta_info"]
            yield self._frame(self.chunk_name, [{"index": index, **choice, **_ending(output, scored)}])
        if self._include_usage:
            yield {**self._frame(self.chunk_name, []), "usage": self._usage(metas)}

    def _usage(self, metas: Mapping[int, dict[str, Any]]) -> dict[str, int]:
        """Count the tokens of all choices. As in SGLang, a prompt with several samples counts once."""
        samples = self.generate.requests[0].params.n
        prompt = sum(meta.get("prompt_tokens", 0) for index, meta in metas.items() if index % samples == 0)
        completion = sum(meta["completion_tokens"] for meta in metas.values())
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
        }


class _Chat(_Form):
    object_name = "chat.completion"
    chunk_name = "chat.completion.chunk"

    def prompt(self, body: JSONObject, engine: Engine) -> dict[str, Any]:
        messages = body.get("messages")
        if not isinstance(messages, list) or not messages:
            raise BadRequest("messages must be a list that is not empty.")
        input_ids = body.get("input_ids")
        if input_ids is not None:
            if not isinstance(input_ids, list) or any(isinstance(each, list) for each in input_ids):
                raise BadRequest("input_ids must be a list of token ids.")
            return {"input_ids": input_ids}
        try:
            text = engine.backend.tokenizer.apply_chat_template(
                messages, tools=body.get("tools"), add_generation_prompt=True
            )
        except (TemplateError, TypeError, RecursionError) as error:
            raise BadRequest(f"The messages do not fit the chat template: {error}") from None
        return {"text": text}

    def choice(self, text: str, *, first: bool, whole: bool) -> dict[str, Any]:
        message = {"role": "assistant", "content": text} if first else {"content": text}
        return {"message" if whole else "delta": message}


class _Completion(_Form):
    object_name = chunk_name = "text_completion"

    def prompt(self, body: JSONObject, engine: Engine) -> dict[str, Any]:
        prompt = body.get("prompt")
        is_ids = isinstance(prompt, list) and bool(prompt) and not isinstance(prompt[0], str)
        return {"input_ids" if is_ids else "text": prompt}

    def choice(self, text: str, *, first: bool, whole: bool) -> dict[str, Any]:
        return {"text": text}


def _ending(output: dict[str, Any], scored: int = 0) -> dict[str, Any]:
    """Return the finish reason, and the logprobs. Leave out the first ``scored`` logprobs, sent in earlier chunks."""
    meta = output["meta_info"]
    reason = meta["finish_reason"]
    ending: dict[str, Any] = {"finish_reason": reason and reason["type"], "logprobs": None}
    if reason and "matched" in reason:
        ending["matched_stop"] = reason["matched"]
    if "output_token_logprobs" in meta:
        new = meta["output_token_logprobs"][scored:]
        content = [{"token": text, "logprob": lp} for lp, _, text in new]
        ending["logprobs"] = {"content": content}
    return ending
