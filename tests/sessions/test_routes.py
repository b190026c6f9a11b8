"""``/sessions``: what was created, what is kept, and what is gone."""

from __future__ import annotations

import threading
from functools import partial
from typing import TYPE_CHECKING, Any

import anyio
import pytest

from openai_.chat.chatting import chatting
from plugged import Recording, until
from sessions.speaking import samples_of, talk
from slime_http.serving import serving
from slime_radix_cache.retrieval.session_turns import SessionTurns
from slime_sessions.created import CreatedSessions

if TYPE_CHECKING:
    from routers import Start

pytestmark = pytest.mark.anyio

RECORDING = ("--plugin", "engine", "--engine-workers", "1", "--plugin", "radix_cache")


async def test_names_are_long_random_and_all_different(start: Start) -> None:
    async with start() as running:
        answers = [await running.client.post("/sessions", json={}) for _ in range(3)]
        answers.append(await running.client.post("/sessions"))
    names = {answer.json()["session_id"] for answer in answers}
    assert len(names) == 4
    assert all(len(name) == 32 and int(name, 16) for name in names)


async def test_a_client_may_bring_the_name(start: Start) -> None:
    """As rllm does, whose names have slashes."""
    async with start(*RECORDING) as running:
        name = "harbor/hello-world:0"
        answer = await running.client.post("/sessions", json={"session_id": name, "metadata": {"a": 1}})
        assert answer.json() == {"session_id": name}
        assert (await running.client.get(f"/sessions/{name}")).json()["session_id"] == name
        assert (await running.client.delete(f"/sessions/{name}")).status_code == 204
        assert (await running.client.get(f"/sessions/{name}")).status_code == 404


@pytest.mark.parametrize(
    ("body", "told"),
    [
        ([], "JSON object"),
        ({"session_id": 7}, "string"),
        ({"session_id": ""}, "got 0"),
        ({"session_id": "x" * 513}, "got 513"),
        ({"session_id": "a/../b"}, "'..'"),
        ({"session_id": "a\n"}, "control"),
        ({"sampling_params": {"temperature": 0.5}}, "with each request"),
    ],
)
async def test_invalid_creation_is_refused(body: Any, told: str, start: Start) -> None:
    async with start() as running:
        answer = await running.client.post("/sessions", json=body)
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "BAD_REQUEST")
        assert told in answer.json()["error"]["message"]
        assert (await running.client.post("/sessions", content=b"{")).status_code == 400


async def test_an_unknown_session_is_not_found(start: Start) -> None:
    async with start(*RECORDING) as running:
        for method, path in (
            ("GET", "/sessions/a"),
            ("DELETE", "/sessions/a"),
            ("POST", "/sessions/a/samples"),
        ):
            answer = await running.client.request(method, path)
            assert (answer.status_code, answer.json()["error"]["code"]) == (404, "SESSION_NOT_FOUND")


async def test_a_wrong_method_is_told_all_methods(start: Start) -> None:
    async with start() as running:
        answer = await running.client.put("/sessions/a")
        assert answer.status_code == 405
        assert set(answer.headers["allow"].split(", ")) == {"DELETE", "GET", "HEAD"}


async def test_without_a_recorder_there_are_sessions_and_no_records(start: Start) -> None:
    worker = Recording()
    async with serving(worker) as url, start("--worker-urls", url) as running:
        name = (await running.client.post("/sessions")).json()["session_id"]
        assert (
            await running.client.post(f"/sessions/{name}/v1/chat/completions", json={})
        ).status_code == 200
        for method, path in (("GET", ""), ("POST", "/samples")):
            answer = await running.client.request(method, f"/sessions/{name}{path}")
            assert (answer.status_code, answer.json()["error"]["code"]) == (501, "PLUGIN_NOT_LOADED")
        assert (await running.client.delete(f"/sessions/{name}")).status_code == 204
        assert (await running.client.delete(f"/sessions/{name}")).status_code == 404


