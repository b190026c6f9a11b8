"""A router that records routed experts, before engines whose experts are a function of token and position."""

from __future__ import annotations

import base64
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import httpx
import numpy as np
import numpy.typing as npt
import orjson

from plugged import until
from routers import Start
from slime_engine.app import make_app
from slime_engine.engine import EngineHost
from slime_engine.model import NgramModel
from slime_engine.moe import routed_experts
from slime_engine.settings import Settings
from slime_http.serving import serving
from slime_testing import Running

__all__ = ["MOE", "PROMPT", "SAMPLING", "SHAPE", "Replay", "replaying", "rows_in", "stream_of"]

PROMPT = "<|im_start|>user\nTell me a short story.<|im_end|>\n<|im_start|>assistant\n"
SHAPE = (3, 2)
MOE: dict[str, Any] = {"moe_layers": SHAPE[0], "moe_experts": 8, "moe_topk": SHAPE[1]}
SAMPLING = {"max_new_tokens": 8, "ignore_eos": True, "temperature": 1.0}


def rows_in(text: str) -> npt.NDArray[np.int32]:
    """The rows in base64 of int32, as SGLang's clients read them."""
    return np.frombuffer(base64.b64decode(text), "<i4").reshape(-1, *SHAPE)


def stream_of(body: bytes) -> list[dict[str, Any]]:
    """The events of a stream, without its end."""
    events = [line[6:] for line in body.split(b"\n") if line.startswith(b"data: ")]
    return [orjson.loads(event) for event in events if event != b"[DONE]"]


@dataclass
class Replay:
    """The router, its engines, and a client that rolls out."""

    running: Running
    hosts: list[EngineHost]
    urls: list[str]

    async def abort_at_engines(self) -> None:
        """Abort everything without the router's knowledge."""
        await self.at_engines("/abort_request", abort_all=True)

    async def at_engines(self, path: str, **body: Any) -> None:
        """Call all engines without the router's knowledge."""
        async with httpx.AsyncClient(trust_env=False, verify=False) as client:  # no TLS: its set-up is slow
            for url in self.urls:
                answer = await client.post(url + path, json=body)
                assert answer.status_code == 200, answer.text

    def journal(self, rid: str) -> list[dict[str, Any]]:
        return [entry.as_json() for host in self.hosts for entry in host.engine.journal.entries(rid)]

    def rows(self, tokens: list[int], start: int = 0) -> npt.NDArray[np.int32]:
        """The experts by the engines' own function."""
        return routed_experts(tokens, start, self.hosts[0].settings)

    async def generate(self, text: str, session: str | None = None, **body: Any) -> Any:
        body = {"text": text, "sampling_params": SAMPLING, **body}
        headers = {"x-session-id": session} if session is not None else {}
        answer = await self.running.client.post("/generate", json=body, headers=headers)
        assert answer.status_code == 200, answer.text
        return stream_of(answer.content) if body.get("stream") else answer.json()

    async def retrieve(self, text: str, session: str | None = None, **body: Any) -> Any:
        body = {"text": text, "return_routed_experts": True, **body}
        if session is not None:
            body["session_id"] = session
        answer = await self.running.client.post("/retrieve_from_text", json=body)
        assert answer.status_code == 200, answer.text
        return answer.json()

    async def check(self, text: str, session: str | None = None) -> Any:
        """The record of ``text``, whose experts must be exact, and those of its tokens."""
        answer = await self.retrieve(text, session)
        self.check_experts(answer)
        return answer

    def check_experts(self, answer: dict[str, Any]) -> None:
        """Assert that ``answer`` is exact, and that its experts are those of its tokens."""
        assert answer["exact"], answer["inexact_reason"]
        assert answer["experts_exact"], answer["routed_experts_reason"]
        wanted = self.rows(answer["tokens"])
        assert answer["routed_experts_shape"] == [answer["token_length"] - 1, *SHAPE]
        assert rows_in(answer["routed_experts"]).tolist() == wanted.tolist()

    async def stats(self) -> Any:
        return (await self.running.client.get("/cache_stats")).json()["token_rows"]


@asynccontextmanager
async def replaying(
    start: Start,
    model: NgramModel,
    checkpoint: str,
    *flags: str,
    engines: int = 1,
    order: Sequence[str] = ("radix_cache", "r3"),
    **settings: Any,
) -> AsyncIterator[Replay]:
    async with AsyncExitStack() as stack:
        urls, hosts = [], []
        for _ in range(engines):
            # Seeded: some samples end in several special tokens, before which the next turn continues.
            app = make_app(Settings(**(MOE | {"seed": 1} | settings)), lambda: model)
            urls.append(await stack.enter_async_context(serving(app, grace_s=0.1)))
            hosts.append(app.state.host)
        plugins = [word for name in order for word in ("--plugin", name)]
        flags = (*plugins, "--hf-checkpoint", checkpoint, *flags)
        running = await stack.enter_async_context(start(*flags, "--worker-urls", *urls))
        await until(lambda: running.router.pool.healthy == engines)
        yield Replay(running, hosts, urls)
