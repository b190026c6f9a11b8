"""Mistakes in requests, each with the one message that cures it."""

from __future__ import annotations

from typing import Any

import pytest

from routers import Start

pytestmark = pytest.mark.anyio

#: ``(method and path, body, headers, status, part of the message)``, at a router with an engine and nothing else.
Row = tuple[str, Any, dict[str, str], int, str]

PLAIN: list[Row] = [
    (
        "POST /retrieve_from_text",
        {"text": "x"},
        {},
        501,
        "belongs to the plugin radix_cache, which is not loaded",
    ),
    (
        "POST /retrieve_from_messages_template",
        {"messages": []},
        {},
        501,
        "start the router with --plugin radix_cache",
    ),
    ("GET /trajectories/ada", None, {}, 501, "/trajectories/ada belongs to the plugin radix_cache"),
    ("GET /trajectories", None, {}, 501, "/trajectories belongs to the plugin radix_cache"),
    ("GET /cache_stats", None, {}, 501, "--plugin radix_cache --hf-checkpoint PATH"),
    ("GET /sessions/ada", None, {}, 501, "nothing is recorded without --plugin radix_cache"),
    ("POST /generate", b"{", {}, 400, "not JSON"),
    ("POST /generate", {"prompt": "x"}, {}, 400, "Either text or input_ids should be provided"),
    ("POST /generate", {"text": "x"}, {"x-session-id": "a" * 3000}, 400, "has at most 1024 bytes, got 3000"),
    (
        "POST /add_worker",
        None,
        {},
        400,
        'wanted a worker: "?url=http://host:port" or {"url": "http://host:port"}',
    ),
    ("POST /add_worker", b"{", {}, 400, "the body is not JSON"),
    (
        "POST /add_worker?url=10.0.0.7:30001",
        None,
        {},
        400,
        "wanted a worker URL such as http://10.0.0.7:30001",
    ),
    ("GET /add_worker?url=http://a:1", None, {}, 405, "Method Not Allowed: wanted POST"),
    ("POST /workers", {"uri": "http://a:1"}, {}, 400, 'wanted {"url": "http://host:port"}'),
    (
        "POST /workers",
        {"url": "http://a:1", "worker_type": "big"},
        {},
        400,
        "wanted one of regular, prefill, decode",
    ),
    ("DELETE /workers/nobody", None, {}, 404, "no worker 'nobody'; registered: http://127.0.0.1:"),
    (
        "POST /remove_worker?url=http://a:1",
        None,
        {},
        404,
        "no worker 'http://a:1'; registered: http://127.0.0.1:",
    ),
    ("POST /weight_version", {"version": "7"}, {}, 400, 'wanted {"weight_version": "7"}'),
    ("POST /update_weights_from_disk", {}, {}, 400, "model_path is required"),
    ("POST /load_balance", {}, {}, 404, "Not Found"),
    ("GET /generate", None, {}, 405, "Method Not Allowed: wanted POST"),
    ("GET /pause_generation", None, {}, 405, "Method Not Allowed: wanted POST"),
    ("POST /generate/", {"text": "x"}, {}, 404, "no engine has the path /generate/; did you mean /generate?"),
    ("GET /models", None, {}, 404, "did you mean /v1/models?"),
    ("POST /v1/v1/chat/completions", {}, {}, 404, "did you mean /v1/chat/completions?"),
    ("POST /generate", b"text=hello", {}, 400, "not JSON"),
    ("POST /generate", {"text": "x", "input_ids": [1]}, {}, 400, "Either text or input_ids"),
    ("POST /generate", {"text": "x", "sampling_params": {"max_tokens": 3}}, {}, 400, "Known: "),
    ("POST /genrate", {"text": "x"}, {}, 404, "no engine has the path /genrate; did you mean /generate?"),
    ("POST /chat/completions", {}, {}, 404, "did you mean /v1/chat/completions?"),
    ("POST /add_workers?url=http://a:1", {}, {}, 404, "did you mean /add_worker?"),
]
RECORDING: list[Row] = [
    ("POST /retrieve_from_text", None, {}, 400, "the body is not JSON"),
    ("POST /retrieve_from_text", {"txt": "x"}, {}, 400, '"text" must be a string, got nothing'),
    ("GET /retrieve_from_text", None, {}, 405, "Method Not Allowed: wanted POST"),
    ("GET /trajectories", None, {}, 404, "wanted the name of a session: GET /trajectories/SESSION"),
    ("GET /trajectories/ada", None, {}, 404, "no response is recorded under this name; check the name"),
    ("POST /v1/chat/completions", {}, {}, 400, "Missing required parameter: 'messages'"),
    (
        "POST /v1/chat/completions",
        {"messages": "hi"},
        {},
        400,
        "wanted a list of messages that is not empty, got 'hi'",
    ),
    ("POST /v1/completions", {"messages": []}, {}, 400, "Missing required parameter: 'prompt'"),
    ("GET /v1/chat/completions", None, {}, 405, "Method Not Allowed: wanted POST"),
    ("POST /v1/chat/completions/", {}, {}, 404, "did you mean /v1/chat/completions?"),
    ("POST /v1/chat/completions", {"prompt": "a"}, {}, 400, "Missing required parameter: 'messages'"),
    (
        "POST /v1/chat/completions",
        {"messages": [{"role": "user", "content": "a"}], "max_tokens": "5"},
        {},
        400,
        "wanted an integer of at least 1, got '5'",
    ),
    ("POST /v1/chat/completion", {}, {}, 404, "did you mean /v1/chat/completions?"),
    ("POST /retrieve_from_txt", {"text": "x"}, {}, 404, "did you mean /retrieve_from_text?"),
]
LOCKED: list[Row] = [
    (
        "POST /generate",
        {"text": "x"},
        {},
        401,
        "wanted the router's key: Authorization: Bearer KEY; got no Authorization header",
    ),
    ("POST /generate", {"text": "x"}, {"authorization": "key"}, 401, "got an Authorization header of another form"),
    ("POST /generate", {"text": "x"}, {"x-api-key": "key"}, 401, "Authorization: Bearer KEY; got no Authorization"),
    ("POST /generate", {"text": "x"}, {"authorization": "Bearer other"}, 401, "a key that the router does not know"),
    ("POST /flush_cache", None, {"authorization": "Bearer other"}, 401, "wanted the router's admin key: "),
    ("POST /add_worker?url=http://a:1", None, {"authorization": "Bearer key"}, 403, "the router's admin key"),
    (
        "POST /generate", {"text": "x"}, {"authorization": "Bearer key"}, 503,
        "no worker can take requests (registered: none; add one by POST /add_worker?url=http://HOST:PORT)",
    ),
]  # fmt: skip


