"""Real answers are what the description says, each event of a stream too."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import pytest

from openai_.chat.scripted import scripted
from openai_.chat_models.families import QWEN3
from openai_.chat_models.steered import by_text, speaking
from surface.description import content_of, documents, key_of, operations

if TYPE_CHECKING:
    import httpx

    from routers import Start
    from slime_testing import Running

pytestmark = pytest.mark.anyio

THOUGHTS = "<think>\nhm\n</think>\n\n"
CALL = '<tool_call>\n{"name": "find", "arguments": {"what": "é 😀"}}\n</tool_call>'
FORCED = '[{"name": "find", "parameters": {"what": "x"}}]'
FIND = {"type": "function", "function": {"name": "find", "parameters": {"type": "object"}}}
GREETING = "Hello, how are you?"
#: However it is spelt.
ENOUGH = {"max_tokens": 1000}
#: All that a trainer can ask for.
TRAINER = {"return_token_ids": True, "return_routed_experts": True}
#: All that a session server asks for.
SERVER = {
    "input_ids": QWEN3.tokenizer.encode(
        "<|im_start|>user\nfor a session server<|im_end|>\n<|im_start|>assistant\n"
    ),
    "return_meta_info": True,
    "return_routed_experts": True,
    "return_indexer_topk": True,
}

#: By what the user says: what the engine says, and what else is asked.
CHATS: dict[str, tuple[str, dict[str, Any]]] = {
    "text": ("Hello.", {}),
    "thoughts": (f"{THOUGHTS}Hello.", {}),
    "two of them": ("Hello.", {"n": 2}),
    "cut short": (GREETING, {"max_tokens": 2}),
    "stopped": (GREETING, {"stop": "how"}),
    "stopped by a token": ("Hello.", {"stop_token_ids": [QWEN3.tokenizer.encode(".")[0]]}),
    "a call": (f"{THOUGHTS}{CALL}", {"tools": [FIND]}),
    "calls": (f"Well.\n{CALL}\n{CALL}", {"tools": [FIND]}),
    "a call that had to be": (FORCED, {"tools": [FIND], "tool_choice": "required"}),
    "logprobs": (f"{THOUGHTS}é 😀", {"logprobs": True, "top_logprobs": 3}),
    "for a trainer": (f"{THOUGHTS}é 😀", TRAINER),
    "for a session server": (CALL, {"tools": [FIND], "n": 2, "logprobs": True, **SERVER}),
    "all at once": (f"{THOUGHTS}{CALL}", {"tools": [FIND], "n": 2, "logprobs": True, **TRAINER}),
}
COMPLETIONS: list[dict[str, Any]] = [
    {"prompt": "Hi"},
    {"prompt": QWEN3.tokenizer.encode("Hi")},
    {"prompt": ["Hi", "Ho"], "n": 2},
    {"prompt": "Hi", "logprobs": 2},
    {"prompt": "Hi", "logprobs": 1, "echo": True},
    {"prompt": "Hi", "stop": ["how"]},
    {"prompt": ["Hi", "Ho"], "logprobs": 0, **TRAINER},
]


def check(method: str, path: str, answer: httpx.Response) -> list[Any]:
    """The documents of ``answer``, which fit what is described for its status."""
    kind = answer.headers.get("content-type", "")
    return documents(method, path, answer.status_code, kind, answer.content)


@asynccontextmanager
async def answering(start: Start, *flags: str, **settings: Any) -> AsyncIterator[Running]:
    """A router before an engine that answers each question of CHATS, and everything else with GREETING."""

    def reply(text: str) -> list[str]:
        asked = text.rpartition("<|im_start|>user\n")[2].partition("<|im_end|>")[0]
        return [CHATS[asked][0] if asked in CHATS else GREETING]

    async with (
        speaking(QWEN3, by_text(QWEN3.tokenizer, reply), moe_layers=2, **settings) as engine,
        start(
            *("--plugin", "radix_cache", "--hf-checkpoint", engine.checkpoint),
            *("--plugin", "openai", "--worker-urls", engine.url, *flags),
            *("--plugin", "tiered_store", "--store-memory-bytes", "10000000"),
        ) as running,
    ):
        yield running


async def both_ways(
    running: Running, path: str, body: dict[str, Any]
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The whole answer, and the chunks of a streamed one."""
    (whole,) = check("POST", path, await running.client.post(path, json=body))
    streamed = {**body, "stream": True, "stream_options": {"include_usage": True}}
    chunks = check("POST", path, await running.client.post(path, json=streamed))
    return whole, chunks


def keys_of_choices(*documents: dict[str, Any]) -> set[str]:
    return {key for document in documents for choice in document["choices"] for key in choice}


