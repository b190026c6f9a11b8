"""The name of a request that is its session: one order, for what is recorded and for what is asked back."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import pytest

from plugged import Recording
from router_core.cli import build
from router_core.errors import SettingsError
from routers import BARE
from slime_http.serving import serving

if TYPE_CHECKING:
    import httpx

    from routers import Start
    from slime_testing import Running

pytestmark = pytest.mark.anyio

#: The order in docs/plugins/sessions.md, strongest first.
ORDER = ("path", "header", "routing_key", "session_id", "metadata", "user", "api_key")
RECORDING = ("--plugin", "engine", "--engine-workers", "1", "--plugin", "radix_cache")
ALL = ("--session-from-user", "--session-from-api-key")
JWT = "eyJhbGciOiJub25lIn0.eyJzdWIiOiJhIn0.c2ln"


def request(path: str, names: dict[str, str], **body: Any) -> dict[str, Any]:
    """Return a client's request that names its session in each of these ways."""
    headers = {
        "header": ("x-session-id", names.get("header")),
        "routing_key": ("x-smg-routing-key", names.get("routing_key")),
        "api_key": ("authorization", f"Bearer {names['api_key']}" if "api_key" in names else None),
    }
    if "session_id" in names:
        body["session_id"] = names["session_id"]
    if "metadata" in names:
        body["metadata"] = {"session_id": names["metadata"]}
    if "user" in names:
        body["user"] = names["user"]
    return {
        "method": "POST",
        "url": f"/sessions/{names['path']}{path}" if "path" in names else path,
        "headers": {name: value for name, value in headers.values() if value is not None},
        "json": body,
    }


def test_the_order_is_the_documented_one() -> None:
    page = (Path(__file__).parents[2] / "docs" / "plugins" / "sessions.md").read_text()
    rows = re.findall(r"^\| (\d) \| (\w+) \|", page, re.MULTILINE)
    assert [name for _, name in rows] == list(ORDER)
    assert [int(place) for place, _ in rows] == [*range(1, len(ORDER) + 1)]


async def is_recorded(client: httpx.AsyncClient, session: str) -> bool:
    return (await client.get(f"/trajectories/{quote(session)}")).status_code == 200


@pytest.mark.parametrize("strongest", ORDER)
async def test_the_strongest_name_is_the_session(strongest: str, start: Start) -> None:
    names = {kind: f"by-{kind}" for kind in ORDER[ORDER.index(strongest) :]}
    async with start(*RECORDING, "--plugin", "openai", *ALL) as running:
        messages = [{"role": "user", "content": "Hi"}]
        for path, body in (
            ("/generate", {"text": "Hello"}),
            ("/v1/chat/completions", {"messages": messages}),
        ):
            limit = {"max_tokens": 2} if "messages" in body else {"sampling_params": {"max_new_tokens": 2}}
            answer = await running.client.request(**request(path, names, **body, **limit))
            assert answer.status_code == 200, answer.text
        found = (await running.client.get(f"/trajectories/by-{strongest}")).json()
        assert len(found["trajectories"]) == 2
        weaker = [kind for kind in names if kind != strongest]
        assert not any([await is_recorded(running.client, f"by-{kind}") for kind in weaker])
        if strongest == "path":
            return  # the routes that give tokens back are not below a session
        text = found["trajectories"][0]["text"]
        retrieved = await running.client.request(**request("/retrieve_from_text", names, text=text))
        assert 1 in retrieved.json()["loss_mask"], "retrieval found another session"
        other = dict.fromkeys(names, "another")
        retrieved = await running.client.request(**request("/retrieve_from_text", other, text=text))
        assert 1 not in retrieved.json()["loss_mask"]


async def session_of(running: Running, **names: str) -> str | None:
    """The session that retrieval and recording give a request, which are the same one."""
    body = {"text": "Hello", "sampling_params": {"max_new_tokens": 2}}
    answer = await running.client.request(**request("/generate", names, **body))
    assert answer.status_code == 200
    named = [name for name in names.values() if await is_recorded(running.client, name)]
    return named[0] if named else None


@pytest.mark.parametrize(
    "names",
    [{"user": "u"}, {"api_key": "k"}, {"metadata": ""}, {"metadata": "x" * 513}, {"metadata": "a\tb"}],
    ids=str,
)
async def test_without_being_told_to_these_name_none(names: dict[str, str], start: Start) -> None:
    async with start(*RECORDING) as running:
        assert await session_of(running, **names) is None