@pytest.mark.parametrize(
    ("flags", "rows"),
    [
        (["--plugin", "engine"], PLAIN),
        (["--plugin", "openai", "--plugin", "radix_cache", "--plugin", "engine"], RECORDING),
        (["--api-key", "key", "--admin-api-key", "admin"], LOCKED),
    ],
    ids=["plain", "recording", "locked"],
)
async def test_each_mistake_is_told_with_its_cure(flags: list[str], rows: list[Row], start: Start) -> None:
    odd = []
    async with start(*flags) as running:
        for line, body, headers, status, message in rows:
            method, path = line.split()
            sent = (
                {"content": body} if isinstance(body, bytes) else {"json": body} if body is not None else {}
            )
            answer = await running.client.request(method, path, headers=headers, **sent)
            told = answer.text.replace('\\"', '"')
            if answer.status_code != status or message not in told:
                odd.append((line, answer.status_code, told[:300]))
    assert odd == []


async def test_a_chain_of_routers_passes_requests_for_records_on(start: Start) -> None:
    """A passthrough router does not answer for a plugin that the router behind it has."""
    behind = ("--plugin", "radix_cache", "--plugin", "engine")
    async with (
        start(*behind) as inner,
        start("--worker-type", "passthrough", "--worker-urls", inner.url) as outer,
    ):
        assert (await outer.client.get("/cache_stats")).json()["entries"] == 0
