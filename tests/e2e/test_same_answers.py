"""An unmodified SGLang client gets through the router what the engine said, byte for byte."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx
import orjson
import pytest

from router_core.types import ASGIApp, Message, Receive, Scope, Send
from routers import BARE, Start
from slime_control.calls.endpoints import CALLS
from slime_control.calls.one_engine import refusal
from slime_control.calls.overview import QUESTIONS
from slime_engine.app import make_app
from slime_engine.settings import Settings
from slime_http.serving import serving
from slime_testing import Running

PROMPT = "<|im_start|>user\nCount to five, in 日本語 too. 🎉<|im_end|>\n<|im_start|>assistant\n"
IDS = [299, 1148, 903, 392, 13]
SHORT = {"max_new_tokens": 8, "sampling_seed": 7}


@dataclass
class EngineAnswer:
    """The engine's own answer: status, headers and body pieces."""

    status: int = 0
    headers: list[tuple[bytes, bytes]] = field(default_factory=list)
    pieces: list[bytes] = field(default_factory=list)


class Overheard:
    """An engine, with a record of every answer as it left the application."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self.said: list[EngineAnswer] = []

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        said = EngineAnswer()
        self.said.append(said)

        async def overheard(message: Message) -> None:
            if message["type"] == "http.response.start":
                said.status, said.headers = message["status"], list(message["headers"])
            else:
                said.pieces.append(message.get("body", b""))
            await send(message)

        await self._app(scope, receive, overheard)


# fmt: off
ASKED: dict[str, tuple[str, str, Any]] = {
    "text": ("POST", "/generate", {"text": PROMPT, "sampling_params": SHORT}),
    "ids": ("POST", "/generate", {"input_ids": IDS, "sampling_params": SHORT}),
    "batch of text": ("POST", "/generate", {"text": [PROMPT, "Once"], "sampling_params": SHORT}),
    "batch of ids": ("POST", "/generate", {"input_ids": [IDS, IDS[:2]], "sampling_params": [SHORT, SHORT]}),
    "n": ("POST", "/generate", {"text": PROMPT, "sampling_params": {**SHORT, "n": 3}}),
    "batch with n": ("POST", "/generate", {"text": ["a", "b"], "sampling_params": {**SHORT, "n": 2}}),
    "rid": ("POST", "/generate", {"text": PROMPT, "rid": "mine", "sampling_params": SHORT}),
    "stream": ("POST", "/generate", {"text": PROMPT, "stream": True, "sampling_params": SHORT}),
    "stream of a batch": ("POST", "/generate", {"text": ["a", "b"], "stream": True, "sampling_params": SHORT}),
    "stream of n": ("POST", "/generate", {"text": "a", "stream": True, "sampling_params": {**SHORT, "n": 2}}),
    "logprobs": ("POST", "/generate", {
        "text": PROMPT, "return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": 3,
        "return_text_in_logprobs": True, "sampling_params": SHORT}),
    "stream with logprobs": ("POST", "/generate", {
        "text": PROMPT, "return_logprob": True, "stream": True, "sampling_params": SHORT}),
    "routed experts": ("POST", "/generate", {
        "text": PROMPT, "return_routed_experts": True, "sampling_params": SHORT}),
    "prompt token ids": ("POST", "/generate", {
        "text": PROMPT, "return_prompt_token_ids": True, "sampling_params": SHORT}),
    "stop string": ("POST", "/generate", {"text": PROMPT, "sampling_params": {**SHORT, "stop": ["e", " "]}}),
    "special tokens kept": ("POST", "/generate", {
        "text": PROMPT, "sampling_params": {**SHORT, "skip_special_tokens": False, "no_stop_trim": True}}),
    "unknown fields": ("POST", "/generate", {
        "text": PROMPT, "sampling_params": SHORT, "priority": 3, "extra_key": {"deep": [1, None, 2.5e-7]}}),
    "neither text nor ids": ("POST", "/generate", {"sampling_params": SHORT}),
    "bad parameter": ("POST", "/generate", {"text": PROMPT, "sampling_params": {"temperature": -1}}),
    "too long": ("POST", "/generate", {"input_ids": IDS * 1000, "sampling_params": SHORT}),
    "not an object": ("POST", "/generate", [1, 2]),
    "health_generate": ("GET", "/health_generate", None),
    "model_info": ("GET", "/model_info", None),
    "get_model_info": ("GET", "/get_model_info", None),
    "server_info": ("GET", "/server_info", None),
    "get_server_info": ("GET", "/get_server_info", None),
    "loads": ("GET", "/v1/loads?include=core", None),
    "get_load": ("GET", "/get_load", None),
    "metrics": ("GET", "/metrics", None),
    "abort": ("POST", "/abort_request", {"rid": "nobody"}),
    "abort all": ("POST", "/abort_request", {"abort_all": True}),
    "pause": ("POST", "/pause_generation", {"mode": "in_place"}),
    "continue": ("POST", "/continue_generation", {}),
    "flush": ("POST", "/flush_cache", {}),
    "update from disk": ("POST", "/update_weights_from_disk", {"model_path": "m", "weight_version": "2"}),
    "update from tensor": ("POST", "/update_weights_from_tensor", {
        "serialized_named_tensors": ["x"], "weight_version": "3"}),
    "update from distributed": ("POST", "/update_weights_from_distributed", {
        "names": ["w"], "dtypes": ["bf16"], "shapes": [[1]], "weight_version": "4"}),
    "update from ipc": ("POST", "/update_weights_from_ipc", {"zmq_handles": {}, "weight_version": "5"}),
    "init group": ("POST", "/init_weights_update_group", {
        "master_address": "127.0.0.1", "master_port": 1, "rank_offset": 1, "world_size": 2,
        "group_name": "g", "backend": "gloo"}),
    "destroy group": ("POST", "/destroy_weights_update_group", {"group_name": "g"}),
    "update version": ("POST", "/update_weight_version", {"new_version": "6", "abort_all_requests": False}),
    "release memory": ("POST", "/release_memory_occupation", {}),
    "resume memory": ("POST", "/resume_memory_occupation", {}),
    "models": ("GET", "/v1/models", None),
    "chat": ("POST", "/v1/chat/completions", {
        "model": "m", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 8, "seed": 1}),
    "chat stream": ("POST", "/v1/chat/completions", {
        "model": "m", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 8, "stream": True}),
    "chat error": ("POST", "/v1/chat/completions", {"model": "m"}),
    "completions": ("POST", "/v1/completions", {"model": "m", "prompt": "Once", "max_tokens": 8}),
    "tokenize": ("POST", "/tokenize", {"prompt": PROMPT}),
    "detokenize": ("POST", "/detokenize", {"tokens": IDS}),
    "unknown path": ("GET", "/no/such/path?a=1&a=2", None),
    "wrong method": ("DELETE", "/model_info", None),
    "HEAD": ("HEAD", "/model_info", None),
}
# fmt: on


@asynccontextmanager
async def engine_and_router(start: Start, *flags: str) -> AsyncIterator[tuple[Overheard, Running]]:
    settings = Settings(moe_layers=2, moe_experts=8, moe_topk=2, context_length=2048)
    engine = Overheard(make_app(settings))
    async with (
        serving(engine) as url,
        start(*flags) as running,
    ):
        added = await running.client.post("/add_worker", json={"url": url})
        assert "warning" not in added.json()
        yield engine, running


async def ask(client: httpx.AsyncClient, name: str) -> tuple[httpx.Response, list[bytes]]:
    method, path, body = ASKED[name]
    content = None if body is None else orjson.dumps(body)
    async with client.stream(
        method, path, content=content, headers={"content-type": "application/json"} if content else {}
    ) as answer:
        return answer, [piece async for piece in answer.aiter_raw()]


def check(
    name: str, said: EngineAnswer, answer: httpx.Response, pieces: list[bytes], *more: tuple[bytes, bytes]
) -> None:
    """The answer is what the engine said, with ``more`` headers behind its own."""
    assert answer.status_code == said.status, name
    if name != "HEAD":
        assert b"".join(pieces) == b"".join(said.pieces), name
    # Server and Date are the connection's server's, not the application's; the rest is the engine's, in its order.
    own = (b"server", b"date", b"connection", b"transfer-encoding", b"content-length")
    got = [(key.lower(), value) for key, value in answer.headers.raw if key.lower() not in own]
    expected = [(key.lower(), value) for key, value in said.headers if key.lower() not in own]
    assert got == [*expected, *more], name


@pytest.mark.anyio
async def test_every_endpoint_and_shape_is_answered_as_the_engine_answers(start: Start) -> None:
    async with engine_and_router(start, *BARE) as (engine, running):
        statuses = set()
        for name in ASKED:
            engine.said.clear()
            answer, pieces = await ask(running.client, name)
            (said,) = engine.said
            check(name, said, answer, pieces)
            statuses.add(said.status)
        assert statuses >= {200, 400, 404, 405}
        assert [worker.in_flight for worker in running.router.pool] == [0]


@pytest.mark.anyio
async def test_answers_are_the_engines_bytes_with_all_plugins_too(start: Start, tokenizer_dir: str) -> None:
    flags = (
        "--disable-health-check",
        "--plugin",
        "radix_cache",
        "--hf-checkpoint",
        tokenizer_dir,
        "--plugin",
        "r3",
    )
    async with engine_and_router(start, *flags) as (engine, running):
        for name, (_, path, _) in ASKED.items():
            plain = path.partition("?")[0]
            if plain in CALLS.keys() | QUESTIONS or refusal(plain) is not None:
                continue  # all engines answer these, and the control plane says what each of them said
            engine.said.clear()
            answer, pieces = await ask(running.client, name)
            (said,) = engine.said
            unknown = path.startswith("/v1/") and "completions" in path and said.status < 400
            check(name, said, answer, pieces, *([(b"x-slime-exact", b"false")] if unknown else []))


@pytest.mark.anyio
async def test_with_the_radix_cache_a_client_gets_the_same_text_and_tokens(
    start: Start, tokenizer_dir: str
) -> None:
    """The same seeds, with and without: what the client asked for is the same; logprobs are there in addition."""
    answers: list[dict[str, Any]] = []
    for flags in ((), ("--plugin", "radix_cache", "--hf-checkpoint", tokenizer_dir)):
        async with engine_and_router(start, *flags) as (_, running):
            found = {}
            for name in ("text", "n", "batch of text", "stop string", "special tokens kept", "logprobs"):
                answer, pieces = await ask(running.client, name)
                assert answer.status_code == 200
                found[name] = orjson.loads(b"".join(pieces))
            answers.append(found)
    plain, cached = answers
    for name, one in plain.items():
        other = cached[name]
        for without, with_cache in zip(
            one if isinstance(one, list) else [one],
            other if isinstance(other, list) else [other],
            strict=True,
        ):
            assert with_cache["text"] == without["text"], name
            assert with_cache["output_ids"] == without["output_ids"], name
            for key in ("prompt_tokens", "completion_tokens", "finish_reason", "weight_version"):
                assert with_cache["meta_info"][key] == without["meta_info"][key], name


def test_a_stream_is_worth_its_name() -> None:
    """The table above is only as good as its shapes."""
    assert sum(isinstance(body, dict) and bool(body.get("stream")) for _, _, body in ASKED.values()) >= 4
    assert {path.partition("?")[0] for _, path, _ in ASKED.values()} >= {
        "/generate", "/abort_request", "/flush_cache", "/v1/chat/completions", "/v1/completions", "/tokenize",
    }  # fmt: skip