@pytest.mark.parametrize(
    "value", [None, 7, [], "text", {"session_id": 7}, {"session_id": None}, {"other": "a"}]
)
async def test_odd_metadata_names_none_and_is_no_error(value: Any, start: Start) -> None:
    async with start(*RECORDING) as running:
        for content in ({"text": "Hi", "metadata": value}, ["metadata", "user"]):
            answer = await running.client.post("/retrieve_from_text", json=content)
            assert answer.status_code == (200 if isinstance(content, dict) else 400)


async def test_keys_that_open_something_and_placeholders_name_none(start: Start) -> None:
    flags = (
        "--worker-api-key",
        "workers",
        "--admin-api-key",
        "admin",
        "--control-plane-api-keys",
        "a:b:user:bobs",
    )
    async with start(*RECORDING, *ALL, *flags) as running:
        for key in ("workers", "admin", "bobs", JWT, "EMPTY", "dummy", "sk-no-key-required", "x" * 513):
            assert await session_of(running, api_key=key) is None, key
        (worker,) = running.router.pool
        worker.api_key = "its-own"
        assert await session_of(running, api_key="its-own") is None
        assert await session_of(running, api_key="rollout-7") == "rollout-7"
        for authorization in ("Basic rollout-8", "Bearer", "Bearer rollout-8 more", "rollout-8"):
            headers = {"authorization": authorization}
            await running.client.post("/generate", json={"text": "Hi"}, headers=headers)
            assert not await is_recorded(running.client, "rollout-8")


async def test_a_key_that_all_clients_show_cannot_be_asked_to_name_sessions() -> None:
    with pytest.raises(SettingsError, match="--session-from-api-key: with --api-key"):
        build(["--session-from-api-key", "--api-key", "k"])
    build(["--no-default-plugins", "--plugin", "sessions", "--session-from-api-key"])  # nobody asks for a key


async def test_user_names_one_session_for_the_worker_too(start: Start) -> None:
    """The policies and the core see the same session name."""
    flags = ("--plugin", "engine", "--engine-workers", "3", "--policy", "round_robin")
    async with start(*flags, *ALL) as running:
        for name in ("a", "b", "a", "b", "a"):
            body = {"text": "Hi", "sampling_params": {"max_new_tokens": 1}, "user": name}
            await running.client.post("/generate", json=body)
        pool = running.router.pool
        assert None not in (pool.of_session("a"), pool.of_session("b"))


async def test_a_worker_gets_its_own_key_where_a_name_came_in_place_of_one(start: Start) -> None:
    worker = Recording()
    flags = (*BARE, "--plugin", "sessions", "--worker-api-key", "workers", *ALL)
    async with serving(worker) as url, start(*flags, "--worker-urls", url) as running:
        for key in ("rollout-7", JWT):
            headers = {"authorization": f"Bearer {key}"}
            await running.client.post("/generate", json={"text": "Hi"}, headers=headers)
        assert running.router.pool.of_session("rollout-7") is not None
    assert [got["authorization"] for _, got, _ in worker.requests] == ["Bearer workers", f"Bearer {JWT}"]


async def test_recorded_session_can_be_fetched(start: Start) -> None:
    async with start(*RECORDING) as running:
        for name in ("a" * 1024, "é" * 512, "a%2Fb", "a%", "harbor/hello:0", "a//b", "two words ☔", "?#"):
            body = {"text": "hi", "sampling_params": {"max_new_tokens": 2}, "session_id": name}
            assert (await running.client.post("/generate", json=body)).status_code == 200
            for escaped in (quote(name), quote(name, safe="")):
                answer = await running.client.get(f"/trajectories/{escaped}")
                assert len(answer.raise_for_status().json()["trajectories"]) == 1, name


async def test_a_name_that_is_too_long_or_that_no_path_holds_is_refused(start: Start) -> None:
    asked: dict[str, dict[str, Any]] = {
        "/generate": {"text": "hi"},
        "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}]},
        "/retrieve_from_text": {"text": "hi"},
    }
    async with start(*RECORDING) as running:
        for name in ("a" * 1025, "é" * 513, "a\nb", "a\0", "\x7f"):
            for path, body in asked.items():
                answer = await running.client.post(path, json={**body, "session_id": name})
                assert answer.status_code == 400, (path, name)
                assert "name of a session" in answer.json()["error"]["message"]
        stats = (await running.client.get("/cache_stats")).json()
        assert (stats["entries"], stats["untouched"]) == (0, {})