async def test_records_are_what_the_engine_got_and_gave(start: Start) -> None:
    async with chatting(start, "First.", "Second.") as chat:
        name = (await chat.post("/sessions"))["session_id"]
        assert (await chat.running.client.get(f"/sessions/{name}")).json() == {
            "session_id": name,
            "records": [],
            "metadata": {"accumulated_token_ids": [], "max_trim_tokens": 0, "complete": True},
        }
        await talk(chat, f"/sessions/{name}", "Why?", "And?")
        shown = (await chat.running.client.get(f"/sessions/{name}")).json()
        assert [record["parent"] for record in shown["records"]] == [None, 0]
        for record, entry, text in zip(shown["records"], chat.entries, ("First.", "Second."), strict=True):
            assert record["exact"]
            assert record["timestamp"] == 0.0, "miles' client refuses null"
            assert record["request"]["input_ids"] == list(entry.input_ids)
            (choice,) = record["response"]["choices"]
            meta = choice["meta_info"]
            pairs = zip(entry.output_logprobs, entry.output_ids, strict=True)
            assert meta["output_token_logprobs"] == [[logprob, token, None] for logprob, token in pairs]
            assert (meta["completion_tokens"], meta["weight_version"]) == (len(entry.output_ids), "default")
            assert (choice["message"]["content"], choice["finish_reason"]) == (text, "stop")
        last = chat.entries[-1]
        assert shown["metadata"]["accumulated_token_ids"] == [*last.input_ids, *last.output_ids]