async def test_chats_are_answered_as_described(start: Start) -> None:
    async with answering(start) as running:
        for kind, (_, asked) in CHATS.items():
            body = {"messages": [{"role": "user", "content": kind}], **ENOUGH, **asked}
            whole, chunks = await both_ways(running, "/v1/chat/completions", body)
            assert whole.keys() == {key for chunk in chunks for key in chunk}, kind
            assert keys_of_choices(whole) - {"message"} == keys_of_choices(*chunks) - {"delta"}, kind


async def test_completions_are_answered_as_described(start: Start) -> None:
    async with answering(start) as running:
        for asked in COMPLETIONS:
            whole, chunks = await both_ways(running, "/v1/completions", {**ENOUGH, **asked})
            assert whole.keys() == {key for chunk in chunks for key in chunk}, asked
            assert keys_of_choices(whole) == keys_of_choices(*chunks), asked


PLAIN: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi"}]}),
    ("/v1/completions", {"prompt": "Hi"}),
]


@pytest.mark.parametrize(("path", "asked"), PLAIN)
async def test_an_abort_between_two_weights_is_told_as_described(
    start: Start, path: str, asked: dict[str, Any]
) -> None:
    versions = [{"version": "7", "start": 0, "end": 1}, {"version": "8", "start": 1, "end": 2}]
    meta = {
        "completion_tokens": 2,
        "finish_reason": {"type": "abort", "message": "paused"},
        "output_token_logprobs": [[-0.5, 39, None], [-0.25, 72, None]],
        "weight_version": "8",
        "weight_versions": versions,
    }
    said = {"text": "Hi", "output_ids": [39, 72], "meta_info": meta}
    async with scripted(start, said, said, flags=("--abort-retries", "0")) as (running, _):
        whole, chunks = await both_ways(running, path, {**asked, **TRAINER})
    (ending,) = (
        chunk["choices"][0] for chunk in chunks if chunk["choices"] and chunk["choices"][0]["finish_reason"]
    )
    for choice in (whole["choices"][0], ending):
        assert choice["engine_finish_reason"] == meta["finish_reason"]
        assert choice["weight_versions"] == versions


@pytest.mark.parametrize(("path", "asked"), PLAIN)
async def test_a_stream_that_breaks_says_so_as_described(
    start: Start, path: str, asked: dict[str, Any]
) -> None:
    meta = {"completion_tokens": 1}
    events: list[dict[str, Any]] = [{"text": "H", "output_ids": [39], "meta_info": meta}]
    events.append({"error": {"message": "out of memory"}})
    async with scripted(start, events) as (running, _):
        *_, last = check("POST", path, await running.client.post(path, json={**asked, "stream": True}))
    assert last["error"]["message"] == "out of memory"