async def test_long_records_are_written_in_a_thread_without_the_index(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other requests divide its edges meanwhile: a text that is read there may have a piece twice."""
    threads = {"text": set[int](), "context": set[int]()}
    for name, seen in threads.items():
        method = getattr(SessionTurns, name)

        def noting(*args: Any, method: Any = method, seen: set[int] = seen) -> Any:
            seen.add(threading.get_ident())
            return method(*args)

        monkeypatch.setattr(SessionTurns, name, noting)
    async with start(*RECORDING) as running:
        for number in range(9):
            one = {"text": f"Turn {number}", "sampling_params": {"max_new_tokens": 1}}
            assert (await running.client.post("/sessions/a/generate", json=one)).status_code == 200
        records = (await running.client.get("/sessions/a")).json()["records"]
        assert len(records) == 9
    assert threads["text"] == {threading.get_ident()}
    assert threading.get_ident() not in threads["context"]


async def test_a_deleted_session_is_gone_and_asks_nothing_more(start: Start) -> None:
    async with chatting(start, "Well.") as chat:
        name = (await chat.post("/sessions"))["session_id"]
        await talk(chat, f"/sessions/{name}", "Why?", "And?")
        await talk(chat, "/sessions/other", "Why?")
        before = (await chat.running.client.get("/cache_stats")).json()
        assert (await chat.running.client.delete(f"/sessions/{name}")).status_code == 204
        shown = await chat.running.client.get(f"/sessions/{name}")
        told = f"no session {name!r}: deleted, or neither created nor recorded"
        assert (shown.status_code, shown.json()["error"]["message"]) == (404, told)
        after = (await chat.running.client.get("/cache_stats")).json()
        assert after["tokens"] < before["tokens"]
        assert after["evictions"]["deleted"] >= 2
        for path, headers in ((f"/sessions/{name}", {}), ("", {"x-session-id": name})):
            answer = await chat.running.client.post(
                f"{path}/v1/chat/completions", json={"messages": []}, headers=headers
            )
            assert (answer.status_code, answer.json()["error"]["code"]) == (404, "SESSION_NOT_FOUND")
        (record,) = await chat.trajectories("other")
        assert (record["exact"], record["tokens"]) == (
            True,
            [*chat.entries[2].input_ids, *chat.entries[2].output_ids],
        )


@pytest.mark.parametrize("named", ["x-smg-routing-key", "session_id", "metadata", "user", "authorization"])
async def test_a_deleted_session_is_refused_by_whatever_names_it(named: str, start: Start) -> None:
    worker = Recording()
    flags = ("--session-from-user", "--session-from-api-key")
    async with serving(worker) as url, start("--worker-urls", url, *flags) as running:
        name = (await running.client.post("/sessions")).json()["session_id"]
        headers, body = {}, {"text": "Hi"}
        if named in ("session_id", "user"):
            body[named] = name
        elif named == "metadata":
            body = {**body, "metadata": {"session_id": name}}  # type: ignore[dict-item]  # JSON
        else:
            headers[named] = name if named != "authorization" else f"Bearer {name}"
        answers = []
        for _ in range(2):
            answers.append(await running.client.post("/generate", json=body, headers=headers))
            await running.client.delete(f"/sessions/{name}")
    assert [answer.status_code for answer in answers] == [200, 404]
    assert answers[1].json()["error"]["code"] == "SESSION_NOT_FOUND"
    assert len([path for path, *_ in worker.requests if path == "/generate"]) == 1


async def test_answer_after_a_deletion_is_no_sample_of_the_next_session(start: Start) -> None:
    """Of the same name, which then counts as not complete."""
    async with chatting(start, "word " * 2000, tokens_per_second=100) as chat:
        client, one = chat.running.client, {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 20}
        await client.post("/sessions", json={"session_id": "a"})
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(partial(client.post, "/sessions/a/v1/chat/completions", json=one))
            await until(lambda: bool(chat.entries))
            assert (await client.delete("/sessions/a")).status_code == 204
            assert (await client.post("/sessions", json={"session_id": "a"})).status_code == 200
        shown = (await client.get("/sessions/a")).json()
        assert (len(shown["records"]), shown["metadata"]["complete"]) == (1, False)
        assert (await client.post("/sessions/a/samples")).status_code == 422


async def test_request_waiting_while_its_session_is_deleted_is_no_sample(
    start: Start,
) -> None:
    flags = ("--max-concurrent-requests", "1", "--queue-size", "1")
    async with chatting(start, "word " * 20, tokens_per_second=100, flags=flags) as chat:
        client, one = chat.running.client, {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 20}
        await client.post("/sessions", json={"session_id": "a"})
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(partial(client.post, "/v1/chat/completions", json=one))
            await until(lambda: bool(chat.entries))
            tasks.start_soon(partial(client.post, "/sessions/a/v1/chat/completions", json=one))
            await anyio.sleep(0.05)  # by then it waits
            assert (await client.delete("/sessions/a")).status_code == 204
            await client.post("/sessions", json={"session_id": "a"})
        assert len(chat.entries) == 2
        assert (await client.get("/sessions/a")).json()["metadata"]["complete"] is False
        assert (await client.post("/sessions/a/samples")).status_code == 422


async def test_a_session_that_another_one_goes_on_from_stays_as_far_as_it_must(start: Start) -> None:
    async with start(*RECORDING) as running:
        client = running.client
        one = {"text": "Hello", "sampling_params": {"max_new_tokens": 4}}
        said = (await client.post("/sessions/a/generate", json=one)).json()
        more = {**one, "text": "Hello" + said["text"] + " and"}
        await client.post("/sessions/b/generate", json=more)
        before = (await client.get("/trajectories/b")).json()["trajectories"]
        assert (await client.delete("/sessions/a")).status_code == 204
        assert (await client.get("/trajectories/b")).json()["trajectories"] == before
        assert before[0]["exact"]
        assert (await client.delete("/sessions/b")).status_code == 204
        assert (await client.get("/trajectories/b")).status_code == 404


async def test_a_deletion_is_in_the_log_too(start: Start, tmp_path: Any) -> None:
    flags = (*RECORDING, "--trajectory-log", str(tmp_path))
    one = {"text": "Hello", "sampling_params": {"max_new_tokens": 4}}
    async with start(*flags) as running:
        for name in ("a", "b"):
            await running.client.post(f"/sessions/{name}/generate", json=one)
        assert (await running.client.delete("/sessions/a")).status_code == 204
        before = await samples_of(running.client, "b")
    async with start(*flags) as running:
        assert await samples_of(running.client, "b") == before
        assert (await running.client.get("/trajectories/a")).status_code == 404
        assert (await running.client.get("/trajectories/b")).json()["complete"] is True
        answer = await running.client.post("/sessions/b/generate", json=one)
        assert answer.status_code == 200


def test_the_memory_of_names_is_bounded() -> None:
    created = CreatedSessions(limit=3)
    names = [created.create() for _ in range(5)]
    assert [name in created for name in names] == [False, False, True, True, True]
    for name in names:
        created.delete(name)
    assert [name in created.deleted for name in names] == [False, False, True, True, True]
    assert created.create(names[4]) == names[4]
    assert names[4] not in created.deleted