async def test_each_status_of_each_route_comes_as_described(start: Start) -> None:
    """But the 500 of plugins that fail, which none here does; keys and what all engines answer have other tests."""
    seen: set[tuple[str, str, str]] = set()

    async def ask(method: str, path: str, status: int, filled: str | None = None, **more: Any) -> None:
        answer = await running.client.request(method, filled or path, **more)
        assert answer.status_code == status, answer.text
        check(method, path, answer)
        seen.add((method, path, key_of(method, path, status)))

    uncontrolled = [each for each in operations() if each[2]["tags"][0] not in ("control", "fleet")]
    posts = [path for method, path, _ in uncontrolled if method == "POST"]
    messages = [{"role": "user", "content": "Hi"}]
    hello = {"messages": messages, "session_id": "a b", "n": 2}
    async with answering(start, "--max-payload-size", "5000", context_length=200) as running:
        (worker,) = running.router.pool
        for path in posts:
            await ask("POST", path, 400, content=b"{")
            await ask("POST", path, 413, content=b" " * 5001)
        for path, prompt in (
            ("chat/completions", {"messages": [{"role": "user", "content": "Hi " * 200}]}),
            ("completions", {"prompt": "Hi " * 200}),
        ):
            await ask("POST", f"/v1/{path}", 400, json=prompt)  # the engine's own: its context is shorter
        await ask("POST", "/v1/chat/completions", 200, json=hello)
        await ask("POST", "/v1/completions", 200, json={"prompt": "Hi"})
        await ask("GET", "/v1/models", 200)
        await ask("GET", "/v1/models/{id}", 200, f"/v1/models/{QWEN3.name}")
        await ask("GET", "/v1/models/{id}", 404, "/v1/models/some/other")
        for body in (
            {"text": "Hi"},
            {"text": ""},
            {"text": "Hi", "return_logp": False, "return_routed_experts": True},
        ):
            await ask("POST", "/retrieve_from_text", 200, json=body)
        said = {"role": "assistant", "content": GREETING}
        for each in (messages, [*messages, said]):
            await ask("POST", "/retrieve_from_messages_template", 200, json={"messages": each})
        await ask("GET", "/trajectories/{session}", 200, "/trajectories/a%20b")
        await ask("GET", "/trajectories/{session}", 200, "/trajectories/a%20b?return_routed_experts=true")
        await ask("GET", "/trajectories/{session}", 400, "/trajectories/a%20b?return_routed_experts=yes")
        await ask("GET", "/trajectories/{session}", 404, "/trajectories/b")
        await ask("GET", "/trajectories", 404)
        await ask("GET", "/cache_stats", 200)
        await ask("GET", "/store", 200)
        for body in ({}, {"session_id": "c"}):
            await ask("POST", "/sessions", 200, json=body)
        session, samples = "/sessions/{session}", "/sessions/{session}/samples"
        lossy = {"text": "Hi", "return_logprob": False, "sampling_params": {"max_new_tokens": 2}}
        await running.client.post("/sessions/d/generate", json=lossy)
        for name in ("c", "a%20b", "d"):
            await ask("GET", session, 200, f"/sessions/{name}")
            status = 422 if name == "d" else 200
            await ask("POST", samples, status, f"/sessions/{name}/samples", json={"metadata": {"reward": 1}})
            await ask("DELETE", session, 204, f"/sessions/{name}")
        for method, path in (("GET", session), ("DELETE", session), ("POST", samples)):
            await ask(method, path, 404, path.replace("{session}", "c"))
        for path in (
            "/list_workers",
            "/workers",
            "/health",
            "/liveness",
            "/metrics",
            "/openapi.json",
            "/readiness",
            "/weight_version",
        ):
            await ask("GET", path, 200)
        for version in ("7", 8):
            await ask("POST", "/weight_version", 200, json={"weight_version": version})
        for name in (worker.id, worker.url):
            await ask("GET", "/workers/{worker_id}", 200, f"/workers/{name}")
        dead = "http://127.0.0.1:1"  # nobody listens there
        for url in (worker.url, dead):
            await ask("POST", "/add_worker", 200, params={"url": url})
            await ask("POST", "/workers", 202, json={"url": url, "labels": {"a": "b"}})
        proxied = {"url": "http://127.0.0.1:2", "worker_type": "passthrough"}
        for path in ("/add_worker", "/workers"):
            await ask("POST", path, 409, json=proxied)
        change = f"/workers/{worker.id}"
        await ask("PUT", "/workers/{worker_id}", 202, change, json={"labels": {"a": "c"}, "odd": 1})
        await ask("PUT", "/workers/{worker_id}", 400, change, json={"url": dead})
        await ask("PUT", "/workers/{worker_id}", 413, change, content=b" " * 5001)
        await ask("POST", "/remove_worker", 200, json={"url": dead})
        await ask("POST", "/remove_worker", 404, json={"url": dead})
        await ask("DELETE", "/workers/{worker_id}", 400, f"/workers/{worker.id}?drain=perhaps")
        await ask("DELETE", "/workers/{worker_id}", 202, f"/workers/{worker.id}?drain=false")
        for method in ("GET", "PUT", "DELETE"):
            await ask(method, "/workers/{worker_id}", 404, f"/workers/{worker.id}")
        await ask("GET", "/readiness", 503)
        await ask("GET", "/weight_version", 200)
        await ask("POST", "/v1/chat/completions", 503, json=hello)
        await ask("POST", "/v1/completions", 503, json={"prompt": "Hi"})
    described = {(method, path, status) for method, path, one in uncontrolled for status in one["responses"]}
    of_keys = {each for each in described if each[2] in ("401", "403")}
    unrecorded = {("GET", session, "501"), ("POST", samples, "501")}
    assert described - seen == {("POST", "/weight_version", "500"), *of_keys, *unrecorded}


async def test_refusals_by_limits_are_as_described(start: Start) -> None:
    """The slot is held by one that waits for generation to continue."""
    path, hello = "/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi"}]}
    limits = ["--max-concurrent-requests", "1", "--queue-size", "1", "--queue-timeout-secs", "0.2"]
    async with answering(start, *limits, "--pause-queue-timeout-s", "1") as running:
        await running.client.post("/pause_generation", json={"mode": "retract"})
        answers = await asyncio.gather(*(running.client.post(path, json=hello) for _ in range(3)))
    assert sorted(answer.status_code for answer in answers) == [408, 429, 503]
    for answer in answers:
        check("POST", path, answer)
    (full,) = (answer for answer in answers if answer.status_code == 429)
    assert full.headers["retry-after"] == "1"


async def test_the_other_formats_are_those_described(start: Start) -> None:
    async with answering(start) as running:
        hello = {"messages": [{"role": "user", "content": "Hi"}], "session_id": "s"}
        await running.client.post("/v1/chat/completions", json=hello)
        for method, path, body in (
            ("POST", "/retrieve_from_text", {"text": "Hi"}),
            ("POST", "/retrieve_from_messages_template", hello),
            ("GET", "/trajectories/{session}", None),
        ):
            for media in content_of(method, path, 200):
                filled = path.replace("{session}", "s")
                answer = await running.client.request(method, filled, json=body, headers={"Accept": media})
                assert (answer.status_code, answer.headers["content-type"]) == (200, media)
